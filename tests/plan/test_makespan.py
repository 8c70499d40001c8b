"""The LPT makespan against handing jobs out one by one, against its bounds and against the best there is."""

from heapq import heapreplace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaspan.plan import lpt_makespan, soonest_division, soonest_pair
from deltaspan.plan.cost import HALVES_GAIN, LEAST_GAIN, LONGEST, WalkStep

Jobs = list[tuple[int, int]]

RANDOM = settings(max_examples=100, deadline=None)

few_jobs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=6)
many_jobs = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 500)), max_size=5)


def one_by_one(jobs: Jobs, machines: int, *, in_order: bool = False) -> int:
    """Each job, longest first or in order, to the least loaded machine."""
    loads = [0] * machines
    for length, count in jobs if in_order else sorted(jobs, reverse=True):
        for _ in range(count if length > 0 else 0):
            heapreplace(loads, loads[0] + length)
    return max(loads)


def best(jobs: Jobs, machines: int) -> int:
    """The least largest load of any assignment, by trying all; machines are alike, so loads are kept sorted."""
    reached = {(0,) * machines}
    for length, count in jobs:
        for _ in range(count):
            reached = {
                tuple(sorted([*loads[:i], loads[i] + length, *loads[i + 1 :]]))
                for loads in reached
                for i in range(machines)
            }
    return min(map(max, reached))


@settings(max_examples=300, deadline=None)
@given(few_jobs, st.integers(1, 9))
def test_equal_to_one_by_one_for_few_machines(jobs, machines):
    assert lpt_makespan(jobs, machines) == one_by_one(jobs, machines)


@RANDOM
@given(many_jobs, st.integers(1, 160))
def test_equal_to_one_by_one_for_the_multiprocessors_of_a_device(jobs, machines):
    assert lpt_makespan(jobs, machines) == one_by_one(jobs, machines)


@RANDOM
@given(st.integers(50, 400), st.integers(1, 200), st.integers(1, 5), st.integers(0, 5000), st.integers(1, 160))
def test_many_tiny_jobs_fill_the_gaps_that_long_ones_left(long, few, tiny, many, machines):
    jobs = [(tiny, many), (long, few)]
    assert lpt_makespan(jobs, machines) == one_by_one(jobs, machines)


@RANDOM
@given(many_jobs, st.integers(10**9, 10**15), st.integers(1, 160))
def test_more_units_than_could_be_counted_level_all_loads(jobs, units, machines):
    # all other jobs are longer or as long, so a unit always goes to a least loaded machine: loads end within 1
    total = units + sum(length * count for length, count in jobs)
    assert lpt_makespan([*jobs, (1, units)], machines) == -(-total // machines)


@RANDOM
@given(many_jobs, st.integers(2, 50), st.integers(10**9, 10**15), st.integers(1, 160))
def test_huge_counts_end_within_one_job_of_the_mean(jobs, length, count, machines):
    jobs = [(length + more, n) for more, n in jobs] + [(length, count)]
    total = sum(length * count for length, count in jobs)
    # the last job, the shortest, found its machine at or below the mean of what lay before
    assert -(-total // machines) <= lpt_makespan(jobs, machines) <= (total - length) // machines + length


@RANDOM
@given(many_jobs, st.integers(1, 160))
def test_between_the_bounds(jobs, machines):
    jobs = [job for job in jobs if min(job) > 0]
    total, longest = sum(length * count for length, count in jobs), max(jobs, default=(0, 0))[0]
    below = max(longest, -(-total // machines))
    # whoever ends last began when all others were busy: (total - its length) / machines at the latest
    assert below <= lpt_makespan(jobs, machines) <= (total + (machines - 1) * longest) // machines


@RANDOM
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 2)), max_size=4), st.integers(1, 4))
def test_at_most_four_thirds_of_the_best(jobs, machines):
    # Graham 1969: LPT <= (4/3 - 1/(3 m)) OPT
    assert best(jobs, machines) <= lpt_makespan(jobs, machines)
    assert 3 * machines * lpt_makespan(jobs, machines) <= (4 * machines - 1) * best(jobs, machines)


@RANDOM
@given(few_jobs, st.integers(1, 9), st.randoms(use_true_random=False), st.integers(1, 50))
def test_order_and_grouping_of_jobs_and_the_unit_of_length_do_not_matter(jobs, machines, random, unit):
    apart = [(length, 1) for length, count in jobs for _ in range(count)]
    random.shuffle(apart)
    assert lpt_makespan(iter(apart), machines) == lpt_makespan(jobs, machines)
    assert lpt_makespan([(unit * n, c) for n, c in jobs], machines) == unit * lpt_makespan(jobs, machines)


