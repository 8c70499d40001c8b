"""Decides which partition of a program, or which copy under way, moves next: at random, and the same way for one seed.

Each partition is a Python thread, but only one runs at a time and hands its turn on at every event that others could
notice. A copy under way has no thread: when its turn comes, it lands. So a run repeats by its seed, a seed may let one
partition crawl, and a deadlock is known at once: nobody can move.
"""

import random
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

import torch

from tests.emulator.clocks import Agent, Knowledge

EAGERNESS = (1.0, 1.0, 8.0, 64.0)  # how often a partition or a copy gets its turn, as against others
KEEPS_TURN = 0.6  # how often a partition goes on where it could hand over


class DeviceFault(AssertionError):
    """What a kernel does that the device answers with a wrong result, a trap or a hang."""


class Deadlock(DeviceFault):
    """No partition can move, and no copy is under way."""


class Abandoned(BaseException):
    """Ends a partition's thread, since another one has failed."""


class Copy(Protocol):
    """An asynchronous copy under way."""

    eagerness: float

    def land(self) -> None: ...


class Partition:
    """One warp-specialised partition of a program, or the program before it splits: what it knows and waits for."""

    def __init__(self, program: "Program", name: str, knowledge: Knowledge) -> None:
        self.program, self.name, self.knowledge = program, name, knowledge
        self.agent = Agent(name, generic=True)
        self.products = Agent(f"a warpgroup_mma of {name}")
        self.stores = Agent(f"a TMA store of {name}")
        self.copied = Agent(f"an asynchronous copy of {name}", generic=True)
        self.products_issued = self.stores_issued = 0
        self.products_in_flight: list[Any] = []
        self.stores_in_flight: list[Any] = []
        self.copies_asked: list[Any] = []  # since the last group
        self.groups_in_flight: list[list[Any]] = []
        self.groups_begun = 0
        self.operands_to_keep: list[Any] = []  # products done, but no wait so far has named what they read in registers
        self.eagerness = program.draw_eagerness()
        self.turn = threading.Semaphore(0)
        self.ready: Callable[[], bool] | None = None  # None: can move
        self.waits_for: Callable[[], str] = str
        self.done = False

    @property
    def clock(self) -> int:
        return self.knowledge.known[self.agent]

    def tick(self) -> None:
        """What this partition does from now on is not known to those who have heard from it so far."""
        self.knowledge.known[self.agent] += 1

    def close(self) -> None:
        """The end of its code: nothing that it issued may still be under way."""
        if self.products_in_flight:
            raise DeviceFault(f"{self.name} ends without waiting for {len(self.products_in_flight)} warpgroup_mma")
        if self.operands_to_keep:
            product = self.operands_to_keep[0]
            raise DeviceFault(
                f"warpgroup_mma number {product.number} of {self.name} reads a left operand in registers, which is "
                "among the deps of no wait from its own on: its registers may be reused while it is read"
            )
        if self.copies_asked or any(self.groups_in_flight):
            raise DeviceFault(f"{self.name} ends without waiting for its asynchronous copies")
        if self.stores_in_flight:
            raise DeviceFault(f"{self.name} ends without store_wait(0): the program's shared memory may go first")


