"""Into how many segments each rank cuts its fragments: one rule a name.

A rule of a rank looks at that rank alone. A rule of a row looks at all ranks, for the group waits for the slowest.
All but `least_time` are those of the published planner, with its constants; what each is for stands in docs/layouts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltaspan.layout import Partition
from deltaspan.layout.pack import as_int
from deltaspan.plan.cost import RankChunks, StepCosts, rank_chunks, rank_cost, rank_walk_steps
from deltaspan.plan.cuts import Cut
from deltaspan.plan.step_time import H200_TIMES, StepTimes, soonest_row

LONGEST_WALK = 256  # chunks of a segment, for every rule but `one`
MOST_SEGMENTS = 64  # of a fragment
FEW_FRAGMENTS = 3  # up to here, and from LONGEST_WALK on, the number of waves decides
OCC_MARGIN, ONE_MARGIN, LPT_MARGIN, ROW_MARGIN = 2, 0, 2, 4  # in percent
SMALL_HEADS, SMALL_CHUNKS = 12, 160  # below both, segments cost more than they give
PUBLISHED_COSTS = StepCosts(tape=285, transfer=350, offset=120, compose=2040)  # measured on another GPU family


@dataclass(frozen=True)
class Target:
    """What a plan is made for: value heads, multiprocessors of a rank's device, and what its steps cost."""

    hv: int
    sm_count: int
    costs: StepCosts | StepTimes = PUBLISHED_COSTS

    def cost(self, ranks: Sequence[RankChunks], plan: Sequence[int]) -> int:
        """Of the slowest rank, in units of 10 ns."""
        costs = (rank_cost(r, cut, self.hv, self.sm_count, self.costs) for r, cut in zip(ranks, plan, strict=True))
        return max(costs, default=0)

    def walk_steps(self, ranks: Sequence[RankChunks], plan: Sequence[int]) -> int:
        """Of the slowest rank."""
        steps = (rank_walk_steps(r, cut, self.hv, self.sm_count) for r, cut in zip(ranks, plan, strict=True))
        return max(steps, default=0)


# --- rules of a rank: (fragments, chunks of the longest, target) -> segments -----------------------------------------


def _one(fragments: int, longest: int, to: Target) -> int:
    return 1


def _chain_min(fragments: int, longest: int, to: Target) -> int:
    """As few as keep every walk within 256 chunks."""
    return min(_chains(longest), MOST_SEGMENTS, max(longest, 1))


