"""`least_time`: every rank in the time it says, by trying all cuts; plans of record; what each time decides."""

import json
from collections import Counter
from dataclasses import replace
from heapq import heapreplace
from importlib.resources import files
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaspan.plan import HOPPER_RULE, RULES, Cut, RankChunks, count_of, plan_segments, rank_chunks, row_segments
from deltaspan.plan.step_time import (
    H200_TIMES,
    ByDecay,
    StepTimes,
    Summary,
    WalkStep,
    forward_time,
    least_plan_time,
    plan_time,
)

from .rows import CASES, DATA, heads, multiprocessors, part_of, rank_of, row, tables

PACKS = json.loads(files("deltaspan").joinpath("data/packs.json").read_text())["packs"]
RECORD = json.loads((DATA / "plan_least_time.json").read_text())
RANDOM = settings(max_examples=60, deadline=None)
TRIED_IN_ALL_WAYS = settings(max_examples=20, deadline=None)  # each takes a tenth of a second and more

Table = list[tuple[int, bool, bool]]  # (chunks, state leaves for another fragment, and enters from one) by fragment

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(tuple)
small_tables = st.lists(st.tuples(st.integers(0, 40) | st.integers(0, 600), st.booleans(), st.booleans()), max_size=4)
summaries = st.builds(
    Summary, faded=st.integers(0, 9000), **{name: st.integers(1, 300) for name in ("short", "slow", "crowd")}
)
WALKS, SUMMARIES, STATES = ("walk", "back", "states"), ("exit", "map", "entry"), ("state", "crossing")
small = st.integers(1, 300)
times = st.builds(
    StepTimes, **dict.fromkeys(WALKS, st.builds(WalkStep, small, small, small)), **dict.fromkeys(SUMMARIES, summaries),
    **dict.fromkeys(STATES, small), compose=st.builds(ByDecay, small, small),
)  # fmt: skip


def busiest(lengths: list[int], machines: int, *, in_order: bool = False) -> int:
    """Each walk, longest first or in order, to the least loaded multiprocessor."""
    loads = [0] * machines
    for length in lengths if in_order else sorted(lengths, reverse=True):
        heapreplace(loads, loads[0] + length)
    return max(loads)


def walked(walks: list[int], sm_count: int, of: WalkStep, before: list[int] | None = None) -> int:
    """Longest first, behind what takes the times `before`; those behind full rounds on halves, if that is sooner."""
    walks, before = sorted(walks, reverse=True), before or []

    def until(whole: int) -> int:
        items = [n * of.step for n in walks[:whole]] + [n * of.half for n in walks[whole:] for _ in range(2)]
        return busiest(before + items, sm_count, in_order=True) + sum(walks[:whole]) * of.crowd // sm_count

    longest = sorted(set(walks))[-4:]
    ends = [len(walks), *(max(i for i, n in enumerate(walks, 1) if n == length) for length in longest)]
    none = until(len(walks))
    busy = (sum(walks) * min(of.step + of.crowd, 2 * of.half) + sum(before)) // sm_count
    if 100 * none <= 104 * busy:
        return none
    rounds = [max(0, end - (len(before) + end) % sm_count) for end in ends]
    soonest = min(until(0), *map(until, rounds))
    return soonest if 100 * soonest <= 98 * none else none


def walked_back(walks: list[int], sm_count: int, back: WalkStep, states: WalkStep) -> int:
    """States behind all walks back, whole or on halves."""
    walks = sorted(walks, reverse=True)
    whole = walked(walks, sm_count, states, [n * back.step for n in walks]) + sum(walks) * back.crowd // sm_count
    return min(whole, walked(walks, sm_count, states, [n * back.half for n in walks for _ in range(2)]))


