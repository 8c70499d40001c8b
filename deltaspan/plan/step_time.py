"""How long a rank's forward takes on an H200 by its cut, in two regimes of decay, and the cut that does well in both.

Like the rest of the planner in whole numbers, so that every rank gets the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from deltaspan.plan.cost import RankChunks, lpt_makespan

UNITS_PER_MS = 100_000  # times are in units of 10 ns
SHORT = 27  # chunks; of what is shorter, under moderate decay, a summary may feel every chunk
LEAST_MARGIN = 6  # percent of the least time under moderate decay that is given for less under slow decay
SLOW_WEIGHT = 2  # of a time under slow decay, against one under moderate decay


class ForwardTimes(NamedTuple):
    """Times of what a plan changes of a forward, in units of 10 ns."""

    walk: int  # a chunk's step of the walk with output
    crowd: int  # what it takes more where every multiprocessor walks
    half: int  # a chunk's step of that walk on half of V's channels
    faded: int  # an exit state under moderate decay, however long the segment is,
    short: int  # or a chunk of one of a short segment
    slow: int  # a chunk's step of it where nothing fades
    slow_crowd: int  # what that takes more where every multiprocessor walks
    map_faded: int  # the same four of a segment's map
    map_short: int
    map_slow: int
    map_crowd: int
    state: int  # a state that a segment hands to the next
    crossing: int  # the same where something enters its fragment, and composed maps are wanted beside states
    compose: int  # a step along the segments of a fragment


# Fitted to 264 forwards by CUDA graph on an H200: eight local shards with 48 value heads, five with 6 and three with
# 12, in 1 to 22 segments, under both decays. With the time of prep and 13 us they met those to 4 % (RMS), when all
# segments that state leaves had maps. What was fitted to exit states and maps together is divided as bench.stages times
# them: 39 : 61 where nothing fades, 84 : 16 where all does, 60 : 40 in runs of 23 chunks. `short` lies between that fit
# and those; `crossing` was fitted to bench.plans when it was
# counted where state leaves a fragment, not where it enters. Walks with output have become faster since, by what
# bench.stages says of them: `walk` and `crowd` are 0.925 and `half` 0.84 of what was fitted.
H200_TIMES = ForwardTimes(
    walk=194, crowd=24, half=141, faded=2270, short=97, slow=82, slow_crowd=48, map_faded=430, map_short=63,
    map_slow=128, map_crowd=74, state=30, crossing=70, compose=470,
)  # fmt: skip


class ByDecay(NamedTuple):
    """Times in units of 10 ns."""

    moderate: int
    slow: int


def forward_time(rank: RankChunks, segments: int, hv: int, sm_count: int, times: ForwardTimes) -> ByDecay:
    """Of a rank in so many segments, but for what no plan changes.

    Unlike `rank_cost` it knows that a document's last segment needs no summary and its first no map, that a walk goes
    over halves of V where that ends sooner, and that memory is slower where more read it.
    """
    walks, left, through, states = [], [], [], 0
    for n, crosses_out, crosses_in, count in rank.runs:
        cut, steps = min(segments, n), -(-n // segments)
        handed_on = (cut - (not crosses_out)) * hv * count
        walks.append((steps, cut * hv * count))
        left.append((steps, handed_on))
        through.append((steps, max(0, cut - (not crosses_out) - (not crosses_in)) * hv * count))
        states += handed_on * (times.crossing if crosses_in else times.state)
    whole = _walked(walks, sm_count, times.walk, times.crowd)
    halves = lpt_makespan([(steps, 2 * count) for steps, count in walks], sm_count) * times.half
    alike = min(whole, halves) + states + (segments - 1) * times.compose
    faded = _faded(left, sm_count, times.short, times.faded)
    faded += _faded(through, sm_count, times.map_short, times.map_faded)
    slow = _walked(left, sm_count, times.slow, times.slow_crowd)
    slow += _walked(through, sm_count, times.map_slow, times.map_crowd)
    return ByDecay(alike + faded, alike + slow)


def least_forward_time(rank: RankChunks, segments: int, hv: int, sm_count: int, times: ForwardTimes) -> int:
    """What no time falls below with so many segments or more: all multiprocessors are busy to the end."""
    step = min(times.walk + times.crowd, 2 * times.half)
    work = states = 0
    for n, crosses_out, crosses_in, count in rank.runs:
        work += n * hv * count
        handed_on = (min(segments, n) - (not crosses_out)) * hv * count
        states += handed_on * (times.crossing if crosses_in else times.state)
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


def _faded(walks: Iterable[tuple[int, int]], sm_count: int, short: int, faded: int) -> int:
    """(chunks, how many such), of which all chunks are felt in short ones, and in others a few."""
    return lpt_makespan([(short * steps if steps < SHORT else faded, count) for steps, count in walks], sm_count)
