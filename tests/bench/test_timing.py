"""Sides take turns, phases count by their slowest rank, and the group's marks change no result."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

import deltaspan as ds
from deltaspan.bench.operands import Operands, draw
from deltaspan.bench.sides import Deltaspan, TimedGroup
from deltaspan.bench.timing import WARM_UP, Samples, Stopwatch, interleave, is_steady, orders, peak_mib
from tests.helpers import same_bits


def test_sides_take_turns_in_rotated_order() -> None:
    made, clock = [], Stopwatch("cpu")

    def side(name: str):
        return lambda: clock.around(lambda: made.append(name))

    taken = interleave({name: side(name) for name in "abc"}, clock, samples=8)
    circle = "abcbcacabcbabacacb"
    assert "".join(made) == circle * 2 + circle[: 3 * WARM_UP]
    assert {len(each.ms) for each in taken.values()} == {12}  # the multiple of twice three sides after 8


def test_a_backward_runs_on_the_thread_that_asks_for_it() -> None:
    seen, clock = [], Stopwatch("cpu")
    interleave({"a": lambda: clock.around(lambda: seen.append(torch._C._is_multithreading_enabled()))}, clock, 8)
    assert not any(seen) and torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcd", "abcde"])
@pytest.mark.parametrize("skipped", [0, WARM_UP])
def test_each_side_has_every_turn_and_either_neighbour_equally_often(names: str, skipped: int) -> None:
    rounds = list(orders(names, skipped + 4 * len(names)))[skipped:]
    turns = Counter((name, turn) for order in rounds for turn, name in enumerate(order))
    assert turns == {(name, turn): 4 for name in names for turn in range(len(names))}
    follows = Counter(pair for order in rounds for pair in pairwise(order))
    assert all(follows[one, other] == follows[other, one] for one, other in follows)
    if len(names) == 4:  # a and c are opposite in the circle
        assert not follows["a", "c"] and follows["a", "b"]


def test_a_phase_lasts_as_long_as_its_slowest_rank() -> None:
    """Two phases of two ranks, 3 and 5 then 4 and 1: the group waits for 5 and 4, and rank 0 computes for 7."""
    phases = [[(0.0, 0.003), (0.003, 0.008)], [(0.010, 0.014), (0.014, 0.015)]]
    samples = interleave({"a": lambda: phases}, Stopwatch("cpu"), samples=8)["a"]
    assert samples.ms == pytest.approx([9.0] * 8)
    assert samples.rank_ms == [pytest.approx([7.0, 6.0])] * 8
    assert samples.slowest_rank() == 0


def test_the_spread_encloses_the_median() -> None:
    samples = Samples([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (samples.median, samples.spread()) == (3, {"min": 1, "quartile_1": 2, "quartile_3": 4, "max": 5})


@pytest.mark.parametrize(("ratio", "steady"), [(0.98, False), (0.99, True), (1.0, True), (1.01, True), (1.02, False)])
def test_a_control_may_differ_by_a_percent(ratio: float, steady: bool) -> None:
    assert is_steady(ratio) == steady


def test_no_memory_is_measured_on_a_cpu() -> None:
    assert peak_mib(lambda: None, "cpu") is None


def test_the_marks_of_simulated_ranks_change_no_bit(rng: torch.Generator) -> None:
    x = draw(190, (1, 2), "moderate", device="cpu", seed=rng.initial_seed())
    part = ds.partition([0, 100, 190], 3, layout="zigzag")
    found = {}
    for group in (ds.SimulatedGroup(3), TimedGroup(3, Stopwatch("cpu"))):
        side = Deltaspan(ds.build_context(part, group, device="cpu"))
        found[type(group)] = side.step(Operands(*map(side.ctx.shard, x)))
    for ours, plain in zip(found[TimedGroup], found[ds.SimulatedGroup], strict=True):
        assert all(map(same_bits, ours, plain))

    phases = group.during(lambda: side.forward(side.sharded(x)))
    assert [len(ranks) for ranks in phases] == [3, 3, 3]  # around two exchanges: summaries, then states
    marks = [mark for ranks in phases for interval in ranks for mark in interval]
    assert marks == sorted(marks)  # ranks one after another: no time counts twice
    assert len(group.during(lambda: None)) == 0
