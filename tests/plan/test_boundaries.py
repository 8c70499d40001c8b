"""Where a rule turns, to the unit: margins that are just met and just missed, lengths and heads on either side.

Costs are the rule's own data, so that rows can be worked by hand in which a margin is met exactly.
"""

from dataclasses import replace

import pytest

from deltaspan.plan import RULES, rank_segments, row_segments
from deltaspan.plan.cost import StepCosts
from deltaspan.plan.rules import Target, cheapest_cut

from .rows import rank_of


@pytest.fixture
def with_costs(monkeypatch):
    """A name for a rule of record with other step costs."""

    def name(rule: str, costs: StepCosts) -> str:
        monkeypatch.setitem(RULES, "worked", replace(RULES[rule], costs=costs))
        return "worked"

    return name


Table = list[tuple[int, bool]]  # (chunks, state leaves for another fragment) by fragment


def row(tables: list[Table], hv: int, sm_count: int, rule: str) -> list[int]:
    return row_segments([rank_of(table) for table in tables], hv=hv, sm_count=sm_count, rule=rule)


# --- margins ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compose", "segments"), [(1020, 2), (1019, 3)])
def test_the_fewest_segments_within_two_percent_of_the_cheapest(compose, segments):
    # 2 segments: 13 x 255 + 1020 = 4335; 3: 13 x 170 + 2 x 1020 = 4250, and 1.02 x 4250 = 4335; 4 need a second wave
    costs = StepCosts(tape=13, transfer=0, offset=0, compose=compose, compose_weight=1)
    assert cheapest_cut(rank_of([(510, False)]), Target(1, 3, costs)) == segments


@pytest.mark.parametrize(("weight", "plan"), [(561, [4]), (560, [14])])
def test_occ_is_taken_from_two_percent_on(weight, plan, with_costs):
    # two multiprocessors walk 14 segments in 511 steps, the 4 of `occ` in 512, and compose ten times less:
    # 512 x 487 + 3 x 561 = 251027 = 0.98 (511 x 487 + 13 x 561)
    costs = StepCosts(tape=487, transfer=0, offset=0, compose=1, compose_weight=weight)
    assert rank_segments(1, 1022, hv=1, sm_count=2, rule=with_costs("wave_fill1", costs)) == 14
    assert row([[(1022, True)]], 1, 2, with_costs("row_cost", costs)) == plan


def test_one_is_taken_only_where_it_is_cheaper(with_costs):
    # 24 heads fill 25 multiprocessors once: one piece of 500 chunks takes 500 steps, as do two of 250 in two waves
    free = StepCosts(tape=10, transfer=0, offset=0, compose=10**6, compose_weight=0)
    assert row([[(500, True)]], 24, 25, with_costs("row_cost", free)) == [2]
    assert row([[(499, True)]], 24, 25, with_costs("row_cost", free)) == [1]


@pytest.mark.parametrize(("longest", "plan"), [(500, [25]), (498, [2])])
def test_walks_must_shorten_by_four_percent(longest, plan, with_costs):
    # 24 heads on 25 multiprocessors: 25 segments of 20 chunks take 24 waves, 480 steps. Two segments of 250 take 500
    # steps and 480 = 0.96 x 500; of 249, 498 steps. Composing is dear before the exchange alone, where `wave` sees it.
    costs = StepCosts(tape=10, transfer=0, offset=0, compose=10**6, compose_weight=0)
    assert row([[(longest, True)]], 24, 25, with_costs("row_cost", costs)) == [2]
    assert row([[(longest, True)]], 24, 25, with_costs("row_cost_lpt", costs)) == plan


def test_a_rank_whose_own_walks_stay_as_long_may_change_with_the_row():
    slowest, other = [(483, False), (24, True), (507, True)], [(506, False), (252, True)]
    to = Target(48, 152)
    assert [to.walk_steps([rank_of(other)], [cut]) for cut in (3, 2)] == [2024, 2024]
    assert row([slowest, other], 48, 152, "row_cost") == [2, 3]
    assert row([slowest, other], 48, 152, "row_cost_lpt") == [3, 2]


