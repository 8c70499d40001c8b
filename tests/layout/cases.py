"""Partitions to test against: recorded ones, and random ones of every layout."""

import json
from itertools import pairwise
from pathlib import Path

from hypothesis import strategies as st

from deltaspan.layout import LAYOUTS, Partition, partition

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "partition_vectors.json").read_text())
LAYOUT_OF = dict(zip("CZD", LAYOUTS, strict=True))


def recorded(case: dict) -> Partition:
    """The partition that a recorded case describes."""
    if case["layout"] == "X":
        return partition(case["cu"], case["W"], fragments=case["fragments_in"])
    return partition(case["cu"], case["W"], LAYOUT_OF[case["layout"]], cut_points=case.get("cut_points"))


@st.composite
def cuts(draw: st.DrawFn, length: int, pieces: int) -> list[int]:
    """pieces + 1 offsets from 0 to length, non-decreasing, often equal."""
    inner = draw(st.lists(st.integers(0, length), min_size=pieces - 1, max_size=pieces - 1))
    return [0, *sorted(inner), length]


@st.composite
def partitions(draw: st.DrawFn) -> Partition:
    """Few tokens, so that empty documents, empty ranks and fragments shorter than a halo are the rule."""
    lengths = draw(st.lists(st.integers(0, 12), max_size=5))
    world_size = draw(st.integers(1, 5))
    layout = draw(st.sampled_from([*LAYOUTS, "cut_points", "explicit"]))
    offsets = [sum(lengths[:doc]) for doc in range(len(lengths) + 1)]
    if layout in LAYOUTS:
        return partition(offsets, world_size, layout)
    if layout == "cut_points":
        points = [draw(cuts(length, 2 * world_size)) for length in lengths]
        return partition(offsets, world_size, "zigzag_per_document", cut_points=points)
    table = []
    for doc, length in enumerate(lengths):
        points = draw(cuts(length, draw(st.integers(1, 6))))
        for start, stop in pairwise(points):
            table.append((doc, start, stop - start, draw(st.integers(0, world_size - 1))))
    return partition(offsets, world_size, fragments=table)
