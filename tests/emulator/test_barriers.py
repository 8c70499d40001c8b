"""Holds mbarriers to their phases and counts, and the schedule to its seed, its reports and its limits."""

import threading
import time
from typing import Any

import pytest
import torch

from tests.emulator import Deadlock, DeviceFault, launch
from tests.emulator.barriers import Barrier, mbarrier
from tests.emulator.language import gl
from tests.emulator.schedule import here
from tests.emulator.values import constant


def device(code: Any, *args: Any, **options: Any) -> None:
    launch(code, (1,), *args, **options)


def made(count: int) -> Barrier:
    bar = gl.allocate_shared_memory(torch.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=count)
    return bar


def test_phases_alternate_as_on_the_device() -> None:
    def code() -> None:
        bar = made(2)
        mbarrier.wait(bar, 1)  # the phase before the first counts as complete
        mbarrier.arrive(bar)
        mbarrier.wait(bar, 1)
        mbarrier.arrive(bar)
        mbarrier.wait(bar, 0)
        mbarrier.arrive(bar, count=2)
        mbarrier.wait(bar, constant(1))
        mbarrier.arrive(bar, pred=False)
        mbarrier.wait(bar, 0, pred=constant(False))
        mbarrier.wait(bar, 0)

    with pytest.raises(Deadlock, match="phase 0 of bar, which has completed 2 phases and lacks 2 of 2 arrivals"):
        device(code)


def test_who_comes_a_phase_late_waits_on() -> None:
    def code() -> None:
        bar = made(1)
        mbarrier.arrive(bar)
        mbarrier.arrive(bar)
        mbarrier.wait(bar, 0)

    with pytest.raises(Deadlock, match="completed 2 phases"):
        device(code)


def test_expected_bytes_hold_a_phase_open() -> None:
    def code() -> None:
        bar = made(1)
        mbarrier.expect(bar, 64)
        assert bar.completed == 0
        bar.land(48)
        assert bar.completed == 0
        bar.land(16)
        assert bar.completed == 1
        with pytest.raises(DeviceFault, match="16 bytes land on bar, which expects 0 more"):
            bar.land(16)
        mbarrier.expect(bar, 0)
        with pytest.raises(DeviceFault, match="expect 1048576 bytes"):
            mbarrier.expect(bar, 2**20)

    device(code)


def test_misuse_is_a_fault() -> None:
    def code() -> None:
        bar = made(1)
        with pytest.raises(DeviceFault, match="arrives 2 times at bar, whose phase lacks 1"):
            mbarrier.arrive(bar, count=2)
        with pytest.raises(DeviceFault, match="twice"):
            mbarrier.init(bar, count=1)
        with pytest.raises(DeviceFault, match="phase 2"):
            mbarrier.wait(bar, 2)
        mbarrier.invalidate(bar)
        with pytest.raises(DeviceFault, match=r"before mbarrier\.init, or after invalidate"):
            mbarrier.wait(bar, 1)
        row = gl.allocate_shared_memory(torch.int64, [3, 1], mbarrier.MBarrierLayout())
        with pytest.raises(DeviceFault, match="index 3 of row"):
            row.index(3)

    device(code)


def ping(bars: Any, log: list[str]) -> None:
    for i in range(4):
        mbarrier.arrive(bars.index(0))
        mbarrier.wait(bars.index(1), i % 2)
        log.append("ping")


def pong(bars: Any, log: list[str]) -> None:
    for i in range(4):
        mbarrier.wait(bars.index(0), i % 2)
        log.append("pong")
        mbarrier.arrive(bars.index(1))


def free(log: list[str]) -> None:
    for _ in range(4):
        gl.thread_barrier()
        log.append("free")


def one_log(seed: int) -> list[str]:
    log: list[str] = []

    def code() -> None:
        bars = gl.allocate_shared_memory(torch.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(bars.index(0), count=1)
        mbarrier.init(bars.index(1), count=1)
        gl.warp_specialize([(ping, (bars, log)), (pong, (bars, log)), (free, (log,))], [1, 1])

    device(code, seed=seed)
    return log


def test_a_seed_repeats_and_seeds_differ() -> None:
    logs = [one_log(seed) for seed in range(10)]
    assert logs == [one_log(seed) for seed in range(10)]
    assert len({tuple(log) for log in logs}) > 2
    for log in logs:
        assert [who for who in log if who != "free"][::2] == ["pong"] * 4


def test_the_first_partition_returns_results_and_workers_take_no_tensors() -> None:
    def value(x: Any) -> Any:
        return x + 1, x

    def code() -> None:
        tensor = gl.arange(0, 4)
        one, same = gl.warp_specialize([(value, (tensor,)), (value, (constant(1),))], [1], [24])
        assert one.held.tolist() == [1, 2, 3, 4] and same is tensor
        with pytest.raises(ValueError, match="second time"):
            gl.warp_specialize([(value, (tensor,))], [])

    device(code)
    with pytest.raises(TypeError, match="a worker takes no tensors"):
        device(lambda: gl.warp_specialize([(value, (1,)), (value, (gl.arange(0, 4),))], [1], [24]))
    with pytest.raises(ValueError, match="1 workers"):
        device(lambda: gl.warp_specialize([(value, (1,)), (value, (1,))], [1, 1], [24]))


def test_an_error_in_one_partition_ends_all_at_once() -> None:
    def fails(bar: Barrier) -> None:
        raise ZeroDivisionError("planted")

    def waits(bar: Barrier) -> None:
        mbarrier.wait(bar, 0)

    before, started = threading.active_count(), time.monotonic()
    with pytest.raises(ZeroDivisionError, match="planted"):
        device(lambda: gl.warp_specialize([(waits, (bar := made(1),)), (fails, (bar,)), (waits, (bar,))], [1, 1]))
    assert threading.active_count() == before and time.monotonic() - started < 5


def test_a_deadlock_of_workers_leaves_no_thread() -> None:
    def waits(bar: Barrier, phase: int) -> None:
        mbarrier.wait(bar, phase)

    before = threading.active_count()
    with pytest.raises(Deadlock, match=r"waits #1 waits for phase 0 of bar.*\n.*waits #2 waits for phase 0 of bar"):

        def code() -> None:
            bar = made(1)
            gl.warp_specialize([(waits, (bar, 0)), (waits, (bar, 0)), (waits, (bar, 1))], [1, 1], [24, 24])

        device(code)
    assert threading.active_count() == before


def test_a_loop_without_end_meets_the_time_limit() -> None:
    def spins() -> None:
        while constant(1) > 0:
            pass

    with pytest.raises(DeviceFault, match=r"did not end within 0\.2 s"):
        device(spins, seconds=0.2)
    with pytest.raises(DeviceFault, match=r"did not end within 0\.2 s"):
        device(lambda: gl.warp_specialize([(gl.thread_barrier, ()), (spins, ())], [1]), seconds=0.2)


def test_every_program_of_a_grid_runs_once_and_knows_its_place() -> None:
    seen = []

    def code() -> None:
        seen.append(tuple(int(gl.program_id(i).held) for i in range(3)))
        assert [int(gl.num_programs(i).held) for i in range(3)] == [2, 3, 1]
        assert here().name == "the program"

    launch(code, (2, 3), seed=4)
    assert sorted(seen) == [(i, j, 0) for i in range(2) for j in range(3)] and seen != sorted(seen)
