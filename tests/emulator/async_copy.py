"""cp.async: elements by pointer into shared memory, in groups that whoever asked for them waits for."""

from __future__ import annotations

from types import SimpleNamespace

from tests.emulator.pointers import Pointer
from tests.emulator.schedule import DeviceFault, here
from tests.emulator.shared import SharedMemory
from tests.emulator.values import Value


class _Copy:
    def __init__(self, source: Pointer, into: SharedMemory) -> None:
        self.source, self.into = source, into
        self.eagerness = here().program.draw_eagerness()
        self.landed = False

    def land(self) -> None:
        self.into.data.copy_(self.source.memory[self.source.offset])
        self.landed = True


def async_load(smem: SharedMemory, pointer: Pointer, mask: Value | None = None) -> None:
    if mask is not None:
        raise NotImplementedError("a mask on an asynchronous copy")
    part = here()
    part.program.pause()
    if smem.shape != pointer.shape or smem.dtype != pointer.memory.dtype:
        raise TypeError(f"{smem.name} is {smem.shape}, {smem.dtype}; pointers are {pointer.shape}, {pointer.dtype}")
    pointer.reach(None, "copy from")
    smem.writes(part.copied, part.groups_begun + 1, part.knowledge)
    copy = _Copy(pointer, smem)
    part.copies_asked.append(copy)
    part.program.copies.append(copy)


def commit_group() -> None:
    part = here()
    part.groups_begun += 1
    part.groups_in_flight.append(part.copies_asked)
    part.copies_asked = []


def wait_group(num_outstanding: int = 0) -> None:
    """Until at most that many groups, the last ones, are under way."""
    part = here()
    part.program.pause()
    cut = max(0, len(part.groups_in_flight) - num_outstanding)
    older = [copy for group in part.groups_in_flight[:cut] for copy in group]
    part.program.hand_over(lambda: all(copy.landed for copy in older), lambda: f"{len(older)} copies of its own")
    part.groups_in_flight = part.groups_in_flight[cut:]
    part.knowledge.known[part.copied] = part.groups_begun - len(part.groups_in_flight)


def _gone(*args: object, **kwargs: object) -> None:
    raise DeviceFault("async_copy_global_to_shared: gone from Triton 3.9, where it is async_load")


async_copy = SimpleNamespace(
    async_load=async_load, async_copy_global_to_shared=_gone, commit_group=commit_group, wait_group=wait_group
)