def test_occ_is_judged_before_one_and_one_against_what_occ_reached():
    ranks = [[(394, True)], [(954, False)], [(3, False), (2490, True), (256, False)]]
    to, chunks = Target(48, 57), [rank_of(table) for table in ranks]
    base, occ = (
        [rank_segments(rank.fragments, rank.longest, hv=48, sm_count=57, rule=rule) for rank in chunks]
        for rule in ("wave_fill1", "occ")
    )
    assert to.cost(chunks, occ) < to.cost(chunks, [1, 1, 1]) < to.cost(chunks, base)
    assert row(ranks, 48, 57, "row_cost") == occ == [2, 4, 10]


# --- sides of a length, of a count and of the heads ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "fragments", "longest", "hv", "sm_count", "segments"),
    [
        ("one", 1, 10**6, 48, 132, 1),
        ("chain_min", 1, 256, 48, 132, 1),
        ("chain_min", 1, 257, 48, 132, 2),
        ("chain_min", 1, 64 * 256, 48, 132, 64),
        ("chain_min", 1, 64 * 256 + 1, 48, 132, 64),  # the one case of walks beyond 256
        ("occ", 1, 200, 100, 132, 2),  # up: a rest of multiprocessors is worth a segment
        ("occ", 1, 200, 66, 132, 2),
        ("occ", 1, 513, 132, 132, 3),  # walks of 256 need more than the heads do
        ("occ", 1, 200, 1, 132, 64),
        ("occ", 3, 40, 1, 132, 40),  # as many as chunks
        ("occ", 2, 0, 1, 132, 1),
        ("wave", 3, 257, 40, 152, 5),  # few and long
        ("wave", 4, 257, 40, 152, 2),  # else `occ`
        ("wave", 3, 256, 40, 152, 2),
        ("wave_fill1", 1, 256, 100, 199, 1),  # down: a second wave is what it avoids
        ("wave_fill1", 1, 256, 100, 200, 2),
        ("wave_fill1", 1, 200, 1, 132, 64),
        ("wave_fill1", 1, 100, 1, 132, 64),
        ("wave_fill1", 1, 60, 1, 132, 60),
        ("wave_fill1", 1, 0, 48, 132, 1),
        ("wave_fill1", 2, 256, 48, 152, 2),
        ("wave_fill", 2, 256, 48, 152, 1),
        ("wave_fill", 3, 256, 40, 132, 1),
        ("wave_fill", 4, 256, 30, 132, 2),
    ],
)
def test_segments_of_one_rank(rule, fragments, longest, hv, sm_count, segments):
    assert rank_segments(fragments, longest, hv=hv, sm_count=sm_count, rule=rule) == segments


@pytest.mark.parametrize(("hv", "longest", "whole"), [(12, 160, True), (12, 161, False), (13, 160, False)])
def test_small_rows_are_left_whole(hv, longest, whole):
    ranks = [[(longest, True)], [(3, False), (longest - 1, False)]]
    today = row(ranks, hv, 132, "row_cost_lpt")
    assert 1 not in today
    assert row(ranks, hv, 132, "small_one") == ([1, 1] if whole else today)


def test_fill_down_touches_ranks_of_two_and_three_short_fragments_alone():
    ranks = [2 * [(256, True)], 3 * [(200, True)], 2 * [(257, True)], 4 * [(200, True)], [(256, True)]]
    today = row(ranks, 40, 152, "row_cost_lpt")
    assert today == [2, 2, 7, 1, 3]
    assert row(ranks, 40, 152, "fill_down") == [1, 1, 7, 1, 3]


@pytest.mark.parametrize("rule", ["row_cost", "row_cost_lpt", "fill_down"])
def test_empty_ranks_and_rows(rule):
    assert row([], 48, 132, rule) == []
    assert row([[], []], 48, 132, rule) == [1, 1]
    assert row([[], [(0, False), (0, False)], [(256, True)]], 48, 152, rule) == [1, 1, 3]
