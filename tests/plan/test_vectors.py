"""The planner against plans and figures of record, each a test of its own."""

import numpy as np
import pytest

from deltaspan.plan import (
    lpt_makespan,
    plan_segments,
    rank_chunks,
    rank_cost,
    rank_walk_steps,
    segment_starts,
    walk_steps,
)
from deltaspan.plan.rules import PUBLISHED_COSTS, RULES, Target, cheapest_cut, wave_cost

from .rows import CASES, PUBLISHED_OF_ROW, RECORD, RULES_OF_RANK, RULES_OF_ROW, name_of, part_of, rank_of

every_case = pytest.mark.parametrize("case", CASES.values(), ids=name_of)


def test_the_record_covers_every_rule_and_what_each_does():
    assert len(CASES) == 143
    assert {*RULES_OF_RANK, *RULES_OF_ROW} == set(RULES)
    assert all(case["P"].keys() == {*RULES_OF_RANK, *PUBLISHED_OF_ROW} for case in CASES.values())
    assert {tag for case in CASES.values() for tag in case["tags"]} == {
        "lpt_changed",
        "whole_row_one",
        "whole_row_occ",
        "row_gate_rejects",
        "rank_gate_rejects",
        "changes_only_if_gates_off",
        "small_one_acts",
        "fill_down_acts",
    }


@pytest.mark.parametrize("rule", [*RULES_OF_RANK, *PUBLISHED_OF_ROW])
@every_case
def test_plans_of_record(case, rule):
    plan = plan_segments(part_of(case["id"]), hv=case["hv"], sm_count=case["sm"], rule=rule)
    assert plan == case["P"][rule]


@every_case
def test_costs_of_record(case):
    pairs = zip(rank_chunks(part_of(case["id"])), case["P"]["row_cost_lpt"], strict=True)
    costs = [rank_cost(rank, cut, case["hv"], case["sm"], PUBLISHED_COSTS) for rank, cut in pairs]
    assert costs == case["cost"]


@every_case
def test_walk_steps_of_record(case):
    plan = case["P"]["row_cost_lpt"]
    assert walk_steps(part_of(case["id"]), plan, hv=case["hv"], sm_count=case["sm"]) == case["steps"]


@pytest.mark.parametrize(("jobs", "machines", "expected"), RECORD["lpt_makespan"])
def test_makespan_of_record(jobs, machines, expected):
    assert lpt_makespan([tuple(job) for job in jobs], machines) == expected


@pytest.mark.parametrize(("arguments", "expected"), RECORD["wave_cost"], ids=str)
def test_wave_cost_of_record(arguments, expected):
    fragments, longest, hv, sm_count, cut = arguments
    assert wave_cost(fragments, longest, cut, Target(hv, sm_count)) == expected


@pytest.mark.parametrize(("table", "hv", "sm_count", "cut", "expected"), RECORD["rank_cost"])
def test_rank_cost_of_record(table, hv, sm_count, cut, expected):
    assert rank_cost(rank_of(table), cut, hv, sm_count, PUBLISHED_COSTS) == expected


@pytest.mark.parametrize(("table", "hv", "sm_count", "cut", "expected"), RECORD["walk_steps"])
def test_rank_walk_steps_of_record(table, hv, sm_count, cut, expected):
    assert rank_walk_steps(rank_of(table), cut, hv, sm_count) == expected


@pytest.mark.parametrize(("table", "hv", "sm_count", "expected"), RECORD["cheapest_cut"])
def test_cheapest_cut_of_record(table, hv, sm_count, expected):
    assert cheapest_cut(rank_of(table), Target(hv, sm_count)) == expected


@pytest.mark.parametrize(("starts", "segments", "expected"), RECORD["segment_starts"], ids=str)
def test_segment_starts_of_record(starts, segments, expected):
    found = segment_starts(np.diff(starts), segments)
    assert found.dtype == "int64"
    assert found.tolist() == expected
