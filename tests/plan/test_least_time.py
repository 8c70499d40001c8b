"""`least_time`: every rank in the time it says, by trying all cuts; plans of record; what each time decides."""

import json
from collections import Counter
from dataclasses import replace
from heapq import heapreplace
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaspan.plan import HOPPER_RULE, RULES, RankChunks, plan_segments, rank_chunks, row_segments
from deltaspan.plan.forward_time import H200_TIMES, ByDecay, ForwardTimes, forward_time, least_forward_time

from .rows import CASES, DATA, heads, multiprocessors, part_of, rank_of, row, tables

PACKS = json.loads(files("deltaspan").joinpath("data/packs.json").read_text())["packs"]
RECORD = json.loads((DATA / "plan_least_time.json").read_text())
RANDOM = settings(max_examples=60, deadline=None)

Table = list[tuple[int, bool, bool]]  # (chunks, state leaves for another fragment, and enters from one) by fragment

small_tables = st.lists(st.tuples(st.integers(0, 40) | st.integers(0, 600), st.booleans(), st.booleans()), max_size=4)
times = st.builds(
    ForwardTimes,
    **{name: st.integers(1, 300) for name in ForwardTimes._fields}
    | {"faded": st.integers(0, 9000), "map_faded": st.integers(0, 3000)},
)


def busiest(lengths: list[int], machines: int) -> int:
    """Each walk, longest first, to the least loaded multiprocessor."""
    loads = [0] * machines
    for length in sorted(lengths, reverse=True):
        heapreplace(loads, loads[0] + length)
    return max(loads)