class Program:
    """One program of the grid, run to its end by `run`."""

    def __init__(self, ids: tuple[int, ...], grid: tuple[int, ...], seed: object, seconds: float) -> None:
        self.ids, self.grid, self.seconds = ids, grid, seconds
        self.deadline = time.monotonic() + seconds
        self.random = random.Random(f"{seed} {ids}")
        self.partitions: list[Partition] = []
        self.copies: list[Copy] = []
        self.barriers: list[Any] = []
        self.shared_bytes = 0
        self.split = False
        self.failure: BaseException | None = None

    def draw_eagerness(self) -> float:
        return self.random.choice(EAGERNESS)

    def run(self, code: Callable[[], Any]) -> None:
        whole = self._enter("the program", Knowledge())
        _local.partition = whole
        try:
            code()
            whole.close()
            for barrier in self.barriers:
                barrier.close(whole.knowledge)
        except Abandoned:
            assert self.failure is not None
            raise self.failure from None
        finally:
            del _local.partition

    def run_partitions(self, pieces: list[tuple[str, Callable[[], Any]]]) -> Any:
        """Runs them side by side, each with what the whole program knows so far; returns what the first returns."""
        whole = here()
        names = _distinct([name for name, _ in pieces])
        parts = [self._enter(name, whole.knowledge.copy()) for name in names]
        results: dict[int, Any] = {}
        threads = [
            threading.Thread(target=self._live, args=(part, code, results, i), daemon=True)
            for i, (part, (_, code)) in enumerate(zip(parts, pieces, strict=True))
        ]
        for thread in threads:
            thread.start()
        try:
            self.hand_over(lambda: all(part.done for part in parts), lambda: "its partitions")
        except Exception as error:  # a deadlock, or a copy that landed wrongly
            self.fail(error)
            raise
        finally:
            for thread in threads:
                thread.join(0.5)  # one that computes on without an event outlives this; it ends at its next one
        for part in parts:
            whole.knowledge.learn(part.knowledge)
        return results[0]

    def _enter(self, name: str, knowledge: Knowledge) -> Partition:
        part = Partition(self, name, knowledge)
        knowledge.known[part.agent] = 1
        self.partitions.append(part)
        return part

    @torch.no_grad()  # which a thread does not inherit
    def _live(self, part: Partition, code: Callable[[], Any], results: dict[int, Any], i: int) -> None:
        _local.partition = part
        try:
            part.turn.acquire()
            self.check()
            results[i] = code()
            part.close()
            part.done = True
            self._choose().turn.release()
        except Abandoned:
            pass
        except BaseException as error:
            self.fail(error)

    def pause(self) -> None:
        """An event that others could notice: perhaps one of them moves first."""
        self.check()
        if (len(self.partitions) > 1 or self.copies) and self.random.random() > KEEPS_TURN:
            self.hand_over(None, str)

    def hand_over(self, ready: Callable[[], bool] | None, waits_for: Callable[[], str]) -> None:
        """Lets others move, and comes back once it is this partition's turn and `ready()` holds."""
        me = here()
        me.ready, me.waits_for = ready, waits_for
        following = self._choose()
        if following is not me:
            following.turn.release()
            if not me.turn.acquire(timeout=max(0.0, self.deadline - time.monotonic()) + 1.0):
                self.fail(DeviceFault(f"program {self.ids} did not end within {self.seconds} s"))
        self.check()
        me.ready = None

    def _choose(self) -> Partition:
        """Who moves next; copies whose turn comes before land meanwhile."""
        while True:
            able: list[Any] = [p for p in self.partitions if not p.done and (p.ready is None or p.ready())]
            able += self.copies
            if not able:
                asked = self.partitions[1:] or self.partitions
                waiting = [f"  {p.name} waits for {p.waits_for()}" for p in asked if not p.done]
                raise Deadlock("\n".join([f"deadlock in program {self.ids}:", *waiting]))
            chosen = self.random.choices(able, [one.eagerness for one in able])[0]
            if isinstance(chosen, Partition):
                return chosen
            self.copies.remove(chosen)
            chosen.land()

    def check(self) -> None:
        """Ends the calling thread if the program has failed or takes too long."""
        if self.failure is None and time.monotonic() > self.deadline:
            self.fail(DeviceFault(f"program {self.ids} did not end within {self.seconds} s"))
        if self.failure is not None:
            raise Abandoned

    def fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        for part in self.partitions:
            part.turn.release()


_local = threading.local()


def here() -> Partition:
    """The partition whose code this thread runs."""
    part = getattr(_local, "partition", None)
    assert part is not None, "device code runs under launch()"
    return part


def inside() -> bool:
    """Whether this thread runs device code."""
    return hasattr(_local, "partition")


def _distinct(names: list[str]) -> list[str]:
    number = {name: count(1) for name in names if names.count(name) > 1}
    return [f"{name} #{next(number[name])}" if name in number else name for name in names]
