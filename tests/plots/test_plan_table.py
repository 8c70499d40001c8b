"""Plans as tables and sentences: every figure against the partition, the planner, or a count by hand."""

import io
from itertools import accumulate
from typing import Any

import pytest
from rich.console import Console

import deltaspan as ds
from deltaspan.plots.plan_table import (
    RankLoad,
    comparison_in_words,
    plan_view,
    rank_loads,
    shown_ranks,
    slowest_in_words,
    slowest_ranks,
)

from .test_record import record


def loads_of(steps: list[int], segments: list[int] | None = None) -> list[RankLoad]:
    cuts = segments or [1] * len(steps)
    return [
        RankLoad(rank, 64, 1, 0, 0, 1, cut, 1, step) for rank, (step, cut) in enumerate(zip(steps, cuts, strict=True))
    ]


def shown(made: dict[str, Any], part: ds.Partition, columns: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=columns, color_system=None).print(*plan_view(made, part, columns), sep="\n")
    return out.getvalue().splitlines()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
def test_loads_are_the_partitions_own(layout: str) -> None:
    part = ds.partition([0, *accumulate([5, 0, 130, 1, 64, 700])], 3, layout=layout)
    for load in rank_loads(part, [2, 1, 3], hv=4, sms=8):
        rows = part.rows(load.rank)
        assert (load.entered, load.left) == (part.crossing_in[rows].sum(), part.crossing_out[rows].sum())
        assert load.tokens == part.tokens(load.rank) and load.fragments == len(part.fragments[load.rank])
        assert load.chunks == sum(-(-fragment.length // 64) for fragment in part.fragments[load.rank])


def test_walk_steps_by_hand() -> None:
    # rank 0: 8 walks of 10 chunks on 4 multiprocessors take 20, and no summary is needed: 3 x 20.
    # rank 1: 5 fragments of 3 chunks, each in 2 segments of at most 2, are 80 walks, 20 on each: (5 + 3) x 40.
    held = [[(0, 0, 640)], [(doc, 0, 192) for doc in range(1, 6)]]
    part = ds.partition([0, *accumulate([640, *[192] * 5])], 2, fragments=held)
    loads = rank_loads(part, [1, 2], hv=8, sms=4)
    assert [(load.chunks, load.segments, load.longest, load.steps) for load in loads] == [
        (10, 1, 10, 60),
        (15, 2, 2, 320),
    ]
    assert slowest_ranks(loads) == [1]
    assert rank_loads(part, [1, 2], hv=8, sms=80)[0].steps == 30
    empty = rank_loads(ds.partition([0, 0], 2), [1, 1], hv=8, sms=4)
    assert [load.steps for load in empty] == [0, 0]


def test_many_ranks_are_shown_by_their_ends_and_the_slowest() -> None:
    assert shown_ranks(32, 5) == list(range(32))
    assert shown_ranks(1000, 500, 501) == [*range(16), 500, 501, *range(984, 1000)]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([1200], "the only rank takes 1,200 walk steps"),
        ([3, 9, 4], "the slowest is rank 1 at 9 walk steps"),
        ([9, 3, 9], "the slowest are ranks 0 and 2, which tie at 9 walk steps"),
        ([9, 9, 9], "all 3 ranks take 9 walk steps, and none is the slowest"),
    ],
)
def test_the_slowest_in_words(steps: list[int], said: str) -> None:
    assert slowest_in_words(loads_of(steps)) == said


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        ([2, 8], [5, 10], "one / two: 8 / 10 = 0.8000. one is shorter."),
        ([12, 1], [5, 10], "one / two: 12 / 10 = 1.2000. two is shorter."),
        ([10, 1], [5, 10], "Neither is shorter: the slowest ranks take 10 walk steps with both."),
    ],
)
def test_a_comparison_in_words(one: list[int], two: list[int], said: str) -> None:
    assert comparison_in_words(loads_of(one), loads_of(two, [2, 2]), ("one", "two")).endswith(said)
    assert comparison_in_words(loads_of(one), loads_of(one), ("one", "two")) == "Both rules give the same plan."


def test_a_seam_costs_what_is_sent() -> None:
    # one document on 4 ranks, 48 heads of 128 x 128 in FP32, 12 a rank: one of its 3 seams is 3 MiB a state. A rank in
    # the middle sends 48 heads' summaries, and gets 12 heads' from each of the 3 fragments that are left.
    lines = shown(record([4096], 4, "contiguous"), ds.partition([0, 4096], 4))
    middle = [line.split(maxsplit=1)[1] for line in lines if line.split()[:1] == ["1"] and "/" in line]
    assert middle == ["6.00 / 4.50   2.25 / 3.00      3.00 / 2.25    2.25 / 3.00  "]
    alone = shown(record([640, 640], 2, "contiguous"), ds.partition([0, 640, 1280], 2))
    assert any("nothing is exchanged" in line for line in alone) and not any("summaries" in line for line in alone)


def test_a_comparison_stands_side_by_side() -> None:
    part = ds.partition([0, 128102, 259174], 4)
    compare = {"rule": "row_cost", "segments": [6, 11, 6, 6]}
    made = record([128102, 131072], 4, "contiguous", rule="row_cost_lpt", sms=152, segments=[6] * 4, compare=compare)
    lines = shown(made, part)
    rows = [line.split() for line in lines[lines.index(next(line for line in lines if "Two rules" in line)) :]]
    assert ["0", "6", "2,704", "*", "6", "2,704"] in rows and ["1", "6", "2,640", "11", "2,880", "*"] in rows
    assert "With row_cost the slowest is rank 1 at 2,880 walk steps." in lines
    assert any("2,704 / 2,880 = 0.9389." in line for line in lines) and "row_cost_lpt is shorter." in lines[-1]


@pytest.mark.parametrize(("cp", "layout"), [(8, "zigzag_per_document"), (300, "zigzag")])
def test_nothing_is_cut_off_at_80_columns(cp: int, layout: str) -> None:
    lengths = [20480, 30720, 64000, 49152, 41472, 35993] * 4
    part = ds.partition([0, *accumulate(lengths)], cp, layout=layout)
    made = record(lengths, cp, layout, segments=[64] * cp, compare={"rule": "wave_fill1", "segments": [11] * cp})
    lines = shown(made, part)
    dots = sum(line.strip() == "..." for line in lines)  # in the picture and in each table, where ranks are left out
    assert dots >= 4 if cp > 32 else dots == 0
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    tables = [line.split() for line in lines if line.split()[:1] == [str(cp - 1)]]
    assert len(tables) == 3 and [len(row) for row in tables[:2]] >= [9, 13]
