"""Rows to plan: recorded ones, and random ones of every layout."""

import json
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from deltaspan.layout import LAYOUTS, Partition, partition
from deltaspan.plan import RankChunks
from tests.layout.cases import VECTORS as PARTITIONS
from tests.layout.cases import cuts, recorded

DATA = Path(__file__).parents[1] / "data"
RECORD = json.loads((DATA / "plan_cases.json").read_text())
RULES_OF_RANK = ("one", "chain_min", "occ", "wave", "wave_fill1", "wave_fill")
PUBLISHED_OF_ROW = ("row_cost", "row_cost_lpt", "small_one", "fill_down", "fill_small")
RULES_OF_ROW = (*PUBLISHED_OF_ROW, "least_time")
CASES = {case["id"]: case for case in RECORD["cases"]}

_partitions = {case["id"]: case for case in PARTITIONS["cases"]}


@cache
def part_of(case: int) -> Partition:
    """The partition of a recorded case."""
    return recorded(_partitions[case])


def name_of(case: dict) -> str:
    return f"case{case['id']}-{_partitions[case['id']]['layout']}-hv{case['hv']}-sm{case['sm']}"


def row(lengths: list[int], world_size: int, layout: str) -> Partition:
    """Documents of these lengths under a layout: C contiguous, Z zigzag, D zigzag_per_document."""
    layout = {"C": "contiguous", "Z": "zigzag", "D": "zigzag_per_document"}[layout]
    return partition([0, *accumulate(lengths)], world_size, layout)


def rank_of(table: list[tuple[int, bool] | tuple[int, bool, bool]]) -> RankChunks:
    """A rank from (chunks, state leaves for another fragment, and enters from one: False) by fragment."""
    rows = [(*row, False)[:3] for row in table]
    chunks, *crosses = zip(*rows, strict=True) if rows else ((), (), ())
    return RankChunks.of(np.array(chunks, dtype=np.int64), *(np.array(column, dtype=bool) for column in crosses))


# few and many heads and multiprocessors, those of real models and GPUs more often
heads = st.sampled_from([1, 4, 8, 12, 13, 16, 48, 64]) | st.integers(1, 200)
multiprocessors = st.sampled_from([108, 132, 148, 152]) | st.integers(1, 300)

# around every length at which a rule turns, and anything up to what 64 segments of 256 chunks hold and beyond
chunk_counts = st.one_of(
    st.integers(0, 5),
    st.sampled_from([64, 65, 159, 160, 161, 255, 256, 257, 258, 511, 512, 513]),
    st.integers(150, 1100),
    st.integers(0, 20_000),
)
tables = st.lists(st.tuples(chunk_counts, st.booleans()), max_size=5)
ranks = st.lists(tables.map(rank_of), min_size=1, max_size=6)

documents = st.lists(
    st.one_of(st.integers(0, 300), st.integers(0, 40_000), st.integers(0, 400_000), st.just(0)), max_size=6
)
world_sizes = st.integers(1, 8) | st.sampled_from([16, 61, 128])


@st.composite
def parts(draw: st.DrawFn) -> Partition:
    """Documents of none to hundreds of thousands of tokens, whole layouts, chosen cuts and ragged tables."""
    lengths, world_size = draw(documents), draw(world_sizes)
    layout = draw(st.sampled_from([*LAYOUTS, "cut_points", "explicit"]))
    offsets = [0, *accumulate(lengths)]
    if layout in LAYOUTS:
        return partition(offsets, world_size, layout)
    if layout == "cut_points":
        world_size = min(world_size, 8)
        points = [draw(cuts(length, 2 * world_size)) for length in lengths]
        return partition(offsets, world_size, "zigzag_per_document", cut_points=points)
    table = []
    for doc, length in enumerate(lengths):
        points = draw(cuts(length, draw(st.integers(1, 6))))
        for start, stop in pairwise(points):
            table.append((doc, start, stop - start, draw(st.integers(0, world_size - 1))))
    return partition(offsets, world_size, fragments=table)
