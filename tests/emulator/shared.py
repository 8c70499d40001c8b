"""Shared memory: poisoned when allocated, kept in its type, with bounds, and with who read and wrote each element when.

The last point finds accesses that nothing orders (see clocks.py): a partition that reads a tile without having waited
for its load, a tile overwritten while a warpgroup_mma or a TMA store may still read it, or stored and then read by one
of these without fence_async_shared between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.emulator.clocks import Agent, Knowledge
from tests.emulator.pointers import poison
from tests.emulator.schedule import DeviceFault, here
from tests.emulator.values import Type, Value, constant, holder

CAPACITY = 227 * 1024  # bytes that a program can have on sm_90


class Allocation:
    """What one call allocated: its name in the kernel, and each agent's count at its last access, by element."""

    def __init__(self, name: str, elements: int) -> None:
        self.name, self.elements = name, elements
        self.read: dict[Agent, Tensor] = {}
        self.written: dict[Agent, Tensor] = {}


class SharedMemory:
    """A view of an allocation, as kernels hold it."""

    def __init__(self, data: Tensor, allocation: Allocation, name: str) -> None:
        self.data, self.allocation, self.name = data, allocation, name

    @classmethod
    def allocate(cls, dtype: torch.dtype, shape: Sequence[int], name: str) -> SharedMemory:
        data = poison(tuple(shape), dtype)
        program = here().program
        program.shared_bytes += data.numel() * data.element_size()
        if program.shared_bytes > CAPACITY:
            raise DeviceFault(f"{name} brings shared memory to {program.shared_bytes} bytes; there are {CAPACITY}")
        return cls(data, Allocation(name, data.numel()), name)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def rank(self) -> int:
        return self.data.dim()

    @property
    def layout(self) -> None:
        return None

    @property
    def type(self) -> Type:
        return Type(self.dtype, self.shape)

    def index(self, index: Value | int) -> SharedMemory:
        i = whole_index(index, self.shape[0], self.name)
        return SharedMemory(self.data[i], self.allocation, f"{self.name}[{i}]")

    def slice(self, start: int, length: int, dim: int = 0) -> SharedMemory:
        for argument in (start, length, dim):
            if not isinstance(argument, int):
                raise TypeError(f"slice of {self.name}: {argument!r} is not known when the kernel is compiled")
        if not 0 <= start < start + length <= self.shape[dim]:
            raise DeviceFault(f"slice [{start}, {start + length}) of {self.name}, {self.shape[dim]} long")
        part = self.data.narrow(dim, start, length)
        return SharedMemory(part, self.allocation, f"{self.name}[{start}:{start + length}, dim {dim}]")

    def permute(self, order: Sequence[int]) -> SharedMemory:
        return SharedMemory(self.data.permute(*order), self.allocation, self.name)

    def reshape(self, shape: Sequence[int]) -> SharedMemory:
        return SharedMemory(self.data.view(*shape), self.allocation, self.name)

    def load(self, layout: Any) -> Value:
        part = here()
        part.program.pause()
        self.reads(part.agent, part.clock, part.knowledge)
        return Value(self.data.to(holder(self.dtype), copy=True), self.dtype)

    def store(self, value: Value) -> None:
        if not isinstance(value, Value) or value.shape != self.shape or value.dtype != self.dtype:
            raise TypeError(
                f"store of {value!r} to {self.name}, {self.shape} of {self.dtype}: shape and type must match"
            )
        part = here()
        part.program.pause()
        self.writes(part.agent, part.clock, part.knowledge)
        self.data.copy_(value.held)

    def reads(self, agent: Agent, count: int, knowledge: Knowledge) -> None:
        """Notes a read of all of this view, as what `agent` does at that count. What it reads must be known."""
        self._demand(self.allocation.written, "written by", agent, knowledge, "reads")
        self._log(self.allocation.read, agent).fill_(count)

    def writes(self, agent: Agent, count: int, knowledge: Knowledge) -> None:
        """Notes a write likewise. Earlier reads and writes must be known."""
        self._demand(self.allocation.read, "read by", agent, knowledge, "writes")
        self._demand(self.allocation.written, "written by", agent, knowledge, "writes")
        self._log(self.allocation.written, agent).fill_(count)

    def _log(self, log: dict[Agent, Tensor], agent: Agent) -> Tensor:
        if agent not in log:
            log[agent] = torch.zeros(self.allocation.elements, dtype=torch.int32)
        return log[agent].as_strided(self.data.shape, self.data.stride(), self.data.storage_offset())

    def _demand(self, log: dict[Agent, Tensor], done: str, agent: Agent, knowledge: Knowledge, doing: str) -> None:
        proxy = not agent.generic
        for other in log:
            if other == agent and agent.generic:
                continue
            last = int(self._log(log, other).max())
            # what asynchronous units write over loads of a partition needs no fence, only order
            if last > knowledge.seen(other, asynchronously=proxy and done == "written by"):
                only_fence = proxy and last <= knowledge.known[other]
                missing = "no fence_async_shared stands between" if only_fence else "nothing orders the two"
                raise DeviceFault(f"{agent.name} {doing} {self.name}, {done} {other.name}: {missing}")


def whole_index(index: Value | int, length: int, name: str) -> int:
    value = constant(index)
    if value.dtype != torch.int32 or value.held.dim():
        raise TypeError(f"{name} is indexed by {value!r}; an int32 scalar is wanted")
    i = int(value.held)
    if not 0 <= i < length:
        raise DeviceFault(f"index {i} of {name}, which has {length}")
    return i


def size_in_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
