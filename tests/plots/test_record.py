"""Records as pieces and links, and as text: by hand, and against the partition they came from."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest

import deltaspan as ds
from deltaspan.plan import Cut, segment_table
from deltaspan.plots.record import caption, links_of, listed, pieces_of, segment_cuts
from deltaspan.plots.text import partition_picture, sparkline

# docs [100, 3] on two ranks, zigzag per document: three pieces of one token, and an empty one
WORKED = {
    "pack": None, "lengths": [100, 3], "cp": 2, "layout": "zigzag_per_document", "rule": "one", "hv": 4, "sms": 4,
    "fragments": [[[0, 0, 25], [0, 75, 25], [1, 0, 1], [1, 3, 0]], [[0, 25, 25], [0, 50, 25], [1, 1, 1], [1, 2, 1]]],
    "segments": [1, 1],
}  # fmt: skip


def record(lengths: Sequence[int], cp: int, layout: str, **more: Any) -> dict[str, Any]:
    part = ds.partition([0, *accumulate(lengths)], cp, layout=layout)
    fragments = [[list(fragment[:3]) for fragment in row] for row in part.fragments]
    made = {"pack": None, "lengths": list(lengths), "cp": cp, "layout": layout, "rule": "one", "hv": 48, "sms": 132}
    return made | {"fragments": fragments, "segments": [1] * cp} | more


def test_pieces_and_links_of_a_worked_record() -> None:
    pieces = pieces_of(WORKED)
    assert [(p.doc, p.offset, p.rank, p.start, p.number, p.of) for p in pieces] == [
        (0, 0, 0, 0, 1, 4), (0, 25, 1, 0, 2, 4), (0, 50, 1, 25, 3, 4), (0, 75, 0, 25, 4, 4),
        (1, 0, 0, 50, 1, 3), (1, 1, 1, 50, 2, 3), (1, 2, 1, 51, 3, 3),
    ]  # fmt: skip
    assert [link.crosses for link in links_of(pieces)] == [True, False, True, True, False]
    assert caption(WORKED) == "2 documents, 103 tokens, on 2 ranks, layout zigzag_per_document"


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
def test_links_are_the_partitions_own(layout: str) -> None:
    lengths = [5, 0, 130, 1, 64, 700]
    part = ds.partition([0, *accumulate(lengths)], 3, layout=layout)
    links = links_of(pieces_of(record(lengths, 3, layout)))
    found = sorted((link.source.rank, link.target.rank, link.source.doc) for link in links)
    table, left = part.table, part.crossing_out
    rows = zip(table.rank[left], table.rank[table.next[left]], table.doc[left], strict=True)
    assert found == sorted(rows) and len(found) >= 2


@pytest.mark.parametrize("segments", [1, 2, 3, 7, 64, (2, 1, 2)])
def test_segments_are_the_planners_own(segments: Cut) -> None:
    lengths = [1, 64, 65, 700, 0, 1000]
    part = ds.partition([0, *accumulate(lengths)], 2, layout="zigzag")
    for rank in range(2):
        table, rows = segment_table(part, rank, segments), part.rows(rank)
        first_chunk = {fragment: first for fragment, first in zip(table.fragment[::-1], table.first[::-1], strict=True)}
        wanted = [
            part.table.local_start[rows][fragment] + 64 * (first - first_chunk[fragment])
            for fragment, first in zip(table.fragment, table.first, strict=True)
            if first != first_chunk[fragment]
        ]
        pieces = sorted((p for p in pieces_of(record(lengths, 2, "zigzag")) if p.rank == rank), key=lambda p: p.start)
        assert [cut for piece in pieces for cut in segment_cuts(piece, segments)] == wanted
        assert bool(wanted) == (segments != 1)


def test_ranks_are_listed_as_one_says_them() -> None:
    assert listed([3]) == "rank 3" and listed([0, 2]) == "ranks 0 and 2" and listed([0, 1, 5]) == "ranks 0, 1 and 5"
    assert listed(range(4, 20)) == "ranks 4, 5, 6 and 13 more"


def test_the_text_picture_shows_documents_and_seams() -> None:
    # two pieces of document 0 touch on rank 1: `=` on both sides
    _, *rows, legend, seams = (line.plain for line in partition_picture(WORKED, columns=59))
    assert rows == ["rank 0 " + "0" * 24 + "><" + "0" * 24 + "1", "rank 1 <" + "0" * 23 + "==" + "0" * 23 + ">11"]
    assert "a token about 1 cells" in legend and "too short" not in legend
    assert all(mark in seams for mark in "<>=")
    rows = [line.plain for line in partition_picture(WORKED, columns=7 + 2 * 52)]
    assert rows[2].endswith(">1111")  # two pieces of two cells, too few for what passes between them
    _, *rows, legend, _ = (line.plain for line in partition_picture(WORKED, ranks=[1], columns=20))
    assert rows == ["...", "rank 1 <0000==0000>1"] and "1 short piece is too short" in legend


def test_the_text_picture_shows_segments_and_p() -> None:
    # 10 chunks in 3 segments, from chunks 0, 3 and 6; 2 chunks in 3 segments: 2 of them, too narrow for a mark
    made = record([640, 128], 1, "contiguous") | {"segments": [3]}
    _, row, _, _, note = (line.plain for line in partition_picture(made, columns=59))
    assert row == "rank 0 " + "0" * 12 + "|" + "0" * 11 + "|" + "0" * 15 + "1111|111" + " P 3"
    assert "where there is room" not in note
    _, row, _, _, note = (line.plain for line in partition_picture(made, columns=23))
    assert row == "rank 0 000|00|00011 P 3" and "where there is room" in note
    _, row, *_ = (line.plain for line in partition_picture(made, columns=21))  # 8 cells, not 3 for each of 3 segments
    assert row == "rank 0 0000000011 P 3"
    # 2, 6 and 2 chunks, and 1 and 1 of 2: what is too short for a chunk is none; as JSON has it
    _, row, _, _, note = (line.plain for line in partition_picture(made | {"segments": [[1, 3, 1]]}, columns=63))
    assert row.split(" P ")[1] == "1:3:1" and "relative lengths" in note
    assert [len(part) for part in row.split(" P ")[0].removeprefix("rank 0 ").split("|")] == [8, 23, 11, 3]
    whole = [line.plain for line in partition_picture(made | {"segments": [1]})]
    assert len(whole) == 4 and not any("|" in line or " P " in line for line in whole)


def test_p_stands_in_one_column_and_no_row_is_too_long() -> None:
    made = record([3000, 100, 900], 12, "contiguous") | {"segments": [1, 12] * 6}
    _, *rows, _, _, _ = (line.plain for line in partition_picture(made, columns=60))
    assert max(map(len, rows)) == 60 and {row.index(" P ") for row in rows} == {55}
    assert [row.split()[-1] for row in rows] == ["1", "12"] * 6
    uneven = record([130], 3, "zigzag") | {"fragments": [[[0, 0, 128]], [[0, 128, 2]], []], "segments": [2, 1, 1]}
    assert {line.plain.find(" P ") for line in partition_picture(uneven)[1:4]} == {76}


def test_ranks_and_packs_without_tokens_can_be_shown() -> None:
    rows = [line.plain for line in partition_picture(record([2, 0], 3, "contiguous"))][1:4]
    assert rows[2] == "rank 2 (no tokens)" and rows[1] == "rank 1 <" + "0" * 72
    assert len(partition_picture(record([0, 0], 2, "contiguous"))) == 5


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁" and sparkline([float("nan"), 1, 3]) == "?▁█"
