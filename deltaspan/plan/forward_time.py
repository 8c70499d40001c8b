"""How long a rank's forward takes on an H200 by its cut, in two regimes of decay, and the cut that does well in both.

Like the rest of the planner in whole numbers, so that every rank gets the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from deltaspan.plan.cost import RankChunks, lpt_makespan

SHORT = 27  # chunks; of what is shorter, under moderate decay, the summary may feel every chunk
LEAST_MARGIN = 6  # percent of the least time under moderate decay that is given for less under slow decay
SLOW_WEIGHT = 2  # of a time under slow decay, against one under moderate decay


class ForwardTimes(NamedTuple):
    """Times of what a plan changes of a forward, in units of 10 ns."""

    walk: int  # a chunk's step of the walk with output
    crowd: int  # what it takes more where every multiprocessor walks
    half: int  # a chunk's step of that walk on half of V's channels
    faded: int  # a summary under moderate decay, however long the segment is,
    short: int  # or a chunk of one of a short segment
    slow: int  # a chunk's step of both walks of a summary where nothing fades
    slow_crowd: int  # what that takes more where every multiprocessor walks
    state: int  # a state that a segment hands to the next
    crossing: int  # the same where its fragment hands on to another, and composed maps are wanted beside states
    compose: int  # a step along the segments of a fragment


# Fitted to 264 forwards by CUDA graph on an H200: eight local shards with 48 value heads, five with 6 and three with
# 12, in 1 to 22 segments, under both decays. With the time of prep and 13 us they meet those to 4 % (RMS). `short` lies
# between that fit and the walks of bench.stages in runs of 23 chunks; `crossing` is fitted to bench.plans.
H200_TIMES = ForwardTimes(
    walk=210, crowd=26, half=168, faded=2700, short=160, slow=210, slow_crowd=122, state=30, crossing=70, compose=470
)


class ByDecay(NamedTuple):
    """Times in units of 10 ns."""

    moderate: int
    slow: int


def forward_time(rank: RankChunks, segments: int, hv: int, sm_count: int, times: ForwardTimes) -> ByDecay:
    """Of a rank in so many segments, but for what no plan changes.

    Unlike `rank_cost` it knows that a document's last segment needs no summary, that a walk goes over halves of V where
    that ends sooner, and that memory is slower where more read it.
    """
    walks, left, states = [], [], 0
    for n, crosses_out, count in rank.runs:
        cut, steps = min(segments, n), -(-n // segments)
        handed_on = (cut - (not crosses_out)) * hv * count
        walks.append((steps, cut * hv * count))
        left.append((steps, handed_on))
        states += handed_on * (times.crossing if crosses_out else times.state)
    whole = _walked(walks, sm_count, times.walk, times.crowd)
    halves = lpt_makespan([(steps, 2 * count) for steps, count in walks], sm_count) * times.half
    alike = min(whole, halves) + states + (segments - 1) * times.compose
    faded = [(times.short * steps if steps < SHORT else times.faded, count) for steps, count in left]
    slow = _walked(left, sm_count, times.slow, times.slow_crowd)
    return ByDecay(alike + lpt_makespan(faded, sm_count), alike + slow)


def least_forward_time(rank: RankChunks, segments: int, hv: int, sm_count: int, times: ForwardTimes) -> int:
    """What no time falls below with so many segments or more: all multiprocessors are busy to the end."""
    step = min(times.walk + times.crowd, 2 * times.half)
    work = states = 0
    for n, crosses_out, count in rank.runs:
        work += n * hv * count
        handed_on = (min(segments, n) - (not crosses_out)) * hv * count
        states += handed_on * (times.crossing if crosses_out else times.state)
    return work * step // sm_count + states + (segments - 1) * times.compose


def soonest(rank: RankChunks, most: int, hv: int, sm_count: int, times: ForwardTimes) -> int:
    """Segments, at most so many: of those that take at most 6 % more than the least under moderate decay, the ones with
    the least time under both, that under slow decay twice; the fewest of equals."""
    device = hv, sm_count, times
    found = {1: forward_time(rank, 1, *device)}
    least = found[1].moderate
    for segments in range(2, min(most, rank.longest) + 1):
        if not _near(least_forward_time(rank, segments, *device), least):
            break
        found[segments] = forward_time(rank, segments, *device)
        least = min(least, found[segments].moderate)
    near = (segments for segments, time in found.items() if _near(time.moderate, least))
    return min(near, key=lambda segments: found[segments].moderate + SLOW_WEIGHT * found[segments].slow)


def _near(time: int, least: int) -> bool:
    return 100 * time <= (100 + LEAST_MARGIN) * least


def _walked(walks: Iterable[tuple[int, int]], sm_count: int, step: int, crowd: int) -> int:
    """(chunks, how many such): the busiest multiprocessor's steps, and more the busier all are."""
    walks = list(walks)
    return lpt_makespan(walks, sm_count) * step + sum(steps * count for steps, count in walks) * crowd // sm_count
