"""Rules by name: what each is asked, what it refuses, where it turns, and that its costs are its own data."""

from dataclasses import replace

import pytest

import deltaspan as ds
from deltaspan.plan import DEFAULT_RULE, RULES, plan_segments, rank_segments, row_segments
from deltaspan.plan.rules import PUBLISHED_COSTS

from .rows import CASES, RULES_OF_RANK, RULES_OF_ROW, part_of, rank_of

NO_RULES = ("rank_lpt", "fill_down_guard", "fill_small_guard", "fast", "")
PART = ds.partition([0, 100], 2)
RANKS = [rank_of([(300, True)]), rank_of([(280, False), (3, False)])]

# --- names -----------------------------------------------------------------------------------------------------------


def test_the_default_is_the_makespan_rule_of_the_row():
    assert DEFAULT_RULE == "row_cost_lpt"
    case = next(case for case in CASES.values() if case["P"]["row_cost"] != case["P"]["row_cost_lpt"])
    target = {"hv": case["hv"], "sm_count": case["sm"]}
    assert plan_segments(part_of(case["id"]), **target) == case["P"]["row_cost_lpt"]


def test_a_single_rank_is_cut_by_wave_fill1_unless_told_otherwise():
    # one short fragment, which `wave` would cut into 4, and two, which `wave_fill` would not cut
    assert [rank_segments(n, 200, hv=48, sm_count=152) for n in (1, 2)] == [3, 2]
    assert rank_segments(1, 200, hv=48, sm_count=152, rule="wave") == 4
    assert rank_segments(2, 200, hv=48, sm_count=152, rule="wave_fill") == 1


@pytest.mark.parametrize("rule", RULES_OF_RANK)
def test_a_rule_of_a_rank_reads_that_rank_alone(rule):
    for case in CASES.values():
        assert case["P"][rule] == [
            rank_segments(
                len(fragments),
                max((-(-fragment.length // 64) for fragment in fragments), default=0),
                hv=case["hv"],
                sm_count=case["sm"],
                rule=rule,
            )
            for fragments in part_of(case["id"]).fragments
        ]


def test_rule_one_leaves_fragments_whole():
    assert plan_segments(ds.partition([0, 100_000_000], 3), hv=48, sm_count=132, rule="one") == [1, 1, 1]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", NO_RULES)
def test_unknown_rules_are_refused(rule):
    with pytest.raises(ValueError, match=f"rule must be one of one, chain_min, .*, least_time; got '{rule}'"):
        plan_segments(PART, hv=4, sm_count=132, rule=rule)
    with pytest.raises(ValueError, match="rule must be one of"):
        rank_segments(1, 300, hv=4, sm_count=132, rule=rule)
    with pytest.raises(ValueError, match="rule must be one of"):
        row_segments(RANKS, hv=4, sm_count=132, rule=rule)
    with pytest.raises(ValueError, match="rule must be one of"):
        ds.build_context(PART, ds.SimulatedGroup(2), device="cpu", p_rule=rule)


@pytest.mark.parametrize("rule", RULES_OF_ROW)
def test_a_rule_of_a_row_is_refused_for_one_rank(rule):
    with pytest.raises(ValueError, match=f"rule must be one of one, .*, wave_fill; got '{rule}'"):
        rank_segments(1, 300, hv=48, sm_count=152, rule=rule)


@pytest.mark.parametrize("rule", RULES_OF_RANK)
def test_a_rule_of_a_rank_is_refused_for_a_row(rule):
    with pytest.raises(ValueError, match=f"rule must be one of row_cost, .*, least_time; got '{rule}'"):
        row_segments(RANKS, hv=48, sm_count=152, rule=rule)


@pytest.mark.parametrize("rule", ["one", "wave_fill1", "row_cost_lpt"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hv": 0}, ValueError, "hv must be at least 1, got 0"),
        ({"sm_count": 0}, ValueError, "sm_count must be at least 1, got 0"),
        ({"sm_count": -132}, ValueError, "sm_count must be at least 1, got -132"),
        ({"hv": 4.5}, TypeError, "hv"),
        ({"rule": None}, TypeError, "rule must be the name of a rule, got None"),
    ],
    ids=str,
)
def test_wrong_targets_are_refused(rule, change, error, message):
    target = {"hv": 4, "sm_count": 132, "rule": rule} | change
    with pytest.raises(error, match=message):
        plan_segments(PART, **target)
    with pytest.raises(error, match=message):
        row_segments(RANKS, **target) if rule in RULES_OF_ROW else rank_segments(1, 300, **target)


def test_a_negative_count_of_fragments_is_refused():
    with pytest.raises(ValueError, match="fragments must be at least 0, got -1"):
        rank_segments(-1, 300, hv=4, sm_count=132)


def test_a_context_refuses_a_target_without_multiprocessors():
    with pytest.raises(ValueError, match="sm_count must be at least 1, got 0"):
        ds.build_context(PART, ds.SimulatedGroup(2), device="cpu", sm_count=0)


# --- costs are data of the rule --------------------------------------------------------------------------------------


@pytest.fixture
def costly(monkeypatch):
    """A name for a rule of record with other step costs."""

    def name(rule: str, **costs: int) -> str:
        monkeypatch.setitem(RULES, "costly", replace(RULES[rule], costs=PUBLISHED_COSTS._replace(**costs)))
        return "costly"

    return name


@pytest.mark.parametrize("factor", [0, 20])
@pytest.mark.parametrize("cost", PUBLISHED_COSTS._fields)
def test_every_cost_decides_a_plan(cost, factor, costly):
    rule = costly("row_cost_lpt", **{cost: factor * getattr(PUBLISHED_COSTS, cost)})
    assert any(
        plan_segments(part_of(case["id"]), hv=case["hv"], sm_count=case["sm"], rule=rule) != case["P"]["row_cost_lpt"]
        for case in CASES.values()
    )


@pytest.mark.parametrize(("compose", "segments"), [(0, 33), (PUBLISHED_COSTS.compose, 20), (10**6, 4)])
def test_dear_composing_cuts_less(compose, segments, costly):
    # free: 33 segments of 4 heads fill the multiprocessors once; dear: as few as walks of 256 chunks allow
    assert rank_segments(1, 1000, hv=4, sm_count=132, rule=costly("wave", compose=compose)) == segments


@pytest.mark.parametrize("rule", ["wave", "row_cost", "row_cost_lpt"])
def test_the_unit_of_costs_changes_no_plan_of_record(rule, costly):
    tripled = costly(rule, **{name: 3 * getattr(PUBLISHED_COSTS, name) for name in PUBLISHED_COSTS._fields[:4]})
    for case in CASES.values():
        plan = plan_segments(part_of(case["id"]), hv=case["hv"], sm_count=case["sm"], rule=tripled)
        assert plan == case["P"][rule]
