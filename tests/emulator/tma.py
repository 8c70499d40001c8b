"""TMA: boxes between global and shared memory, which land some time after they were issued.

A load fills with zeros what lies outside the tensor, and lands all bytes of its box on its barrier; a store leaves out
what lies outside. Loads land in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.emulator.barriers import Barrier
from tests.emulator.schedule import DeviceFault, Partition, here
from tests.emulator.shared import SharedMemory, size_in_bytes
from tests.emulator.values import Type, Value, constant

ALIGNMENT = 16  # bytes, of a tensor, its strides and the innermost coordinate
SHARED_ALIGNMENT = 128  # bytes
LARGEST_BOX = 256


class TensorDescriptor:
    """Rows and columns of a tensor's memory, and the shape of the boxes that are copied of it."""

    def __init__(
        self, base: Tensor, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[int], layout: Any = None
    ) -> None:
        tensor, size = base.as_strided(shape, strides), base.element_size()
        if len(block_shape) != tensor.dim() or any(not 1 <= n <= LARGEST_BOX for n in block_shape):
            raise ValueError(f"block_shape: {list(block_shape)}, a size of 1 to 256 is wanted for each dimension")
        if tensor.numel() == 0:
            raise ValueError(f"tensor: of shape {list(tensor.shape)}, a descriptor needs elements")
        if tensor.stride(-1) != 1 or any(stride * size % ALIGNMENT for stride in tensor.stride()[:-1]):
            raise ValueError(f"tensor: strides {tensor.stride()}, the last must be 1 and the others 16-byte multiples")
        if tensor.data_ptr() % ALIGNMENT or block_shape[-1] * size % ALIGNMENT:
            raise ValueError("tensor: its address, and the bytes in a row of the box, must be multiples of 16")
        self.tensor, self.block_shape, self.layout = tensor, list(block_shape), layout
        self.base, self.strides = base, list(strides)

    @classmethod
    def from_tensor(cls, tensor: Tensor, block_shape: Sequence[int], layout: object = None) -> TensorDescriptor:
        return cls(tensor, tensor.shape, tensor.stride(), block_shape, layout)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.tensor.shape)

    @property
    def block_type(self) -> Type:
        return Type(self.dtype, self.block_shape)

    def box(self, start: Sequence[int]) -> tuple[Tensor, tuple[slice, ...]]:
        """The part of the tensor that a box covers, and where it lies in the box."""
        inside, place = [], []
        for first, length, size in zip(start, self.block_shape, self.shape, strict=True):
            low, high = max(first, 0), min(max(first + length, 0), size)
            inside.append(slice(low, high))
            place.append(slice(low - first, high - first) if low < high else slice(0, 0))
        return self.tensor[tuple(inside)], tuple(place)


class _Load:
    def __init__(self, source: TensorDescriptor, start: list[int], barrier: Barrier, into: SharedMemory) -> None:
        self.source, self.start, self.barrier, self.into = source, start, barrier, into
        self.eagerness = here().program.draw_eagerness()

    def land(self) -> None:
        part, place = self.source.box(self.start)
        box = torch.zeros(self.source.block_shape, dtype=self.source.dtype)
        box[place] = part
        self.into.data.copy_(box)
        self.barrier.land(size_in_bytes(box))


class _Store:
    def __init__(self, target: TensorDescriptor, start: list[int], source: SharedMemory, issuer: Partition) -> None:
        self.target, self.start, self.source, self.issuer = target, start, source, issuer
        self.eagerness = issuer.program.draw_eagerness()
        self.landed = False

    def land(self) -> None:
        part, place = self.target.box(self.start)
        part.copy_(self.source.data[place])
        self.landed = True


def _coordinates(descriptor: TensorDescriptor, coordinates: Sequence[Value | int], memory: SharedMemory) -> list[int]:
    values = [constant(c) for c in coordinates]
    if any(v.dtype != torch.int32 or v.held.dim() for v in values) or len(values) != len(descriptor.shape):
        raise TypeError(f"coordinates {values}: an int32 scalar is wanted for each dimension of {descriptor.shape}")
    start = [int(v.held) for v in values]
    if start[-1] * descriptor.tensor.element_size() % ALIGNMENT:
        raise DeviceFault(f"innermost coordinate {start[-1]} of {descriptor.dtype}: not {ALIGNMENT}-byte aligned")
    if memory.shape != descriptor.block_shape or memory.dtype != descriptor.dtype:
        box = f"boxes of {descriptor.block_shape}, {descriptor.dtype}"
        raise TypeError(f"{memory.name} is {memory.shape}, {memory.dtype}; the descriptor has {box}")
    offset = memory.data.storage_offset() * memory.data.element_size()
    if offset % SHARED_ALIGNMENT or not memory.data.is_contiguous():
        raise DeviceFault(f"{memory.name} is no dense, {SHARED_ALIGNMENT}-byte aligned tile")
    return start


def async_load(
    descriptor: TensorDescriptor,
    coordinates: Sequence[Value | int],
    barrier: Barrier,
    result: SharedMemory,
    pred: Value | bool = True,
) -> None:
    part = here()
    part.program.pause()
    start = _coordinates(descriptor, coordinates, result)
    if constant(pred):
        result.writes(barrier.loads, barrier.announce(), part.knowledge)
        barrier.arriving.learn(part.knowledge)  # who sees it land knows what came before it was asked for
        part.program.copies.append(_Load(descriptor, start, barrier, result))
        part.tick()


def async_store(descriptor: TensorDescriptor, coordinates: Sequence[Value | int], source: SharedMemory) -> None:
    part = here()
    part.program.pause()
    start = _coordinates(descriptor, coordinates, source)
    part.stores_issued += 1
    source.reads(part.stores, part.stores_issued, part.knowledge)
    copy = _Store(descriptor, start, source, part)
    part.stores_in_flight.append(copy)
    part.program.copies.append(copy)
    part.tick()


def store_wait(pendings: int) -> None:
    """Until at most that many of this partition's stores, the last ones, may still read shared memory."""
    part = here()
    older = part.stores_in_flight[: max(0, len(part.stores_in_flight) - pendings)]
    part.program.hand_over(lambda: all(copy.landed for copy in older), lambda: f"{len(older)} TMA stores of its own")
    part.stores_in_flight = part.stores_in_flight[len(older) :]
    part.knowledge.known[part.stores] = part.stores_issued - len(part.stores_in_flight)


tma = SimpleNamespace(
    async_copy_global_to_shared=async_load,  # the names up to Triton 3.6
    async_copy_shared_to_global=async_store,
    async_load=async_load,
    async_store=async_store,
    store_wait=store_wait,
)
