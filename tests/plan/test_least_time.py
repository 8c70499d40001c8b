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
from deltaspan.plan.cost import ForwardTimes, least_rank_time, rank_time
from deltaspan.plan.rules import H200_TIMES

from .rows import CASES, DATA, heads, multiprocessors, part_of, rank_of, row, tables

PACKS = json.loads(files("deltaspan").joinpath("data/packs.json").read_text())["packs"]
RECORD = json.loads((DATA / "plan_least_time.json").read_text())
RANDOM = settings(max_examples=60, deadline=None)

Table = list[tuple[int, bool]]  # (chunks, state leaves for another fragment) by fragment

small_tables = st.lists(st.tuples(st.integers(0, 40) | st.integers(0, 600), st.booleans()), max_size=4)
times = st.builds(ForwardTimes, *[st.integers(1, 300)] * 3, st.integers(0, 9000), st.integers(0, 3000))


def busiest(lengths: list[int], machines: int) -> int:
    """Each walk, longest first, to the least loaded multiprocessor."""
    loads = [0] * machines
    for length in sorted(lengths, reverse=True):
        heapreplace(loads, loads[0] + length)
    return max(loads)


def forward_time(table: Table, cut: int, hv: int, sm_count: int, times: ForwardTimes) -> int:
    """Program by program."""
    walks, summaries = [], []
    for chunks, crosses_out in table:
        pieces = [-(-chunks // cut)] * min(cut, chunks)  # all as long as the longest
        walks += pieces * hv
        summaries += [times.start + n * times.summary for n in (pieces if crosses_out else pieces[1:])] * hv
    whole, halves = (busiest(walks * programs, sm_count) for programs in (1, 2))
    walk = min(whole * times.walk, halves * times.half)
    composing = (cut - 1) * times.compose * -(-len(table) * hv // sm_count)
    return busiest(summaries, sm_count) + walk + composing


def soonest(table: Table, hv: int, sm_count: int, times: ForwardTimes) -> int:
    longest = max((chunks for chunks, _ in table), default=0)
    cuts = range(1, max(1, min(64, longest)) + 1)
    return min(cuts, key=lambda cut: (forward_time(table, cut, hv, sm_count, times), cut))


@RANDOM
@given(small_tables, st.integers(1, 64), st.integers(1, 12), st.integers(1, 140), times)
def test_the_time_of_a_rank_is_that_of_its_programs(table, cut, hv, sm_count, times):
    cut = min(cut, max([1, *(chunks for chunks, _ in table)]))
    assert rank_time(rank_of(table), cut, hv, sm_count, times) == forward_time(table, cut, hv, sm_count, times)


@RANDOM
@given(small_tables, st.integers(1, 12), st.integers(1, 140), st.just(H200_TIMES) | times)
def test_no_cut_ends_sooner(table, hv, sm_count, times):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "timed", replace(RULES[HOPPER_RULE], costs=times))
        (cut,) = row_segments([rank_of(table)], hv=hv, sm_count=sm_count, rule="timed")
    assert cut == soonest(table, hv, sm_count, times)


@RANDOM
@given(tables, heads, multiprocessors, times, st.integers(1, 64), st.integers(1, 64))
def test_no_time_falls_below_its_bound(table, hv, sm_count, times, one, other):
    device, rank = (hv, sm_count, times), rank_of(table)
    fewer, more = sorted((one, other))
    assert least_rank_time(rank, fewer, *device) <= rank_time(rank, more, *device)


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
    assert rank_time(whole, 1, 48, 132, H200_TIMES) == 249 * 165
    # in five: 240 walks of 50 chunks and 192 summaries, both in two rounds
    assert rank_time(whole, 5, 48, 132, H200_TIMES) == 2 * (3600 + 50 * 80) + 2 * 50 * 230 + 4 * 860
    assert row_segments([whole], hv=48, sm_count=132, rule=HOPPER_RULE) == [1]
    assert row_segments([rank_of([(1992, False)])], hv=48, sm_count=132, rule=HOPPER_RULE) == [8]
    assert row_segments([rank_of([(128, False)] * 4)], hv=48, sm_count=132, rule=HOPPER_RULE) == [1]


def test_of_cuts_that_take_as_long_the_fewest_segments(monkeypatch):
    # three multiprocessors: two walks of 2 chunks take as long as four of 1
    times = ForwardTimes(walk=1, half=9, summary=0, start=0, compose=0)
    monkeypatch.setitem(RULES, HOPPER_RULE, replace(RULES[HOPPER_RULE], costs=times))
    assert [forward_time([(2, False)], cut, 2, 3, times) for cut in (1, 2)] == [2, 2]
    assert row_segments([rank_of([(2, False)])], hv=2, sm_count=3, rule=HOPPER_RULE) == [1]


def test_a_rank_is_cut_for_itself():
    part = row(PACKS["P1"], 4, "C")
    plan = plan_segments(part, hv=48, sm_count=132, rule=HOPPER_RULE)
    alone = [row_segments([rank], hv=48, sm_count=132, rule=HOPPER_RULE) for rank in rank_chunks(part)]
    assert [[cut] for cut in plan] == alone and len(set(plan)) > 2


@pytest.mark.parametrize("factor", [0, 5])
@pytest.mark.parametrize("name", ForwardTimes._fields)
def test_every_time_decides_a_plan(name, factor, monkeypatch):
    def plans() -> list[list[int]]:
        return [plan_segments(part_of(n), hv=of["hv"], sm_count=of["sm"], rule=HOPPER_RULE) for n, of in CASES.items()]

    before = plans()
    times = H200_TIMES._replace(**{name: factor * getattr(H200_TIMES, name)})
    monkeypatch.setitem(RULES, HOPPER_RULE, replace(RULES[HOPPER_RULE], costs=times))
    assert Counter(map(str, plans())) != Counter(map(str, before))


def test_an_empty_rank_is_left_whole():
    assert row_segments([RankChunks(0, 0, ()), rank_of([(0, True)])], hv=48, sm_count=132, rule=HOPPER_RULE) == [1, 1]