def lengths_of(chunks: int, cut: Cut) -> list[int]:
    """Of a fragment's segments; of those alike all as long as the longest."""
    if isinstance(cut, int):
        return [-(-chunks // cut)] * min(cut, chunks)
    starts = [sum(cut[:i]) * chunks // sum(cut) for i in range(len(cut) + 1)]
    return [stop - start for start, stop in pairwise(starts) if stop > start]


def phases_of(table: Table, cut: Cut, hv: int, sm_count: int, times: StepTimes) -> ByDecay:
    """Program by program what stands between exchanges: what is sent, the walk, what is sent back, the walks back."""
    by_head, exits, maps, entries, told, told_back = [], [], [], [], 0, 0
    for chunks, crosses_out, crosses_in in table:
        pieces = lengths_of(chunks, cut)
        by_head += pieces
        handed_on = (pieces if crosses_out else pieces[:-1]) * hv
        handed_back = (pieces if crosses_in else pieces[1:]) * hv
        exits += handed_on
        entries += handed_back
        maps += (pieces if crosses_out else pieces[:-1])[0 if crosses_in else 1 :] * hv
        told += len(handed_on) * (times.crossing if crosses_in else times.state)
        told_back += len(handed_back) * (times.crossing if crosses_out else times.state)
    walk = walked(by_head * hv, sm_count, times.walk)
    back = 2 * walked_back(by_head * -(-hv // 2), sm_count, times.back, times.states)
    found = []
    for decay in ByDecay._fields:

        def items(these: list[int], of: Summary, decay: str = decay) -> list[int]:
            if decay == "moderate":
                return [of.faded if steps >= 27 else of.short * steps for steps in these]
            return [of.slow * steps for steps in these]

        def crowd(these: list[int], of: Summary, decay: str = decay) -> int:
            return 0 if decay == "moderate" else sum(these) * of.crowd

        composed = (count_of(cut) - 1) * getattr(times.compose, decay)
        more = (crowd(exits, times.exit) + crowd(maps, times.map)) // sm_count
        summary = busiest(items(exits, times.exit) + items(maps, times.map), sm_count) + more + composed
        entering = busiest(items(entries, times.entry), sm_count) + crowd(entries, times.entry) // sm_count + composed
        found.append((summary + told, walk, entering, back + told_back))
    return ByDecay(*found)


def times_of(*of_rank: ByDecay) -> tuple[ByDecay, ByDecay]:
    """A forward, and that with a training step, which has another and makes summaries once more, of ranks that wait for
    each other after each phase."""
    phases = [[max(column) for column in zip(*of_decay, strict=True)] for of_decay in zip(*of_rank, strict=True)]
    forward = ByDecay(*(sent + walk for sent, walk, *_ in phases))
    return forward, ByDecay(*(3 * sent + 2 * walk + entering + back for sent, walk, entering, back in phases))


def uneven(longest: int) -> list[Cut]:
    """Two to four times as long at the ends."""
    shapes = [(r, *[1] * (count - 2), r) for count in range(3, 9) for r in (2, 3, 4)]
    return [shape for shape in shapes if sum(shape) <= longest]


def best(table: Table, hv: int, sm_count: int, times: StepTimes) -> Cut:
    """Of all cuts."""
    longest = max((chunks for chunks, *_ in table), default=0)
    cuts = [*range(1, max(1, min(64, longest)) + 1)]
    if sum(chunks > 0 for chunks, *_ in table) * hv <= 2 * sm_count:
        cuts += uneven(longest)
    return weighed({cut: times_of(phases_of(table, cut, hv, sm_count, times))[1] for cut in cuts})


def weighed(found: dict) -> Any:
    """The first with the least time that counts moderate decay twice, of those that are near the least under that."""
    bound = min(time.moderate for time in found.values()) * 106
    return min(
        (of for of, time in found.items() if 100 * time.moderate <= bound),
        key=lambda of: 2 * found[of].moderate + found[of].slow,
    )


def best_row(ranks: list[Table], hv: int, sm_count: int, times: StepTimes) -> list[Cut]:
    """Each by itself, or those that state crosses alike."""
    own = [best(table, hv, sm_count, times) for table in ranks]
    crossed = [any(chunks and (out or come_in) for chunks, out, come_in in table) for table in ranks]
    counts = Counter(cut for cut, crosses in zip(own, crossed, strict=True) if crosses)
    plans = {tuple(own): None}
    for alike in sorted(counts, key=lambda cut: (-counts[cut], (1,) * cut if isinstance(cut, int) else cut))[:3]:
        longest = [max((chunks for chunks, *_ in table), default=0) for table in ranks]
        each = zip(own, longest, crossed, strict=True)
        most = (alike if isinstance(alike, tuple) else min(alike, n) for n in longest)
        plans[tuple(fit if crosses else cut for (cut, _, crosses), fit in zip(each, most, strict=True))] = None
    given = hv, sm_count, times
    rows = {
        plan: times_of(*(phases_of(table, cut, *given) for table, cut in zip(ranks, plan, strict=True)))[1]
        for plan in plans
    }
    return list(weighed(rows))


@RANDOM
@given(small_tables, st.integers(1, 64) | shapes, st.integers(1, 12), st.integers(1, 140), times)
def test_the_time_of_a_rank_is_that_of_its_programs(table, cut, hv, sm_count, times):
    if isinstance(cut, int):
        cut = min(cut, max([1, *(chunks for chunks, *_ in table)]))
    found = tuple(of(rank_of(table), cut, hv, sm_count, times) for of in (forward_time, plan_time))
    assert found == times_of(phases_of(table, cut, hv, sm_count, times))


@TRIED_IN_ALL_WAYS
@given(small_tables, st.integers(1, 12), st.integers(1, 140), st.just(H200_TIMES) | times)
def test_no_cut_is_better(table, hv, sm_count, times):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "timed", replace(RULES[HOPPER_RULE], costs=times))
        (cut,) = row_segments([rank_of(table)], hv=hv, sm_count=sm_count, rule="timed")
    assert cut == best(table, hv, sm_count, times)


@TRIED_IN_ALL_WAYS
@given(
    st.lists(small_tables, min_size=2, max_size=4), st.integers(1, 12), st.integers(1, 140), st.just(H200_TIMES) | times
)
def test_ranks_that_state_crosses_are_cut_alike_where_the_row_ends_sooner(ranks, hv, sm_count, times):
    ranks = list({rank_of(table): table for table in ranks}.values())  # those that hold alike are cut alike anyway
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "timed", replace(RULES[HOPPER_RULE], costs=times))
        cuts = row_segments([rank_of(table) for table in ranks], hv=hv, sm_count=sm_count, rule="timed")
    assert cuts == best_row(ranks, hv, sm_count, times)


@RANDOM
@given(tables, heads, multiprocessors, times, st.integers(1, 64), st.integers(1, 64))
def test_no_time_falls_below_its_bound(table, hv, sm_count, times, one, other):
    device, rank = (hv, sm_count, times), rank_of(table)
    fewer, more = sorted((one, other))
    assert least_plan_time(rank, fewer, *device) <= min(plan_time(rank, more, *device))


@RANDOM
@given(tables, heads, multiprocessors, times, shapes)
def test_nor_does_that_of_lengths_that_differ(table, hv, sm_count, times, shape):
    device, rank = (hv, sm_count, times), rank_of(table)
    assert least_plan_time(rank, shape, *device) <= min(plan_time(rank, shape, *device))


# --- plans of record --------------------------------------------------------------------------------------------------


def name_of(found: dict) -> str:
    return f"{found['pack']}-CP{found['cp']}-{found['layout']}-hv{found['hv']}"


def as_in_json(plan: list | dict) -> list | dict:
    return json.loads(json.dumps(plan))


@pytest.mark.parametrize("found", RECORD["rows"], ids=name_of)
def test_plans_of_packs(found):
    part = row(PACKS[found["pack"]], found["cp"], found["layout"])
    assert as_in_json(plan_segments(part, hv=found["hv"], sm_count=132, rule=HOPPER_RULE)) == found["P"]


@pytest.mark.parametrize("lengths", RECORD["documents"], ids=str)
def test_plans_of_documents_on_one_rank(lengths):
    part = row(json.loads(lengths), 1, "C")
    plans = {hv: plan_segments(part, hv=int(hv), sm_count=132, rule=HOPPER_RULE) for hv in ("6", "12", "48")}
    assert as_in_json(plans) == RECORD["documents"][lengths]


def test_the_record_covers_every_pack_group_and_layout():
    rows = {(found["pack"], found["cp"], found["layout"]) for found in RECORD["rows"]}
    packs = ("P1", "P2", "P3", "P4", "P5")
    assert rows == {(pack, cp, layout) for pack in packs for cp in (1, 2, 4, 8, 16) for layout in "CZD"}


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_one_long_document_is_cut_and_four_short_ones_are_not():
    whole = rank_of([(249, False)])
    # 48 walks leave 84 multiprocessors idle, 96 on halves of V 36; in three pieces 132 walks are one round, and 12 that
    # are left over begin another on halves
    assert forward_time(whole, 1, 48, 132, H200_TIMES) == (249 * 134, 249 * 134)
    alike = 83 * (174 + 134) + 132 * 83 * 31 // 132 + 96 * 20
    assert forward_time(whole, 3, 48, 132, H200_TIMES).moderate == alike + 2040 + 2 * 204  # maps beside exit states
    # in five: 240 walks of 50 chunks in two rounds; 144 maps and 192 exit states in a row, one and two of each at most
    alike = 2 * 50 * 174 + 240 * 50 * 31 // 132 + 192 * 20
    slow = 50 * (142 + 2 * 81) + (192 * 50 * 18 + 144 * 50 * 111) // 132
    known = ByDecay(alike + 2 * 2040 + 4 * 204, alike + slow + 4 * 419)
    assert forward_time(whole, 5, 48, 132, H200_TIMES) == known
    # in two nothing enters what is left
    alike = 125 * 174 + 96 * 125 * 31 // 132 + 48 * 20
    known = ByDecay(alike + 2040 + 204, alike + 125 * 81 + 48 * 125 * 18 // 132 + 419)
    assert forward_time(whole, 2, 48, 132, H200_TIMES) == known
    # in ten what is summarised is short: 480 walks of 25 chunks; 432 exit states and 384 maps are seven rounds
    alike = 4 * 25 * 174 + 480 * 25 * 31 // 132 + 432 * 20 + 9 * 204
    assert forward_time(whole, 10, 48, 132, H200_TIMES).moderate == alike + 7 * 25 * 67
    # with another fragment behind it one exit state and one map more; with one before it a map, and all are composed
    alike = 2 * 50 * 174 + 240 * 50 * 31 // 132 + 4 * 204
    head, middle = (rank_of([(249, True, entered)]) for entered in (False, True))
    assert forward_time(head, 5, 48, 132, H200_TIMES).moderate == alike + 240 * 20 + 2 * 2040 + 340
    assert forward_time(middle, 5, 48, 132, H200_TIMES).moderate == alike + 240 * 47 + 2 * 2040 + 340
    # a forward, and a step: in five, slabs of 24 heads are 120 walks back and 120 over states, in two rounds, and 192
    # adjoints of entry states two
    alike = 2 * (2 * 50 * 174 + 240 * 50 * 31 // 132) + 4 * (192 * 20 + 4 * 204)
    alike += 2 * (50 * 200 + 120 * 50 * 34 // 132 + 50 * 200 + 120 * 50 * 29 // 132)
    found = plan_time(whole, 5, 48, 132, H200_TIMES).moderate
    assert found == alike + 3 * 2 * 2040 + 2 * 2850
    cuts = [row_segments([rank_of([(n, False)])], hv=48, sm_count=132, rule=HOPPER_RULE) for n in (60, 498, 1992)]
    assert cuts == [[1], [(2, 1, 2)], [(2, 1, 2)]]
    # 96 walks of 99 and 100 chunks, and 36 and then 12 of 50 beside them; 96 exit states, and beside them 48 maps
    alike = 100 * 174 + 48 * 249 * 31 // 132 + 96 * 20 + 2 * 204
    assert forward_time(whole, (2, 1, 2), 48, 132, H200_TIMES).moderate == alike + 2040
    assert row_segments([rank_of([(128, False)] * 4)], hv=48, sm_count=132, rule=HOPPER_RULE) == [1]


# Where one time stands for all, on three multiprocessors with two heads: 2 chunks in one piece take 2 steps, in two
# pieces, which are four walks, 2 as well, in a forward by itself and in that of a step. Between pieces each head tells
# a state in both, in the recompute, and on its way back: eight.
NOTHING = Summary(0, 0, 0, 0)
STEPS = StepTimes(
    walk=WalkStep(100, 900), back=WalkStep(0, 0), states=WalkStep(0, 0), **dict.fromkeys(SUMMARIES, NOTHING),
    **dict.fromkeys(STATES, 0), compose=ByDecay(0, 0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("state", "slow", "cut"),
    [
        (0, 0, 1),  # of equals the fewest
        (-1, 0, 2),
        (3, -19, 2),  # 424 beside 400 where it fades is near; 2 x 424 + 424 - 4 x 19 beside 2 x 400 + 400
        (3, -17, 1),
        (4, -99, 1),  # more than 6 %
    ],
)
def test_a_time_a_little_above_the_least_is_given_for_less_under_slow_decay(state, slow, cut, monkeypatch):
    times = STEPS._replace(state=state, compose=ByDecay(0, slow))
    monkeypatch.setitem(RULES, HOPPER_RULE, replace(RULES[HOPPER_RULE], costs=times))
    assert row_segments([rank_of([(2, False)])], hv=2, sm_count=3, rule=HOPPER_RULE) == [cut]


def test_what_no_cut_can_fall_below_may_lie_a_little_above_the_least(monkeypatch):
    # one multiprocessor and one head: whole 400, in two 424 beside 400, and no other cut can take less than that
    times = STEPS._replace(state=6, compose=ByDecay(0, -19))
    assert least_plan_time(rank_of([(2, False)]), 2, 1, 1, times) == 424
    monkeypatch.setitem(RULES, HOPPER_RULE, replace(RULES[HOPPER_RULE], costs=times))
    assert row_segments([rank_of([(2, False)])], hv=1, sm_count=1, rule=HOPPER_RULE) == [2]


@pytest.mark.parametrize(("steps", "summary"), [(26, 26 * 67), (27, 2040)])
def test_a_summary_of_a_short_segment_walks_all_of_it(steps, summary):
    alike = steps * 134 + 20 + 204  # two walks, on halves of V
    assert forward_time(rank_of([(2 * steps, False)]), 2, 1, 132, H200_TIMES).moderate == alike + summary


def test_only_ranks_that_state_crosses_are_cut_alike():
    part = row(PACKS["P4"], 8, "Z")
    ranks = rank_chunks(part)
    alone = [row_segments([rank], hv=48, sm_count=132, rule=HOPPER_RULE) for rank in ranks]
    assert alone == [[1]] + 7 * [[2]]
    assert plan_segments(part, hv=48, sm_count=132, rule=HOPPER_RULE) == 8 * [2]
    apart = [rank_of([(n, False)]) for n in (60, 498)]
    assert row_segments(apart, hv=48, sm_count=132, rule=HOPPER_RULE) == [1, (2, 1, 2)]


OF_MANY = [f"{of}.{part}" for of in (*WALKS, *SUMMARIES, "compose") for part in getattr(H200_TIMES, of)._fields]


@pytest.fixture(scope="module")
def planned() -> list[tuple[dict[str, Any], Any]]:
    """What `plan_segments` is given, and its plan of it."""
    rows = [{"part": part_of(n), "hv": of["hv"], "sm_count": of["sm"]} for n, of in CASES.items()]
    alone = [[length] for length in (26_800, *range(8_000, 190_000, 12_000))]  # the first for the crowds of summaries
    parts = [row(lengths, 1, "C") for lengths in (*alone, *map(json.loads, RECORD["documents"]))]
    rows += [{"part": part, "hv": hv, "sm_count": 132} for part in parts for hv in (6, 12, 48)]
    return [(given, plan_segments(**given, rule=HOPPER_RULE)) for given in rows]


@pytest.mark.parametrize("factor", [0, 5])
@pytest.mark.parametrize("name", [*STATES, *OF_MANY])
def test_every_time_decides_a_plan(planned, name, factor, monkeypatch):
    of, _, part = name.partition(".")
    known = getattr(H200_TIMES, of)
    changed = known._replace(**{part: factor * getattr(known, part)}) if part else factor * known
    times = H200_TIMES._replace(**{of: changed})
    monkeypatch.setitem(RULES, HOPPER_RULE, replace(RULES[HOPPER_RULE], costs=times))
    assert any(plan_segments(**given, rule=HOPPER_RULE) != plan for given, plan in planned)


def test_an_empty_rank_is_left_whole():
    assert row_segments([RankChunks(0, 0, ()), rank_of([(0, True)])], hv=48, sm_count=132, rule=HOPPER_RULE) == [1, 1]
