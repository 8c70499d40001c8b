"""mbarriers: phases, arrivals and bytes still to come, and what who waits learns from those who arrived.

A phase is complete when all arrivals and all expected bytes are there; then the next one begins. `wait(barrier, phase)`
passes if the phase of that parity is complete: on a fresh barrier parity 1 passes at once, and who comes a whole phase
late waits on, as on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from tests.emulator.clocks import Agent, Knowledge
from tests.emulator.schedule import DeviceFault, here
from tests.emulator.shared import whole_index
from tests.emulator.values import Value, constant

BYTES_LIMIT = 2**20  # of a phase


class MBarrierLayout:
    """Tells allocate_shared_memory that it makes mbarriers."""

    def __init__(self, cga_layout: Sequence[Sequence[int]] = ()) -> None:
        if cga_layout:
            raise NotImplementedError("mbarriers of a cluster")


class Barrier:
    """One mbarrier."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loads = Agent(f"a TMA load on {name}")
        self.count: int | None = None
        self.missing = self.bytes = self.completed = self.last_load = 0
        self.arriving, self.passed = Knowledge(), Knowledge()
        here().program.barriers.append(self)

    def initialise(self, count: int) -> None:
        if self.count is not None:
            raise DeviceFault(f"{self.name} is initialised twice")
        if not isinstance(count, int) or count < 1:
            raise DeviceFault(f"{self.name} expects {count!r} arrivals; a constant of 1 or more is wanted")
        self.count = self.missing = count

    def invalidate(self) -> None:
        self._alive()
        self.count = None

    def expect(self, size: int) -> None:
        """One arrival, and that many bytes more."""
        self._alive()
        if not isinstance(size, int) or not 0 <= size < BYTES_LIMIT - self.bytes:
            raise DeviceFault(f"{self.name} is to expect {size!r} bytes")
        self.bytes += size
        self.arrive(1)

    def arrive(self, count: int) -> None:
        self._alive()
        part = here()
        if count > self.missing:
            raise DeviceFault(f"{part.name} arrives {count} times at {self.name}, whose phase lacks {self.missing}")
        self.missing -= count
        self.arriving.learn(part.knowledge)
        part.tick()
        self._settle()

    def announce(self) -> int:
        """A TMA load begins: the phase that it belongs to, counted from 1."""
        self._alive()
        self.last_load = self.completed + 1
        return self.last_load

    def land(self, size: int) -> None:
        if size > self.bytes:
            raise DeviceFault(f"{size} bytes land on {self.name}, which expects {self.bytes} more")
        self.bytes -= size
        self._settle()

    def wait(self, phase: int) -> None:
        self._alive()
        if phase not in (0, 1):
            raise DeviceFault(f"wait for phase {phase} of {self.name}; a phase is 0 or 1")
        part = here()

        def state() -> str:
            return (
                f"phase {phase} of {self.name}, which has completed {self.completed} phases and lacks "
                f"{self.missing} of {self.count} arrivals and {self.bytes} bytes"
            )

        part.program.hand_over(lambda: self.completed % 2 != phase, state)
        part.knowledge.learn(self.passed)

    def close(self, knowledge: Knowledge) -> None:
        """The end of the program."""
        if self.last_load > knowledge.known[self.loads]:
            raise DeviceFault(f"the program ends, and nobody has waited for the last TMA load on {self.name}")

    def _settle(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.completed += 1
            self.missing = self.count or 0
            self.arriving.known[self.loads] = self.completed
            self.passed.learn(self.arriving)

    def _alive(self) -> None:
        if self.count is None:
            raise DeviceFault(f"{self.name} is used before mbarrier.init, or after invalidate")


class Barriers:
    """An array of mbarriers, as allocated: [n, 1]."""

    def __init__(self, length: int, name: str) -> None:
        self.name, self.all = name, [Barrier(f"{name}[{i}]") for i in range(length)]

    @property
    def shape(self) -> list[int]:
        return [len(self.all), 1]

    def index(self, index: Value | int) -> Barrier:
        return self.all[whole_index(index, len(self.all), self.name)]


def allocate(dtype: torch.dtype, shape: Sequence[int], name: str) -> Barrier | Barriers:
    if dtype != torch.int64 or list(shape) not in ([1], [shape[0], 1]):
        raise TypeError(f"mbarriers are int64 of shape [1] or [n, 1], not {dtype} of shape {list(shape)}")
    return Barrier(name) if len(shape) == 1 else Barriers(shape[0], name)


def _true(pred: Value | bool) -> bool:
    return bool(constant(pred))


def _init(barrier: Barrier, count: int) -> None:
    barrier.initialise(count)


def _invalidate(barrier: Barrier) -> None:
    barrier.invalidate()


def _expect(barrier: Barrier, bytes: int, pred: Value | bool = True) -> None:
    here().program.pause()
    if _true(pred):
        barrier.expect(bytes)


def _arrive(barrier: Barrier, *, count: int = 1, pred: Value | bool = True) -> None:
    here().program.pause()
    if _true(pred):
        barrier.arrive(count)


def _wait(barrier: Barrier, phase: Value | int, pred: Value | bool = True, deps: Sequence[object] = ()) -> None:
    if _true(pred):
        barrier.wait(int(constant(phase).held))


def fence_async_shared(cluster: bool = False) -> None:
    """What this partition knows of shared memory becomes visible to asynchronous units."""
    part = here()
    part.knowledge.fence()
    part.tick()


mbarrier = SimpleNamespace(
    MBarrierLayout=MBarrierLayout, init=_init, invalidate=_invalidate, expect=_expect, arrive=_arrive, wait=_wait
)
