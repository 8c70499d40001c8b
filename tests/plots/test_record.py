"""Records as pieces and links, and as text: by hand, and against the partition they came from."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest

import deltaspan as ds
from deltaspan.plots.plan_table import plan_table, rank_loads, shown_ranks, slowest_rank
from deltaspan.plots.record import caption, links_of, pieces_of
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
    loads = rank_loads(record(lengths, 3, layout))
    for load in loads:
        rows = part.rows(load.rank)
        assert (load.entered, load.left) == (part.crossing_in[rows].sum(), part.crossing_out[rows].sum())
        assert load.tokens == part.tokens(load.rank) and load.fragments == len(part.fragments[load.rank])
        assert load.chunks == sum(-(-fragment.length // 64) for fragment in part.fragments[load.rank])


def test_loads_bound_the_steps_from_both_sides() -> None:
    # rank 0 walks 10 chunks in one go; rank 1 has 5 fragments of 3: 15 chunks times 8 heads on 4 multiprocessors are 30
    made = record([640, *[192] * 5], 1, "contiguous", hv=8, sms=4)
    made |= {"cp": 2, "fragments": [[[0, 0, 640]], [[doc, 0, 192] for doc in range(1, 6)]], "segments": [1, 2]}
    loads = rank_loads(made)
    assert [(load.chunks, load.segments, load.longest_walk, load.steps) for load in loads] == [
        (10, 1, 10, 20),
        (15, 10, 2, 30),
    ]
    assert slowest_rank(loads) == 1
    assert rank_loads(made | {"sms": 80})[0].steps == 10
    table = plan_table(loads, {0: (2**20, 0), 1: (0, 2**21)}, 4)
    assert [list(column.cells)[1].strip() for column in table.columns][-3:] == ["30 *", "0.0", "2.0"]


def test_many_ranks_are_shown_by_their_ends_and_the_slowest() -> None:
    assert shown_ranks(32, 5) == list(range(32))
    assert shown_ranks(1000, 500) == [*range(16), 500, *range(984, 1000)]


def test_the_text_picture_shows_documents_and_seams() -> None:
    _, *rows, note = (line.plain for line in partition_picture(WORKED, width=52))
    assert rows == ["rank 0 " + "0" * 24 + "><" + "0" * 24 + "1", "rank 1 <" + "0" * 23 + "><" + "0" * 23 + ">11"]
    assert "about 1 tokens" in note and "too short" not in note
    _, *rows, note = (line.plain for line in partition_picture(WORKED, ranks=[1], width=13))
    assert rows == ["...", "rank 1 <0000><0000>1"] and "1 short piece is too short" in note


def test_a_pack_without_tokens_can_be_shown() -> None:
    made = record([0, 0], 2, "contiguous")
    assert len(partition_picture(made)) == 4
    assert [load.steps for load in rank_loads(made)] == [0, 0]


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁" and sparkline([float("nan"), 1, 3]) == "?▁█"
