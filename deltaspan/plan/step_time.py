"""How long a rank's forward and training step take on an H200 by its cut, in two regimes of decay, and the cut that
does well in both.

Like the rest of the planner in whole numbers, so that every rank gets the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from deltaspan.plan.cost import RankChunks, lpt_makespan, soonest_division

UNITS_PER_MS = 100_000  # times are in units of 10 ns
SHORT = 27  # chunks; of what is shorter, under moderate decay, a summary may feel every chunk
LEAST_MARGIN = 6  # percent of the least time under moderate decay that is given for less under slow decay
SLOW_WEIGHT = 2  # of a time under slow decay, against one under moderate decay
SLABS = 2  # of heads, by which a backward goes: more only where each fills multiprocessors several times


class Summary(NamedTuple):
    """Times of what is made of a segment for others, in units of 10 ns."""

    faded: int  # under moderate decay, however long the segment is,
    short: int  # or a chunk of a short one
    slow: int  # a chunk's step where nothing fades
    crowd: int  # what that takes more where every multiprocessor walks


class StepTimes(NamedTuple):
    """Times of what a plan changes, in units of 10 ns."""

    walk: int  # a chunk's step of the walk with output
    crowd: int  # what it takes more where every multiprocessor walks
    half: int  # a chunk's step of that walk on half of V's channels
    back: int  # the same three of the backward's two walks, over states and over adjoints, together
    back_crowd: int
    back_half: int
    exit: Summary  # an exit state
    map: Summary
    entry: Summary  # the adjoint of an entry state
    state: int  # a state that a segment hands to the next
    crossing: int  # the same where something enters its fragment, and composed maps are wanted beside states
    compose: int  # a step along the segments of a fragment


# Those of a forward were fitted to 264 forwards by CUDA graph on an H200: eight local shards with 48 value heads, five
# with 6 and three with 12, in 1 to 22 segments, under both decays. With the time of prep and 13 us they met those to
# 4 % (RMS), when all segments that state leaves had maps. What was fitted to exit states and maps together is divided
# as bench.stages times them: 39 : 61 where nothing fades, 84 : 16 where all does, 60 : 40 in runs of 23 chunks. `short`
# lies between that fit and those; `crossing` was fitted to bench.plans when it was counted where state leaves a
# fragment, not where it enters. Walks with output have become faster since, by what bench.stages says of them: `walk`
# and `crowd` are 0.925 and `half` 0.84 of what was fitted. Those of a backward are in proportion to these as
# bench.stages has them: states of chunks and adjoint walk beside the walk, entry adjoints beside exit states.
H200_TIMES = StepTimes(
    walk=194, crowd=24, half=141, back=384, back_crowd=48, back_half=295,
    exit=Summary(faded=2270, short=97, slow=82, crowd=48), map=Summary(faded=430, short=63, slow=128, crowd=74),
    entry=Summary(faded=3840, short=150, slow=200, crowd=51), state=30, crossing=70, compose=470,
)  # fmt: skip


class ByDecay(NamedTuple):
    """Times in units of 10 ns."""

    moderate: int
    slow: int


def forward_time(rank: RankChunks, segments: int, hv: int, sm_count: int, times: StepTimes) -> ByDecay:
    """Of a rank in so many segments, but for what no plan changes.

    Unlike `rank_cost` it knows that a document's last segment needs no summary and its first no map, that walks go over
    halves of V where that ends sooner, and that memory is slower where more read it.
    """
    walked, told = _walked(rank, segments, hv, sm_count, times), _told(rank, segments, hv, times)
    return ByDecay(*(walked + told + _summaries(rank, segments, hv, sm_count, times, of) for of in DECAYS))


def plan_time(rank: RankChunks, segments: int, hv: int, sm_count: int, times: StepTimes) -> ByDecay:
    """Of a forward by itself and of a training step with a checkpoint, which has another, makes the summaries a second
    time, and goes back: through slabs of heads, each of which walks over states and over adjoints."""
    alike = _alike(rank, segments, hv, sm_count, times)
    return ByDecay(*(alike + _summed(rank, segments, hv, sm_count, times, of) for of in DECAYS))


def least_plan_time(rank: RankChunks, segments: int, hv: int, sm_count: int, times: StepTimes) -> int:
    """What no `plan_time` falls below with so many segments or more: all multiprocessors are busy to the end."""
    work = sum(run.chunks * run.count for run in rank.runs)
    walk = work * hv * min(times.walk + times.crowd, 2 * times.half) // sm_count
    back = work * _slab(hv) * min(times.back + times.back_crowd, 2 * times.back_half) // sm_count
    return 2 * walk + SLABS * back + 3 * _told(rank, segments, hv, times) + _told_back(rank, segments, hv, times)


def soonest(rank: RankChunks, most: int, hv: int, sm_count: int, times: StepTimes) -> int:
    """Segments, at most so many: of those that take at most 6 % more than the least under moderate decay, the ones with
    the least time under both, that under slow decay twice; the fewest of equals."""
    device = hv, sm_count, times
    alike, faded = {}, {}
    for segments in range(1, max(1, min(most, rank.longest)) + 1):
        if faded and not _near(least_plan_time(rank, segments, *device), min(faded.values())):
            break
        alike[segments] = _alike(rank, segments, *device)
        faded[segments] = alike[segments] + _summed(rank, segments, *device, _faded)
    least = min(faded.values())
    near = [segments for segments, time in faded.items() if _near(time, least)]
    slow = {segments: alike[segments] + _summed(rank, segments, *device, _slow) for segments in near}
    return min(near, key=lambda segments: faded[segments] + SLOW_WEIGHT * slow[segments])


def _near(time: int, least: int) -> bool:
    return 100 * time <= (100 + LEAST_MARGIN) * least


def _slab(hv: int) -> int:
    """Heads of the largest slab."""
    return -(-hv // SLABS)


def _walks(rank: RankChunks, segments: int, heads: int) -> list[tuple[int, int]]:
    """(chunks, how many such); of a fragment's segments all are as long as the longest."""
    return [(-(-run.chunks // segments), min(segments, run.chunks) * heads * run.count) for run in rank.runs]


def _walked(rank: RankChunks, segments: int, hv: int, sm_count: int, times: StepTimes) -> int:
    of_step = {"step": times.walk, "half": times.half, "crowd": times.crowd}
    return soonest_division(_walks(rank, segments, hv), sm_count, **of_step).time


def _walked_back(rank: RankChunks, segments: int, hv: int, sm_count: int, times: StepTimes) -> int:
    of_step = {"step": times.back, "half": times.back_half, "crowd": times.back_crowd}
    return SLABS * soonest_division(_walks(rank, segments, _slab(hv)), sm_count, **of_step).time


def _alike(rank: RankChunks, segments: int, hv: int, sm_count: int, times: StepTimes) -> int:
    """Of `plan_time`, what takes as long whatever decays."""
    walked = 2 * _walked(rank, segments, hv, sm_count, times) + _walked_back(rank, segments, hv, sm_count, times)
    return walked + 3 * _told(rank, segments, hv, times) + _told_back(rank, segments, hv, times)


def _summed(rank: RankChunks, segments: int, hv: int, sm_count: int, times: StepTimes, of: Regime) -> int:
    """And what does not."""
    entries = of(_left(_backwards(rank), segments, hv), sm_count, times.entry)
    return 3 * _summaries(rank, segments, hv, sm_count, times, of) + entries


def _summaries(rank: RankChunks, segments: int, hv: int, sm_count: int, times: StepTimes, of: Regime) -> int:
    """Exit states and maps."""
    through = [
        (-(-n // segments), max(0, min(segments, n) - (not crosses_out) - (not crosses_in)) * hv * count)
        for n, crosses_out, crosses_in, count in rank.runs
    ]
    return of(_left(rank, segments, hv), sm_count, times.exit) + of(through, sm_count, times.map)


def _backwards(rank: RankChunks) -> RankChunks:
    """The same fragments as the way back comes through them."""
    turned = (run._replace(crosses_out=run.crosses_in, crosses_in=run.crosses_out) for run in rank.runs)
    return rank._replace(runs=tuple(turned))


def _left(rank: RankChunks, segments: int, hv: int) -> list[tuple[int, int]]:
    """(chunks, how many such), of segments that state leaves."""
    return [
        (-(-n // segments), (min(segments, n) - (not crosses_out)) * hv * count)
        for n, crosses_out, _, count in rank.runs
    ]


def _told_back(rank: RankChunks, segments: int, hv: int, times: StepTimes) -> int:
    return _told(_backwards(rank), segments, hv, times)


def _told(rank: RankChunks, segments: int, hv: int, times: StepTimes) -> int:
    """States, by segments to the next ones."""
    counts = ((left, run.crosses_in) for (_, left), run in zip(_left(rank, segments, hv), rank.runs, strict=True))
    states = sum(left * (times.crossing if crosses_in else times.state) for left, crosses_in in counts)
    return states + (segments - 1) * times.compose


def _faded(walks: Iterable[tuple[int, int]], sm_count: int, times: Summary) -> int:
    """(chunks, how many such) under moderate decay: all chunks are felt of short ones, and a few of others."""
    jobs = [(times.short * steps if steps < SHORT else times.faded, count) for steps, count in walks]
    return lpt_makespan(jobs, sm_count)


def _slow(walks: Iterable[tuple[int, int]], sm_count: int, times: Summary) -> int:
    """(chunks, how many such) where nothing fades: the busiest multiprocessor's, and more the busier all are."""
    walks = list(walks)
    return lpt_makespan(walks, sm_count) * times.slow + sum(s * count for s, count in walks) * times.crowd // sm_count


Regime: TypeAlias = Callable[[Iterable[tuple[int, int]], int, Summary], int]
DECAYS: tuple[Regime, Regime] = (_faded, _slow)  # as in `ByDecay`