@pytest.mark.parametrize(
    ("jobs", "machines", "expected"),
    [
        ([], 3, 0),
        ([(5, 0), (0, 7), (-2, 3), (4, -1)], 1, 0),  # of no length or number
        ([(7, 1)], 100, 7),
        ([(5, 2), (4, 2), (3, 3)], 3, 11),  # Graham's worst case for 3 machines: the best is 9
        ([(10, 2), (1, 7)], 3, 10),  # the third machine takes units up to 7, one round of many
        ([(10, 2), (4, 3)], 3, 12),  # two fit below the others, the third goes there as well
        ([(10, 2), (4, 4)], 3, 14),
    ],
)
def test_worked_makespans(jobs, machines, expected):
    assert lpt_makespan(jobs, machines) == expected == one_by_one([j for j in jobs if min(j) > 0], machines)


@pytest.mark.parametrize("machines", [0, -1])
def test_no_machines_are_refused(machines):
    with pytest.raises(ValueError, match=f"machines must be at least 1, got {machines}"):
        lpt_makespan([(1, 1)], machines)


@pytest.mark.parametrize(
    ("chunks", "hv", "whole"),
    [
        ([2048], 6, 0),  # one document of 131,072 tokens and few heads leave most of a device idle
        ([40] * 11, 6, 0),  # 66 items, twice as many fit side by side
        ([40] * 12, 6, 72),  # 72 do not: two rounds of half, at three quarters of a step each
        ([40] * 11, 48, 528),  # four rounds, and none that leaves anybody idle
        ([128] * 4, 48, 132),  # 192 items: one round, and 120 halves
        ([900, 3, 3, 1], 12, 0),  # the longest decides
        ([900, 3, 3, 1] * 16, 12, 132),  # and here, too, of which there are 192
        ([128] * 44, 48, 44 * 48),  # 2,112 items are 16 rounds, too many to gain 4 %
        ([40] * 11 + [12], 6, 0),  # 12 half steps come on top of 40: 52 at three quarters are 2 % fewer than 40
        ([40] * 11 + [13], 6, 72),  # fewer, but not by that
        ([], 48, 0),
    ],
)
def test_halves_of_v_where_a_device_would_be_idle(chunks: list[int], hv: int, whole: int) -> None:
    assert soonest_division([(n, hv) for n in chunks], 132).whole == whole


@RANDOM
@given(few_jobs, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_a_division_is_the_soonest_of_three(walks, machines, step, half, crowd):
    items = sorted((n for n, count in walks for _ in range(count if n else 0)), reverse=True)
    found = {}
    counts = accumulate(len([n for n in items if n == length]) for length in sorted(set(items), reverse=True))
    ends = {*list(counts)[:LONGEST], len(items)}
    for whole in (len(items), *(end - end % machines for end in ends), 0):
        jobs = [(n * step, 1) for n in items[:whole]] + [(n * half, 2) for n in items[whole:]]
        found[whole] = one_by_one(jobs, machines, in_order=True) + sum(items[:whole]) * crowd // machines
    time, whole = soonest_division(walks, machines, step=step, half=half, crowd=crowd)
    assert time == found[whole]
    busy = sum(items) * min(step + crowd, 2 * half) // machines
    if 100 * found[len(items)] <= (100 + LEAST_GAIN) * busy:
        assert whole == len(items)
    else:
        worth = {w: n for w, n in found.items() if 100 * n <= (100 - HALVES_GAIN) * found[len(items)]}
        worth.setdefault(len(items), found[len(items)])
        assert time == min(worth.values()) and whole == max(w for w in worth if worth[w] == time)


@RANDOM
@given(few_jobs, st.integers(1, 9), st.lists(st.integers(1, 9), min_size=4, max_size=4), st.integers(0, 3))
def test_a_pair_ends_when_the_last_of_both_does(walks, machines, of_step, crowd):
    items = sorted((n for n, count in walks for _ in range(count if n else 0)), reverse=True)
    first, second = WalkStep(*of_step[:2], crowd), WalkStep(*of_step[2:], crowd)
    time, whole, behind = soonest_pair(walks, machines, first, second)
    assert whole in (0, len(items)) and 0 <= behind <= len(items)

    def ended(whole: int, behind: int) -> int:
        jobs, steps = [], []
        for of, count in ((first, whole), (second, behind)):
            jobs += [(n * of.step, 1) for n in items[:count]] + [(n * of.half, 2) for n in items[count:]]
            steps.append(sum(items[:count]) * of.crowd // machines)
        return one_by_one(jobs, machines, in_order=True) + sum(steps)

    assert time == ended(whole, behind)
    assert time <= min(ended(len(items), len(items)), ended(0, len(items)))


@pytest.mark.parametrize(
    ("chunks", "hv", "pair"),
    [
        ([125] * 2, 24, (48, 48)),  # 96 walks: all at once, whole
        ([256] * 4, 24, (96, 36)),  # 192: one round, and 60 of the second as 120 halves
        ([320] * 6, 24, (144, 120)),  # 288: two rounds, and 24 as 48
        ([2048], 3, (0, 0)),  # most of a device is idle
        ([40] * 11, 24, (264, 264)),  # four full rounds
        ([], 24, (0, 0)),
    ],
)
def test_walks_behind_others_fill_what_these_leave(chunks, hv, pair):
    assert soonest_pair([(n, hv) for n in chunks], 132)[1:] == pair
