"""What a plan costs a rank: how many chunks its device walks one after another, and the time that takes.

A device walks the segments of all its value heads side by side, one on each multiprocessor. How long that takes is
the makespan of handing them out longest first (LPT). All figures are whole numbers, so that every rank gets the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from deltaspan.layout import Partition
from deltaspan.plan.cuts import Cut, count_of, pieces
from deltaspan.plan.tables import CHUNK

# A chunk's step of a walk on all channels of V, and on half of them, which repeats what is prepared for both: tensor
# cores do 156k and 98k FLOP a token of a value head, 0.63 of a whole step, but the chain between them is as long. On an
# H200 a half step takes 0.71 of a whole one with 48 heads. So it is reckoned with three quarters.
WHOLE_STEP, HALF_STEP = 4, 3
LEAST_GAIN = 4  # percent, beyond what keeps all multiprocessors busy to the end, for which halves are tried
HALVES_GAIN = 2  # percent, from which on they are taken: where there are none a forward may hold less
LONGEST = 4  # lengths of walks: rounds of the longest are tried by themselves


class StepCosts(NamedTuple):
    """Times of one chunk's step of each walk, and of composing two segments, in units of 10 ns."""

    tape: int  # the walk that leaves the states of the chunks
    transfer: int  # the walk of a summary's map M
    offset: int  # the walk of a summary's offset b
    compose: int
    compose_weight: int = 2  # a calibration of rank costs: segments are composed before and after the exchange


class Alike(NamedTuple):
    """Fragments of a rank that the planner cannot tell apart."""

    chunks: int
    crosses_out: bool  # whether state leaves for another fragment
    crosses_in: bool  # whether it enters from another
    count: int


