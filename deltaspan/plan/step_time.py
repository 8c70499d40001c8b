"""How long a rank's forward and training step take on an H200 by its cut, in two regimes of decay, and the cut that
does well in both.

Like the rest of the planner in whole numbers, so that every rank gets the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from deltaspan.plan.cost import (
    BACK_STEP,
    STATES_STEP,
    RankChunks,
    WalkStep,
    lpt_makespan,
    soonest_division,
    soonest_pair,
)
from deltaspan.plan.cuts import Cut, count_of, lengths, shares

UNITS_PER_MS = 100_000  # times are in units of 10 ns
SHORT = 27  # chunks; of what is shorter, under moderate decay, a summary may feel every chunk
Walks: TypeAlias = list[tuple[int, int]]  # (chunks, how many such)
UNEVEN, LONGER = range(3, 9), range(2, 5)  # segments of which the first and the last are so many times the others:
ROUNDS = 2  # tried where whole fragments are at most so many rounds of walks
LEAST_MARGIN = 6  # percent of the least time under moderate decay that is given for less under slow decay
FADED_WEIGHT = 2  # of a time under moderate decay, against one under slow decay
SLABS = 2  # of heads, by which a backward goes: more only where each fills multiprocessors several times


class Summary(NamedTuple):
    """Times of what is made of a segment for others, in units of 10 ns."""

    faded: int  # under moderate decay, however long the segment is,
    short: int  # or a chunk of a short one
    slow: int  # a chunk's step where nothing fades
    crowd: int  # what that takes more where every multiprocessor walks


class ByDecay(NamedTuple):
    """Times in units of 10 ns."""

    moderate: int
    slow: int


class StepTimes(NamedTuple):
    """Times of what a plan changes, in units of 10 ns."""

    walk: WalkStep  # with output
    back: WalkStep  # over adjoints
    states: WalkStep  # over states, for the backward
    exit: Summary  # an exit state
    map: Summary
    entry: Summary  # the adjoint of an entry state
    state: int  # a state that a segment hands to the next
    crossing: int  # the same where something enters its fragment, and composed maps are wanted beside states
    compose: ByDecay  # a step along the segments of a fragment: nothing is multiplied by maps that have faded


# Fitted to 254 forwards and as many checkpointed steps by CUDA graph on an H200: seven local shards with 48 value
# heads, four with 6 and with 12, in 1 to 22 segments, under both decays. With 6.8 ns of prep a chunk and value head, 51
# of gradients, 11 us of a forward and 55 of a step they met forwards to 5.0 % (RMS, 48 heads) and steps to 3.6 %, with
# few heads to 8 and 6 %. `crossing` is to `state` as bench.plans had it.
H200_TIMES = StepTimes(
    walk=WalkStep(174, 134, 31), back=BACK_STEP, states=STATES_STEP,
    exit=Summary(faded=2040, short=67, slow=81, crowd=18), map=Summary(faded=340, short=67, slow=142, crowd=111),
    entry=Summary(faded=2850, short=141, slow=131, crowd=103), state=20, crossing=47, compose=ByDecay(204, 419),
)  # fmt: skip


def forward_time(rank: RankChunks, cut: Cut, hv: int, sm_count: int, times: StepTimes) -> ByDecay:
    """Of a rank in so many segments, but for what no plan changes.

    Unlike `rank_cost` it knows that a document's last segment needs no summary and its first no map, that walks go over
    halves of V where that ends sooner, and that memory is slower where more read it.
    """
    alike = _walked(rank, cut, hv, sm_count, times) + _told(rank, cut, hv, times)
    return ByDecay(*(alike + _summaries(rank, cut, hv, sm_count, times, of) for of in DECAYS))


def plan_time(rank: RankChunks, cut: Cut, hv: int, sm_count: int, times: StepTimes) -> ByDecay:
    """Of a forward by itself and of a training step with a checkpoint, which has another, makes the summaries a second
    time, and goes back: through slabs of heads, each of which walks over states and over adjoints."""
    return row_time([(rank, cut)], hv, sm_count, times)


def row_time(cuts: Iterable[tuple[RankChunks, Cut]], hv: int, sm_count: int, times: StepTimes) -> ByDecay:
    """`plan_time` of ranks, each with its segments, that wait for each other wherever states cross."""
    cuts = list(cuts)
    phases = ([_phases(rank, cut, hv, sm_count, times, of) for rank, cut in cuts] for of in DECAYS)
    return ByDecay(*(sum(map(max, zip(*of_decay, strict=True))) for of_decay in phases))


def least_plan_time(rank: RankChunks, cut: Cut, hv: int, sm_count: int, times: StepTimes) -> int:
    """What neither `plan_time` nor that of more segments alike falls below: all multiprocessors are busy to the end."""
    work = sum(run.chunks * run.count for run in rank.runs)
    walk, *back = (min(of.step + of.crowd, 2 * of.half) for of in (times.walk, times.back, times.states))
    walk, back = work * hv * walk // sm_count, work * _slab(hv) * sum(back) // sm_count
    return 2 * walk + SLABS * back + 3 * _told(rank, cut, hv, times) + _told(rank, cut, hv, times, back=True)


def soonest(rank: RankChunks, most: int, hv: int, sm_count: int, times: StepTimes) -> Cut:
    """Segments, at most so many, alike or with longer ones at the ends: of those that take at most 6 % more than the
    least under moderate decay, the ones with the least time under both, that under moderate decay twice; the first of
    equals, alike and fewest before others."""
    device = hv, sm_count, times
    faded: dict[Cut, int] = {}
    for cut in range(1, max(1, min(most, rank.longest)) + 1):
        if faded and not _near(least_plan_time(rank, cut, *device), min(faded.values())):
            break
        faded[cut] = sum(_phases(rank, cut, *device, MODERATE))
    for cut in _uneven(rank, hv, sm_count):
        if _near(least_plan_time(rank, cut, *device), min(faded.values())):
            faded[cut] = sum(_phases(rank, cut, *device, MODERATE))
    return _weighed(faded, lambda cut: sum(_phases(rank, cut, *device, SLOW)))


def _uneven(rank: RankChunks, hv: int, sm_count: int) -> Iterator[Cut]:
    """Long segments at both ends: of a whole document those between alone need maps, and short walks fill what long
    ones leave of the device. Where whole fragments fill it twice, they do so by themselves."""
    if hv * sum(run.count for run in rank.runs) > ROUNDS * sm_count:
        return
    for count in UNEVEN:
        for longer in LONGER:
            if 2 * longer + count - 2 <= rank.longest:
                yield longer, *(1,) * (count - 2), longer


def soonest_row(ranks: Sequence[RankChunks], most: int, hv: int, sm_count: int, times: StepTimes) -> list[Cut]:
    """Every rank's segments: its own `soonest`, or, if the row then ends sooner, one of the three most frequent of
    these for all ranks that state crosses. Judged as there; the former of equals."""
    device = hv, sm_count, times
    own = [soonest(rank, most, *device) for rank in ranks]
    crossed = [any(run.crosses_out or run.crosses_in for run in rank.runs) for rank in ranks]
    counts = Counter(cut for cut, crosses in zip(own, crossed, strict=True) if crosses)
    frequent = sorted(counts, key=lambda cut: (-counts[cut], shares(cut)))[:3]
    if len(frequent) < 2:
        return own
    plans = [own]
    for alike in frequent:
        each = zip(ranks, own, crossed, strict=True)
        plans.append([_at_most(alike, rank.longest) if crosses else cut for rank, cut, crosses in each])
    times_of = [row_time(zip(ranks, plan, strict=True), *device) for plan in plans]
    faded = {number: time.moderate for number, time in enumerate(times_of)}
    return plans[_weighed(faded, lambda number: times_of[number].slow)]


def _at_most(cut: Cut, chunks: int) -> Cut:
    """Of lengths that differ, those of which nothing is left are left out anyway."""
    return min(cut, chunks) if isinstance(cut, int) else cut


def _weighed(faded: dict[Any, int], slow_of: Callable[[Any], int]) -> Any:
    """By their times under moderate decay: of those near the least the one with the least time under both, that counted
    twice; the first of equals."""
    least = min(faded.values())
    both = {n: FADED_WEIGHT * time + slow_of(n) for n, time in faded.items() if _near(time, least)}
    return min(both, key=both.__getitem__)


def _near(time: int, least: int) -> bool:
    return 100 * time <= (100 + LEAST_MARGIN) * least


def _slab(hv: int) -> int:
    """Heads of the largest slab."""
    return -(-hv // SLABS)


class Pieces(NamedTuple):
    """Segments of one length."""

    chunks: int
    count: int
    left: int  # of them, those that state leaves,
    entered: int
    through: int  # and those that it enters and leaves


@lru_cache(maxsize=1 << 16)
def _pieces(chunks: int, crosses_out: bool, crosses_in: bool, cut: Cut) -> tuple[Pieces, ...]:
    """Of a fragment; of segments alike all are as long as the longest."""
    if isinstance(cut, int):
        n = min(cut, chunks)
        left, entered = n - (not crosses_out), n - (not crosses_in)
        return (Pieces(-(-chunks // cut), n, left, entered, max(0, left + entered - n)),)
    held = lengths(chunks, cut)
    ends = enumerate(held)
    kinds = [(length, i < len(held) - 1 or crosses_out, i > 0 or crosses_in) for i, length in ends]
    found = []
    for length in sorted({*held}, reverse=True):
        alike = [(left, entered) for of, left, entered in kinds if of == length]
        left, entered = (sum(column) for column in zip(*alike, strict=True))
        found.append(Pieces(length, len(alike), left, entered, sum(left and entered for left, entered in alike)))
    return tuple(found)


def _of_rank(rank: RankChunks, cut: Cut, which: str, heads: int) -> Walks:
    """Segments `which` of `Pieces`, of so many heads."""
    return [
        (alike.chunks, getattr(alike, which) * heads * run.count)
        for run in rank.runs
        for alike in _pieces(run.chunks, run.crosses_out, run.crosses_in, cut)
    ]


def _walked(rank: RankChunks, cut: Cut, hv: int, sm_count: int, times: StepTimes) -> int:
    return soonest_division(_of_rank(rank, cut, "count", hv), sm_count, **times.walk._asdict()).time


def _walked_back(rank: RankChunks, cut: Cut, hv: int, sm_count: int, times: StepTimes) -> int:
    return SLABS * soonest_pair(_of_rank(rank, cut, "count", _slab(hv)), sm_count, times.back, times.states).time


@lru_cache(maxsize=1 << 16)
def _phases(
    rank: RankChunks, cut: Cut, hv: int, sm_count: int, times: StepTimes, of: Regime
) -> tuple[int, int, int, int]:
    """What stands between exchanges: three times what is sent, twice the walk, what is sent back, the walks back."""
    told, walked, back = _alike(rank, cut, hv, sm_count, times)
    summaries = _summaries(rank, cut, hv, sm_count, times, of)
    return 3 * (summaries + told), 2 * walked, _entries(rank, cut, hv, sm_count, times, of), back


@lru_cache(maxsize=1 << 16)
def _alike(rank: RankChunks, cut: Cut, hv: int, sm_count: int, times: StepTimes) -> tuple[int, int, int]:
    """What takes as long whatever decays: states that are told, the walk, the walks back with what is told there."""
    back = _walked_back(rank, cut, hv, sm_count, times) + _told(rank, cut, hv, times, back=True)
    return _told(rank, cut, hv, times), _walked(rank, cut, hv, sm_count, times), back


def _entries(rank: RankChunks, cut: Cut, hv: int, sm_count: int, times: StepTimes, of: Regime) -> int:
    """Adjoints of entry states, and what they are composed to."""
    return of.walked([(_of_rank(rank, cut, "entered", hv), times.entry)], sm_count) + _composed(cut, times, of)


def _summaries(rank: RankChunks, cut: Cut, hv: int, sm_count: int, times: StepTimes, of: Regime) -> int:
    """Maps and exit states, which run beside each other, and what they are composed to."""
    maps, exits = (_of_rank(rank, cut, which, hv) for which in ("through", "left"))
    return of.walked([(maps, times.map), (exits, times.exit)], sm_count) + _composed(cut, times, of)


def _composed(cut: Cut, times: StepTimes, of: Regime) -> int:
    return (count_of(cut) - 1) * getattr(times.compose, of.decay)


def _told(rank: RankChunks, cut: Cut, hv: int, times: StepTimes, *, back: bool = False) -> int:
    """States, by segments to the next ones; back: their adjoints, to the ones before."""
    total = 0
    for run in rank.runs:
        each = times.crossing if (run.crosses_out if back else run.crosses_in) else times.state
        alike = _pieces(run.chunks, run.crosses_out, run.crosses_in, cut)
        total += each * hv * run.count * sum(x.entered if back else x.left for x in alike)
    return total


def _faded(summaries: Iterable[tuple[Walks, Summary]], sm_count: int) -> int:
    """Under moderate decay: all chunks are felt of short ones, and a few of others."""
    jobs = [
        (times.short * steps if steps < SHORT else times.faded, count)
        for walks, times in summaries for steps, count in walks
    ]  # fmt: skip
    return lpt_makespan(jobs, sm_count)


def _slow(summaries: Iterable[tuple[Walks, Summary]], sm_count: int) -> int:
    """Where nothing fades: the busiest multiprocessor's, and more the busier all are."""
    jobs, more = [], 0
    for walks, times in summaries:
        jobs += [(times.slow * steps, count) for steps, count in walks]
        more += times.crowd * sum(steps * count for steps, count in walks)
    return lpt_makespan(jobs, sm_count) + more // sm_count


class Regime(NamedTuple):
    """How long summaries take in one."""

    decay: str  # of `ByDecay`
    walked: Callable[[Iterable[tuple[Walks, Summary]], int], int]


DECAYS = MODERATE, SLOW = Regime("moderate", _faded), Regime("slow", _slow)