def time_of(table: Table, cut: int, hv: int, sm_count: int, times: ForwardTimes) -> ByDecay:
    """Program by program."""
    walks, exits, maps, alike = [], [], [], (cut - 1) * times.compose
    for chunks, crosses_out, crosses_in in table:
        pieces = [-(-chunks // cut)] * min(cut, chunks) * hv  # all as long as the longest
        handed_on = pieces if crosses_out else pieces[hv:]
        walks += pieces
        exits += handed_on
        maps += handed_on if crosses_in else handed_on[hv:]
        alike += len(handed_on) * (times.crossing if crosses_in else times.state)
    whole = busiest(walks, sm_count) * times.walk + sum(walks) * times.crowd // sm_count
    alike += min(whole, busiest(walks * 2, sm_count) * times.half)
    moderate = slow = alike
    for these, faded, short, step, crowd in ((exits, *times[3:7]), (maps, *times[7:11])):
        moderate += busiest([faded if steps >= 27 else short * steps for steps in these], sm_count)
        slow += busiest(these, sm_count) * step + sum(these) * crowd // sm_count
    return ByDecay(moderate, slow)


def best(table: Table, hv: int, sm_count: int, times: ForwardTimes) -> int:
    """Of all cuts."""
    longest = max((chunks for chunks, *_ in table), default=0)
    found = {cut: time_of(table, cut, hv, sm_count, times) for cut in range(1, max(1, min(64, longest)) + 1)}
    bound = min(time.moderate for time in found.values()) * 106
    weighed = {cut: time.moderate + 2 * time.slow for cut, time in found.items() if 100 * time.moderate <= bound}
    return min(weighed, key=lambda cut: (weighed[cut], cut))


@RANDOM
@given(small_tables, st.integers(1, 64), st.integers(1, 12), st.integers(1, 140), times)
def test_the_time_of_a_rank_is_that_of_its_programs(table, cut, hv, sm_count, times):
    cut = min(cut, max([1, *(chunks for chunks, *_ in table)]))
    assert forward_time(rank_of(table), cut, hv, sm_count, times) == time_of(table, cut, hv, sm_count, times)


@RANDOM
@given(small_tables, st.integers(1, 12), st.integers(1, 140), st.just(H200_TIMES) | times)
def test_no_cut_is_better(table, hv, sm_count, times):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "timed", replace(RULES[HOPPER_RULE], costs=times))
        (cut,) = row_segments([rank_of(table)], hv=hv, sm_count=sm_count, rule="timed")
    assert cut == best(table, hv, sm_count, times)


@RANDOM
@given(tables, heads, multiprocessors, times, st.integers(1, 64), st.integers(1, 64))
def test_no_time_falls_below_its_bound(table, hv, sm_count, times, one, other):
    device, rank = (hv, sm_count, times), rank_of(table)
    fewer, more = sorted((one, other))
    assert least_forward_time(rank, fewer, *device) <= min(forward_time(rank, more, *device))


# --- plans of record --------------------------------------------------------------------------------------------------


def name_of(found: dict) -> str:
    return f"{found['pack']}-CP{found['cp']}-{found['layout']}-hv{found['hv']}"


@pytest.mark.parametrize("found", RECORD["rows"], ids=name_of)
def test_plans_of_packs(found):
    part = row(PACKS[found["pack"]], found["cp"], found["layout"])
    assert plan_segments(part, hv=found["hv"], sm_count=132, rule=HOPPER_RULE) == found["P"]


@pytest.mark.parametrize("lengths", RECORD["documents"], ids=str)
def test_plans_of_documents_on_one_rank(lengths):
    part = row(json.loads(lengths), 1, "C")
    plans = {hv: plan_segments(part, hv=int(hv), sm_count=132, rule=HOPPER_RULE) for hv in ("6", "12", "48")}
    assert plans == RECORD["documents"][lengths]


def test_the_record_covers_every_pack_group_and_layout():
    rows = {(found["pack"], found["cp"], found["layout"]) for found in RECORD["rows"]}
    packs = ("P1", "P2", "P3", "P4", "P5")
    assert rows == {(pack, cp, layout) for pack in packs for cp in (1, 2, 4, 8, 16) for layout in "CZD"}


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_one_long_document_is_cut_and_four_short_ones_are_not():
    whole = rank_of([(249, False)])
    # 48 walks leave 84 multiprocessors idle, 96 on halves of V 36
    assert forward_time(whole, 1, 48, 132, H200_TIMES) == (249 * 141, 249 * 141)
    # in five: 240 walks of 50 chunks, 192 exit states and 144 maps, all in two rounds
    alike = 2 * 50 * 194 + 240 * 50 * 24 // 132 + 192 * 30 + 4 * 470
    slow = 2 * 50 * 82 + 192 * 50 * 48 // 132 + 2 * 50 * 128 + 144 * 50 * 74 // 132
    assert forward_time(whole, 5, 48, 132, H200_TIMES) == (alike + 2 * 2270 + 2 * 430, alike + slow)
    # in two nothing enters what is left
    alike = 125 * 194 + 96 * 125 * 24 // 132 + 48 * 30 + 470
    assert forward_time(whole, 2, 48, 132, H200_TIMES) == (alike + 2270, alike + 125 * 82 + 48 * 125 * 48 // 132)
    # in ten what is summarised is short: 480 walks of 25 chunks and 432 exit states in four rounds, 384 maps in three
    alike = 4 * 25 * 194 + 480 * 25 * 24 // 132 + 432 * 30 + 9 * 470
    assert forward_time(whole, 10, 48, 132, H200_TIMES).moderate == alike + 4 * 25 * 97 + 3 * 25 * 63
    # with another fragment behind it one exit state and one map more; with one before it a map, and all are composed
    alike = 2 * 50 * 194 + 240 * 50 * 24 // 132 + 4 * 470
    head, middle = (rank_of([(249, True, entered)]) for entered in (False, True))
    assert forward_time(head, 5, 48, 132, H200_TIMES).moderate == alike + 240 * 30 + 2 * 2270 + 2 * 430
    assert forward_time(middle, 5, 48, 132, H200_TIMES).moderate == alike + 240 * 70 + 2 * 2270 + 2 * 430
    cuts = [row_segments([rank_of([(n, False)])], hv=48, sm_count=132, rule=HOPPER_RULE) for n in (60, 498, 996, 1992)]
    assert cuts == [[1], [2], [5], [8]]
    assert row_segments([rank_of([(128, False)] * 4)], hv=48, sm_count=132, rule=HOPPER_RULE) == [1]


# Where one time stands for all, on three multiprocessors with two heads: 2 chunks in one piece take 2 steps, in two
# pieces, which are four walks, 2 as well.
STEPS = ForwardTimes(**dict.fromkeys(ForwardTimes._fields, 0) | {"walk": 100, "half": 900})


@pytest.mark.parametrize(
    ("changed", "cut"),
    [
        ({}, 1),  # of equals the fewest
        ({"state": -1}, 2),
        ({"state": 6, "slow": -19}, 2),  # 212 beside 200 where it fades is near; 212 + 2 x 193 beside 200 + 2 x 200
        ({"state": 6, "slow": -17}, 1),
        ({"state": 7, "slow": -99}, 1),  # more than 6 %
    ],
)
def test_a_time_a_little_above_the_least_is_given_for_less_under_slow_decay(changed, cut, monkeypatch):
    monkeypatch.setitem(RULES, HOPPER_RULE, replace(RULES[HOPPER_RULE], costs=STEPS._replace(**changed)))
    assert row_segments([rank_of([(2, False)])], hv=2, sm_count=3, rule=HOPPER_RULE) == [cut]


def test_what_no_cut_can_fall_below_may_lie_a_little_above_the_least(monkeypatch):
    # one multiprocessor and one head: whole 200, in two 212 beside 200, and no other cut can take less than that
    times = STEPS._replace(state=12, slow=-50)
    assert least_forward_time(rank_of([(2, False)]), 2, 1, 1, times) == 212
    monkeypatch.setitem(RULES, HOPPER_RULE, replace(RULES[HOPPER_RULE], costs=times))
    assert row_segments([rank_of([(2, False)])], hv=1, sm_count=1, rule=HOPPER_RULE) == [2]


@pytest.mark.parametrize(("steps", "summary"), [(26, 26 * 97), (27, 2270)])
def test_a_summary_of_a_short_segment_walks_all_of_it(steps, summary):
    alike = steps * 141 + 30 + 470  # two walks, on halves of V
    assert forward_time(rank_of([(2 * steps, False)]), 2, 1, 132, H200_TIMES).moderate == alike + summary


def test_a_rank_is_cut_for_itself():
    part = row(PACKS["P2"], 4, "Z")
    plan = plan_segments(part, hv=48, sm_count=132, rule=HOPPER_RULE)
    alone = [row_segments([rank], hv=48, sm_count=132, rule=HOPPER_RULE) for rank in rank_chunks(part)]
    assert [[cut] for cut in plan] == alone and len(set(plan)) > 2


@pytest.mark.parametrize("factor", [0, 5])
@pytest.mark.parametrize("name", ForwardTimes._fields)
def test_every_time_decides_a_plan(name, factor, monkeypatch):
    rows = [(part_of(n), of["hv"], of["sm"]) for n, of in CASES.items()]
    rows += [(row(json.loads(lengths), 1, "C"), hv, 132) for lengths in RECORD["documents"] for hv in (6, 12, 48)]

    def plans() -> list[list[int]]:
        return [plan_segments(part, hv=hv, sm_count=sm, rule=HOPPER_RULE) for part, hv, sm in rows]

    before = plans()
    times = H200_TIMES._replace(**{name: factor * getattr(H200_TIMES, name)})
    monkeypatch.setitem(RULES, HOPPER_RULE, replace(RULES[HOPPER_RULE], costs=times))
    assert Counter(map(str, plans())) != Counter(map(str, before))


def test_an_empty_rank_is_left_whole():
    assert row_segments([RankChunks(0, 0, ()), rank_of([(0, True)])], hv=48, sm_count=132, rule=HOPPER_RULE) == [1, 1]
