"""Plans that were worked by hand or published for whole packs: which rule changes what, and what that costs."""

import json
from importlib.resources import files
from itertools import pairwise

import pytest

from deltaspan.plan import plan_segments, rank_chunks, rank_segments, walk_steps
from deltaspan.plan.rules import Target, cheapest_cut

from .rows import DATA, row

PACKS = json.loads(files("deltaspan").joinpath("data/packs.json").read_text())["packs"]
ROWS = json.loads((DATA / "plan_packs.json").read_text())["rows"]
HV = 48


def name_of(found: dict) -> str:
    return f"{found['pack']}-CP{found['cp']}-{found['layout']}-sm{found['sm']}"


# --- packs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["row_cost", "row_cost_lpt"])
@pytest.mark.parametrize("found", ROWS, ids=name_of)
def test_plans_of_packs(found, rule):
    part = row(PACKS[found["pack"]], found["cp"], found["layout"])
    plan = plan_segments(part, hv=HV, sm_count=found["sm"], rule=rule)
    assert plan == found[rule]
    steps = found["steps"][("row_cost", "row_cost_lpt").index(rule)]
    assert max(walk_steps(part, plan, hv=HV, sm_count=found["sm"])) == steps


PUBLISHED_CHANGES = {  # at 152 multiprocessors: plans of row_cost and row_cost_lpt, ratio of the slowest ranks' steps
    ("P1", 4, "Z"): ([2, 2, 2, 2], [2, 2, 3, 3], 0.8542),
    ("P3", 4, "C"): ([6, 11, 6, 6], [6, 6, 6, 6], 0.9389),
    ("P3", 4, "Z"): ([3, 3, 3, 2], [3, 3, 3, 3], 0.6983),
    ("P5", 4, "C"): ([3, 11, 11, 6], [3, 6, 6, 6], 0.9588),
    ("P5", 4, "Z"): ([2, 3, 2, 2], [3, 3, 3, 3], 0.7235),
}


@pytest.mark.parametrize("pack", ["P1", "P2", "P3", "P4", "P5"])
@pytest.mark.parametrize("layout", "CZD")
@pytest.mark.parametrize("cp", [1, 2, 4, 8, 16])
def test_only_the_five_published_rows_change(pack, cp, layout):
    part = row(PACKS[pack], cp, layout)
    before, after = (plan_segments(part, hv=HV, sm_count=152, rule=rule) for rule in ("row_cost", "row_cost_lpt"))
    if (pack, cp, layout) not in PUBLISHED_CHANGES:
        assert after == before
        return
    *plans, ratio = PUBLISHED_CHANGES[pack, cp, layout]
    assert [before, after] == plans
    slowest = [max(walk_steps(part, plan, hv=HV, sm_count=152)) for plan in plans]
    assert slowest[1] / slowest[0] == pytest.approx(ratio, abs=5e-5)  # published to four digits


@pytest.mark.parametrize(
    ("pack", "cp", "layout", "plan"),
    [
        ("A1", 8, "C", [3] * 8),
        ("A2", 8, "C", [3, 3, 3, 3, 3, 3, 2, 3]),
        ("A3", 4, "D", [1] * 4),
        ("A4", 8, "C", [3, 3, 3, 2, 2, 3, 3, 3]),
        ("C3", 8, "D", [1] * 8),
        ("C6", 2, "C", [1, 3]),
        ("C6", 4, "Z", [1] * 4),
        ("C8", 2, "C", [2, 1]),
        ("C8", 4, "D", [1] * 4),
    ],
)
def test_awkward_rows_keep_the_plan_of_row_cost(pack, cp, layout, plan):
    part = row(PACKS[pack], cp, layout)
    for rule in ("row_cost", "row_cost_lpt"):
        assert plan_segments(part, hv=HV, sm_count=152, rule=rule) == plan
    for target in ({"hv": HV, "sm_count": 132}, {"hv": 6, "sm_count": 132}, {"hv": 6, "sm_count": 152}):
        before, after = (plan_segments(part, **target, rule=rule) for rule in ("row_cost", "row_cost_lpt"))
        assert after == before


# --- worked rows -----------------------------------------------------------------------------------------------------

WORKED = {  # documents, ranks, layout, hv, sm_count; plans of wave_fill1, row_cost, row_cost_lpt
    "W1": (([100, 30], 2, "C", 48, 152), [2, 1], [1, 1], [1, 1]),
    "W2": (([65536], 4, "C", 48, 152), [3] * 4, [3] * 4, [3] * 4),
    "W3": (([65536], 4, "C", 48, 132), [2] * 4, [2] * 4, [2] * 4),
    "W4": ((PACKS["P3"], 4, "C", 48, 152), [6, 11, 6, 6], [6, 11, 6, 6], [6, 6, 6, 6]),
    "W5": ((PACKS["P3"], 4, "Z", 48, 152), [3, 3, 3, 2], [3, 3, 3, 2], [3, 3, 3, 3]),
    "W6": ((PACKS["P3"], 2, "C", 48, 152), [11, 19], [1, 1], [1, 1]),
    "W7": ((PACKS["P2"], 4, "Z", 48, 152), [3, 2, 2, 3], [3, 2, 2, 3], [3, 2, 2, 3]),
    "W8": (([20480], 2, "C", 8, 152), [19, 19], [19, 19], [19, 19]),
    "W9": (([73260, 106891], 2, "Z", 48, 152), [11, 3], [3, 3], [3, 3]),
    "W10": (([34087, 422], 4, "D", 8, 152), [5] * 4, [5] * 4, [5] * 4),
}
FURTHER_PLANS = [
    ("W2", "occ", [4] * 4),
    ("W3", "occ", [3] * 4),
    ("W8", "small_one", [1, 1]),
    ("W9", "occ", [3, 3]),
    ("W10", "small_one", [1] * 4),
    ("W10", "fill_small", [1] * 4),
    ("W10", "fill_down", [5] * 4),
]
COSTS = [  # of the slowest rank, in 10 ns
    ("W1", "wave_fill1", 4835),
    ("W1", "one", 1510),  # cheaper, so the whole row stays uncut
    ("W2", "row_cost", 73090),
    ("W2", "occ", 108880),
    ("W2", "one", 193280),
    ("W3", "row_cost", 100720),
    ("W4", "row_cost", 312600),
    ("W4", "row_cost_lpt", 275590),
    ("W5", "row_cost", 369500),
    ("W6", "wave_fill1", 590440),
    ("W6", "one", 581850),  # 1.5 % cheaper: `one` needs no margin
]
STEPS = [  # of the slowest rank
    ("W2", "row_cost_lpt", 688),
    ("W3", "row_cost_lpt", 1024),
    ("W4", "row_cost", 2880),
    ("W4", "row_cost_lpt", 2704),
    ("W5", "row_cost", 3872),
    ("W5", "row_cost_lpt", 2704),
]