class RankChunks(NamedTuple):
    """One rank's fragments as the planner sees them; ranks that hold alike have equal ones."""

    fragments: int  # empty ones too
    longest: int  # chunks of the longest, 0 if there is none
    runs: tuple[Alike, ...]  # longest first

    @classmethod
    def of(cls, chunks: np.ndarray, crosses_out: np.ndarray, crosses_in: np.ndarray) -> RankChunks:
        """From one entry a fragment: int64 [n_frag] and bool [n_frag] twice."""
        kinds, counts = np.unique(4 * chunks + 2 * crosses_out + crosses_in, return_counts=True)
        kinds = [(kind // 4, bool(kind & 2), bool(kind & 1)) for kind in kinds.tolist()]
        runs = tuple(Alike(*kind, n) for kind, n in zip(reversed(kinds), reversed(counts.tolist()), strict=True))
        runs = tuple(run for run in runs if run.chunks)
        return cls(len(chunks), runs[0].chunks if runs else 0, runs)


def rank_chunks(part: Partition) -> list[RankChunks]:
    """Every rank's fragments, by rank."""
    chunks, cuts = -(-part.table.length // CHUNK), part.rank_rows[1:-1]
    columns = (np.split(column, cuts) for column in (chunks, part.crossing_out, part.crossing_in))
    return [RankChunks.of(*of_rank) for of_rank in zip(*columns, strict=True)]


def lpt_makespan(jobs: Iterable[tuple[int, int]], machines: int) -> int:
    """The largest load when each job, longest first, goes to the least loaded of identical machines.

    jobs: (length, how many such); those of no length or number are dropped. Exact: equal loads are moved together, and
    jobs of one length are handed out in whole rounds where a round gives every machine one.
    """
    if machines < 1:
        raise ValueError(f"machines must be at least 1, got {machines}")
    return _makespan(_longest_first(jobs), machines)


def _makespan(jobs: Iterable[tuple[int, int]], machines: int) -> int:
    """The same in the order of the jobs."""
    loads, top = [(0, machines)], 0  # (load, machines that carry it), a heap
    for length, count in jobs:
        while length > 0 and count > 0:
            if count >= machines and top - loads[0][0] <= length:
                rounds = count // machines
                loads = [(load + rounds * length, n) for load, n in loads]
                top, count = top + rounds * length, count % machines
                continue
            load, n = heappop(loads)
            while loads and loads[0][0] == load:
                n += heappop(loads)[1]
            if n > count:
                heappush(loads, (load, n - count))
                n = count
            # these are the least loaded until they reach the next
            behind = loads[0][0] - load if loads else 0
            rounds = min(count // n, max(1, -(-behind // length)))
            load, count = load + rounds * length, count - rounds * n
            heappush(loads, (load, n))
            top = max(top, load)
    return top


def _longest_first(jobs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(length, how many such), each length once; without those of no length or number."""
    counts: dict[int, int] = {}
    for length, count in jobs:
        if length > 0 and count > 0:
            counts[length] = counts.get(length, 0) + count
    return sorted(counts.items(), reverse=True)


class WalkStep(NamedTuple):
    """What a chunk's step of a walk takes, in one unit of time."""

    step: int  # on all of V's channels
    half: int  # on half of them
    crowd: int = 0  # more on all of them, where every multiprocessor walks so


# Of the walk back and of that over states, one behind the other, in units of 10 ns: on an H200, as step_time.py says.
BACK_STEP, STATES_STEP = WalkStep(200, 153, 34), WalkStep(200, 151, 29)


class Division(NamedTuple):
    """How walks are handed out: the first `whole` of them, longest first, one by one, each of the others as two, which
    walk half of V's channels."""

    time: int  # until the last has ended
    whole: int


def soonest_division(
    walks: Iterable[tuple[int, int]], sm_count: int, *, step: int = WHOLE_STEP, half: int = HALF_STEP, crowd: int = 0,
    beside: Sequence[tuple[int, int]] = (),
) -> Division:  # fmt: skip
    """Of walks (chunks, how many such) that which ends soonest: none on halves, or, if it is 2 % sooner, all or those
    behind the last round that is full, be it of all walks or of the longest.

    step, half: time of a chunk on all of V's channels and on half of them. crowd: what the former takes more where
    every multiprocessor walks so. beside: (time, how many such) of what is handed out before.
    """
    walks = _longest_first(walks)
    counts = list(accumulate(count for _, count in walks)) or [0]
    best = Division(_ended(*_handed_out(walks, counts[-1], step, half, beside), sm_count, crowd), counts[-1])
    taken, there = (sum(part) for part in zip(*((time * count, count) for time, count in beside), (0, 0), strict=True))
    work = sum(chunks * count for chunks, count in walks) * min(step + crowd, 2 * half)
    if 100 * best.time <= (100 + LEAST_GAIN) * ((work + taken) // sm_count):
        return best
    worth = best.time * (100 - HALVES_GAIN)
    ends = {max(0, count - (there + count) % sm_count) for count in (*counts[:LONGEST], counts[-1])} | {0}
    for whole in sorted(ends - {counts[-1]}, reverse=True):
        jobs, steps = _handed_out(walks, whole, step, half, beside)
        least = -(-sum(time * count for time, count in jobs) // sm_count) + steps * crowd // sm_count
        if least >= best.time or 100 * least > worth:
            continue
        time = _ended(jobs, steps, sm_count, crowd)
        if time < best.time and 100 * time <= worth:
            best = Division(time, whole)
    return best


class Pair(NamedTuple):
    """How the same walks are handed out twice, the second ones as soon as the first ones leave room."""

    time: int  # until the last of both has ended
    first: int  # how many of the first are walked whole, and of the second
    second: int


def soonest_pair(
    walks: Iterable[tuple[int, int]], sm_count: int, first: WalkStep = BACK_STEP, second: WalkStep = STATES_STEP
) -> Pair:
    """Of those with the first all whole or all on halves that which ends soonest."""
    walks = _longest_first(walks)
    pairs = []
    for whole in (sum(count for _, count in walks), 0):
        jobs, steps = _handed_out(walks, whole, first.step, first.half)
        time, behind = soonest_division(walks, sm_count, **second._asdict(), beside=jobs)
        pairs.append(Pair(time + steps * first.crowd // sm_count, whole, behind))
    return min(pairs, key=lambda pair: pair.time)


def _handed_out(
    walks: list[tuple[int, int]], whole: int, step: int, half: int, beside: Sequence[tuple[int, int]] = ()
) -> tuple[list[tuple[int, int]], int]:
    """(time, how many such) of walks in the order in which a device takes them up, longest first, behind what they are
    beside; and the chunks of those that are walked whole."""
    jobs, left, steps = [*beside], whole, 0
    for chunks, count in walks:
        of_them = min(left, count)
        jobs += [(chunks * step, of_them), (chunks * half, 2 * (count - of_them))]
        left, steps = left - of_them, steps + chunks * of_them
    return jobs, steps


def _ended(jobs: list[tuple[int, int]], steps: int, sm_count: int, crowd: int) -> int:
    return _makespan(jobs, sm_count) + steps * crowd // sm_count


@lru_cache(maxsize=1 << 14)
def makespans(rank: RankChunks, cut: Cut, hv: int, sm_count: int) -> tuple[int, int]:
    """Chunks that the device walks one after another in summaries, and in the walk that leaves the states.

    In one piece, only fragments that state leaves need a summary; cut, every one does.
    """
    walks, leaving = [], []
    for run in rank.runs:
        of_run = [(chunks, count * hv * run.count) for chunks, count in pieces(run.chunks, cut)]
        walks += of_run
        leaving += of_run if run.crosses_out or count_of(cut) > 1 else []
    return lpt_makespan(leaving, sm_count), lpt_makespan(walks, sm_count)


def rank_cost(rank: RankChunks, cut: Cut, hv: int, sm_count: int, costs: StepCosts) -> int:
    """Time of a rank's walks and of composing its segments, in units of 10 ns."""
    summary, tape = makespans(rank, cut, hv, sm_count)
    compose = (count_of(cut) - 1) * costs.compose * costs.compose_weight * -(-rank.fragments * hv // sm_count)
    return summary * (costs.offset + costs.transfer) + tape * costs.tape + compose


def rank_walk_steps(rank: RankChunks, cut: Cut, hv: int, sm_count: int) -> int:
    """Chunks that a rank's device walks one after another in a training step with a checkpoint: five walks over
    summaries and three over all segments."""
    summary, tape = makespans(rank, cut, hv, sm_count)
    return 5 * summary + 3 * tape


def walk_steps(part: Partition, plan: Iterable[Cut], *, hv: int, sm_count: int) -> list[int]:
    """Every rank's `rank_walk_steps` for a plan, by rank."""
    pairs = zip(rank_chunks(part), plan, strict=True)
    return [rank_walk_steps(rank, cut, hv, sm_count) for rank, cut in pairs]