def _occ(fragments: int, longest: int, to: Target) -> int:
    """Enough for every multiprocessor to have a walk."""
    wanted = max(-(-to.sm_count // (fragments * to.hv)), _chains(longest))
    return max(1, min(wanted, MOST_SEGMENTS, longest))


def _wave(fragments: int, longest: int, to: Target) -> int:
    """Few long fragments: the least waves times walk; else `occ`."""
    if not _long(fragments, longest):
        return _occ(fragments, longest, to)
    return min(_choices(longest), key=lambda cut: (wave_cost(fragments, longest, cut, to), cut))


def _wave_fill1(fragments: int, longest: int, to: Target) -> int:
    """`wave`, but one short fragment is cut only so far that all its walks fit side by side."""
    return _filled(1, fragments, longest, to)


def _wave_fill(fragments: int, longest: int, to: Target) -> int:
    """`wave_fill1` for up to three short fragments."""
    return _filled(FEW_FRAGMENTS, fragments, longest, to)


def _filled(at_most: int, fragments: int, longest: int, to: Target) -> int:
    fitting = to.sm_count // (fragments * to.hv)
    if fragments <= at_most and 0 < longest <= LONGEST_WALK and fitting >= 1:
        return max(_chains(longest), min(MOST_SEGMENTS, longest, fitting))
    return _wave(fragments, longest, to)


def wave_cost(fragments: int, longest: int, cut: int, to: Target) -> int:
    """Waves of equal walks times the walk, and the composing, in units of 10 ns."""
    step = to.costs.tape + to.costs.transfer + to.costs.offset
    waves = -(-fragments * cut * to.hv // to.sm_count)
    return waves * -(-longest // cut) * step + (cut - 1) * to.costs.compose


def _chains(longest: int) -> int:
    return max(1, -(-longest // LONGEST_WALK))


def _choices(longest: int) -> range:
    most = max(1, min(MOST_SEGMENTS, longest))
    return range(min(_chains(longest), most), most + 1)


def _long(fragments: int, longest: int) -> bool:
    return 1 <= fragments <= FEW_FRAGMENTS and longest > LONGEST_WALK


# --- rules of a row: (every rank, target) -> segments by rank ---------------------------------------------------------


def _row_cost(ranks: Sequence[RankChunks], to: Target) -> list[int]:
    """`wave_fill1`, or `occ` or `one` on all ranks where that makes the slowest one faster."""
    return _switched(ranks, to, _each(_wave_fill1, ranks, to))


def _row_cost_lpt(ranks: Sequence[RankChunks], to: Target) -> list[int]:
    """`row_cost`, but few long fragments are cut by the makespan of their walks, where that shortens the slowest
    rank's walks by 4 % or more."""
    today, base = _row_cost(ranks, to), _each(_wave_fill1, ranks, to)
    wanted = [_by_makespan(*each, to) for each in zip(ranks, today, base, strict=True)]
    new = _switched(ranks, to, wanted)
    begins_to_cut = any(before == 1 != after for before, after in zip(today, new, strict=True))
    if begins_to_cut or 100 * to.walk_steps(ranks, new) > (100 - ROW_MARGIN) * to.walk_steps(ranks, today):
        return today
    return new


def _by_makespan(rank: RankChunks, today: int, base: int, to: Target) -> int:
    if today == 1 or not _long(rank.fragments, rank.longest):
        return base
    cut = cheapest_cut(rank, to)
    return cut if to.walk_steps([rank], [cut]) <= to.walk_steps([rank], [base]) else base


def cheapest_cut(rank: RankChunks, to: Target) -> int:
    """The fewest segments that cost the rank at most 2 % more than its best choice."""
    costs = {cut: to.cost([rank], [cut]) for cut in _choices(rank.longest)}
    best = min(costs.values())
    return next(cut for cut, cost in costs.items() if 100 * cost <= (100 + LPT_MARGIN) * best)


def _switched(ranks: Sequence[RankChunks], to: Target, base: list[int]) -> list[int]:
    best = base
    for rule, margin in ((_occ, OCC_MARGIN), (_one, ONE_MARGIN)):
        plan = _each(rule, ranks, to)
        if plan == base:
            continue
        before, after = to.cost(ranks, best), to.cost(ranks, plan)
        if after < before and 100 * after <= (100 - margin) * before:
            best = plan
    return best


def _small_one(ranks: Sequence[RankChunks], to: Target) -> list[int]:
    """`row_cost_lpt`, but whole fragments where heads are few and all fragments short."""
    return [1] * len(ranks) if _small(ranks, to) else _row_cost_lpt(ranks, to)


def _fill_down(ranks: Sequence[RankChunks], to: Target) -> list[int]:
    """`row_cost_lpt`, but ranks of short fragments cut no further than `wave_fill`."""
    return [
        min(cut, _wave_fill(rank.fragments, rank.longest, to)) if 0 < rank.longest <= LONGEST_WALK else cut
        for rank, cut in zip(ranks, _row_cost_lpt(ranks, to), strict=True)
    ]


def _fill_small(ranks: Sequence[RankChunks], to: Target) -> list[int]:
    """`small_one` where it applies, else `fill_down`."""
    return [1] * len(ranks) if _small(ranks, to) else _fill_down(ranks, to)


def _small(ranks: Sequence[RankChunks], to: Target) -> bool:
    return to.hv <= SMALL_HEADS and all(rank.longest <= SMALL_CHUNKS for rank in ranks)


def _least_time(ranks: Sequence[RankChunks], to: Target) -> list[Cut]:
    """Every rank as its own forward and training step end soonest, or alike those that state crosses, if so the row's
    do."""
    return soonest_row(ranks, MOST_SEGMENTS, to.hv, to.sm_count, to.costs)


def _each(rule: Callable[[int, int, Target], int], ranks: Sequence[RankChunks], to: Target) -> list[int]:
    return [rule(rank.fragments, rank.longest, to) if rank.fragments else 1 for rank in ranks]


# --- by name ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A rule with the step costs that it reckons with."""

    choose: Callable[..., int] | Callable[..., list[Cut]]
    of_row: bool = False
    costs: StepCosts | StepTimes = PUBLISHED_COSTS


RULES = {
    "one": Rule(_one),
    "chain_min": Rule(_chain_min),
    "occ": Rule(_occ),
    "wave": Rule(_wave),
    "wave_fill1": Rule(_wave_fill1),
    "wave_fill": Rule(_wave_fill),
    "row_cost": Rule(_row_cost, of_row=True),
    "row_cost_lpt": Rule(_row_cost_lpt, of_row=True),
    "small_one": Rule(_small_one, of_row=True),
    "fill_down": Rule(_fill_down, of_row=True),
    "fill_small": Rule(_fill_small, of_row=True),
    "least_time": Rule(_least_time, of_row=True, costs=H200_TIMES),
}
DEFAULT_RULE, HOPPER_RULE = "row_cost_lpt", "least_time"  # the latter where the kernels run whose times it has


def plan_segments(part: Partition, *, hv: int, sm_count: int, rule: str = DEFAULT_RULE) -> list[Cut]:
    """Segments per fragment, by rank: how many of one length, or, under `least_time`, the relative lengths of some that
    differ. A pure function of the partition, alike on every rank.

    Args:
        part: the partition.
        hv: value heads, at least 1.
        sm_count: multiprocessors of a rank's device, at least 1.
        rule: a name of `RULES`, of a rank or of a row. `one` leaves every fragment whole.

    Raises:
        ValueError: an unknown rule, or a count below 1.
    """
    check_rule(rule)
    ranks = rank_chunks(part)
    if RULES[rule].of_row:
        return row_segments(ranks, hv=hv, sm_count=sm_count, rule=rule)
    return [rank_segments(r.fragments, r.longest, hv=hv, sm_count=sm_count, rule=rule) for r in ranks]


def rank_segments(fragments: int, longest: int, *, hv: int, sm_count: int, rule: str = "wave_fill1") -> int:
    """Segments per fragment of one rank, from its count of fragments and the chunks of the longest.

    Raises:
        ValueError: an unknown rule, one of a row, a negative `fragments` or `longest`, or another count below 1.
    """
    check_rule(rule, of_row=False)
    fragments, longest = as_int("fragments", fragments, minimum=0), as_int("longest", longest, minimum=0)
    to = _target(rule, hv, sm_count)
    return RULES[rule].choose(fragments, longest, to) if fragments else 1


def row_segments(ranks: Sequence[RankChunks], *, hv: int, sm_count: int, rule: str = DEFAULT_RULE) -> list[Cut]:
    """Segments per fragment of every rank, from all ranks' fragments.

    Raises:
        ValueError: an unknown rule, one of a rank, or a count below 1.
    """
    check_rule(rule, of_row=True)
    to = _target(rule, hv, sm_count)
    different = list(dict.fromkeys(ranks))  # ranks that hold alike are cut alike
    cut = dict(zip(different, RULES[rule].choose(different, to), strict=True))
    return [cut[rank] for rank in ranks]


def check_rule(rule: str, *, name: str = "rule", of_row: bool | None = None) -> None:
    """Raises, about the argument `name`, unless `rule` names one; with `of_row`, one of that kind."""
    if not isinstance(rule, str):
        raise TypeError(f"{name} must be the name of a rule, got {rule!r}")
    served = [each for each, known in RULES.items() if of_row in (None, known.of_row)]
    if rule not in served:
        raise ValueError(f"{name} must be one of {', '.join(served)}; got {rule!r}")


def _target(rule: str, hv: int, sm_count: int) -> Target:
    counts = as_int("hv", hv, minimum=1), as_int("sm_count", sm_count, minimum=1)
    return Target(*counts, RULES[rule].costs)