@pytest.mark.parametrize("name", WORKED)
@pytest.mark.parametrize("rule", ["wave_fill1", "row_cost", "row_cost_lpt"])
def test_worked_plans(name, rule):
    (*pack, hv, sm_count), *plans = WORKED[name]
    expected = dict(zip(("wave_fill1", "row_cost", "row_cost_lpt"), plans, strict=True))[rule]
    assert plan_segments(row(*pack), hv=hv, sm_count=sm_count, rule=rule) == expected


@pytest.mark.parametrize(("name", "rule", "plan"), FURTHER_PLANS)
def test_worked_plans_of_further_rules(name, rule, plan):
    (*pack, hv, sm_count), *_ = WORKED[name]
    assert plan_segments(row(*pack), hv=hv, sm_count=sm_count, rule=rule) == plan


@pytest.mark.parametrize(("name", "rule", "cost"), COSTS)
def test_worked_costs(name, rule, cost):
    (*pack, hv, sm_count), *_ = WORKED[name]
    part = row(*pack)
    plan = plan_segments(part, hv=hv, sm_count=sm_count, rule=rule)
    assert Target(hv, sm_count).cost(rank_chunks(part), plan) == cost


@pytest.mark.parametrize(("name", "rule", "steps"), STEPS)
def test_worked_steps(name, rule, steps):
    (*pack, hv, sm_count), *_ = WORKED[name]
    part = row(*pack)
    plan = plan_segments(part, hv=hv, sm_count=sm_count, rule=rule)
    assert max(walk_steps(part, plan, hv=hv, sm_count=sm_count)) == steps


def test_one_rank_of_a_worked_row_is_cut_by_makespan():
    """W4's rank 1 and W5's rank 3 alone change, and what they cost."""
    target = Target(48, 152)
    for name, rank, before, after, cut in (("W4", 1, 312600, 269550, 6), ("W5", 3, 369500, 257310, 3)):
        (*pack, _, _), _, row_cost, row_cost_lpt = WORKED[name]
        chunks = rank_chunks(row(*pack))[rank]
        assert cheapest_cut(chunks, target) == row_cost_lpt[rank] == cut
        assert target.cost([chunks], [row_cost[rank]]) == before
        assert target.cost([chunks], [cut]) == after


def test_a_row_that_is_not_cut_stays_so_though_cuts_would_be_cheaper():
    (*pack, hv, sm_count), _, _, plan = WORKED["W6"]
    ranks, target = rank_chunks(row(*pack)), Target(hv, sm_count)
    assert [cheapest_cut(rank, target) for rank in ranks] == [9, 9]
    assert plan == [1, 1]
    assert 100 * target.walk_steps(ranks, [9, 9]) <= 96 * target.walk_steps(ranks, plan)


def test_a_row_whose_walks_shorten_by_less_than_four_percent_keeps_its_plan():
    (*pack, hv, sm_count), _, today, plan = WORKED["W7"]
    ranks, target = rank_chunks(row(*pack)), Target(hv, sm_count)
    assert [cheapest_cut(rank, target) for rank in ranks] == [3, 3, 3, 3]
    assert plan == today
    assert target.walk_steps(ranks, today) == 2848
    assert target.walk_steps(ranks, [3, 3, 3, 3]) == 2744


@pytest.mark.parametrize(
    ("fragments", "longest", "segments"),
    [
        *[(1, 1, 1), (1, 2, 2), (1, 3, 3), (1, 256, 3), (1, 257, 3), (1, 768, 3), (1, 769, 6)],
        *[(2, 1, 1), (2, 2, 2), (2, 256, 2), (2, 257, 3), (2, 681, 3), (2, 766, 11)],
    ],
)
def test_segments_of_few_fragments_at_48_heads(fragments, longest, segments):
    assert rank_segments(fragments, longest, hv=48, sm_count=152, rule="wave_fill1") == segments


def test_the_wave_rule_alternates_where_three_and_eleven_segments_cost_alike():
    cuts = [rank_segments(2, longest, hv=48, sm_count=152, rule="wave_fill1") for longest in range(682, 766)]
    assert cuts[0] == 11
    assert set(cuts) == {3, 11}
    assert sum(a != b for a, b in pairwise(cuts)) > 10
