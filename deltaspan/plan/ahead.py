"""Which segments a rank walks while states cross: those that need nothing of other ranks, if that ends sooner."""

from __future__ import annotations

from collections import Counter

import numpy as np

from deltaspan.layout import Partition
from deltaspan.plan.cost import soonest_division
from deltaspan.plan.segments import SegmentTable
from deltaspan.plan.step_time import H200_TIMES, UNITS_PER_MS, StepTimes
from deltaspan.plan.wire import NVLINK, Wire, wire_time

HEAD_DIM = 128  # of keys and values, for which times are known
ROOM = 32  # multiprocessors for what the exchange runs: a walk holds its own until it ends
LEAST_GAIN = 1_500  # in units of 10 ns: one launch more, and a stream that waits for another


def walked_ahead(
    part: Partition,
    rank: int,
    table: SegmentTable,
    *,
    hv: int,
    sm_count: int,
    times: StepTimes = H200_TIMES,
    wire: Wire = NVLINK,
) -> np.ndarray:
    """[S] bool: some of them or none. A fragment that no state enters from another waits for none.

    A walk on all multiprocessors would hold up what the rank sends, for which others wait: a document of 254,976 tokens
    on two H200s took 3.65 ms so, and 2.47 in order. So they are walked where they leave room, and by a rank that waits
    for nothing at all once its states are sent.
    """
    free = ~part.crossing_in[part.rows(rank)][table.fragment]
    if not part.crossing_out.any() or part.world_size == 1:
        return np.zeros_like(free)  # nobody sends anything
    if free.all() or 2 * free.sum() * hv > sm_count - ROOM:
        return np.zeros_like(free)
    crossing = wire_time(part, HV=hv, K=HEAD_DIM, V=HEAD_DIM, exchange="all_to_all", wire=wire).forward * UNITS_PER_MS
    early, late, both = (_walk(table.count[which], hv, sm_count, times) for which in (free, ~free, free | True))
    gain = crossing + both - max(crossing, early) - late
    return free if gain > LEAST_GAIN else np.zeros_like(free)


def _walk(chunks: np.ndarray, hv: int, sm_count: int, times: StepTimes) -> int:
    """Of segments of so many chunks side by side, with output, in units of 10 ns."""
    walks = [(n, hv * count) for n, count in Counter(chunks.tolist()).items()]
    return soonest_division(walks, sm_count, step=times.walk.step, half=times.walk.half).time
