"""Global memory by pointer: masked loads and stores that stay within the tensor which the caller gave."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.emulator.schedule import DeviceFault, here
from tests.emulator.values import Operand, Type, Value, constant, value_of


class Pointer:
    """A scalar or tensor of pointers into one tensor. Offsets count elements, in 64 bits."""

    def __init__(self, memory: Tensor, offset: Tensor, name: str) -> None:
        self.memory, self.offset, self.name = memory, offset, name

    @classmethod
    def to_tensor(cls, tensor: Tensor, name: str) -> Pointer:
        """Points to the first element; what lies between it and the last one in memory may be reached."""
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        memory = tensor.as_strided((span if tensor.numel() else 0,), (1,))
        return cls(memory, torch.tensor(0), name)

    @property
    def dtype(self) -> Type:
        return Type(self.memory.dtype, list(self.offset.shape))

    @property
    def shape(self) -> list[int]:
        return list(self.offset.shape)

    def _moved(self, by: Operand, sign: int) -> Pointer:
        step = constant(by).held
        if step.dtype != torch.int64:
            raise TypeError(f"a pointer moves by integers, not by {step.dtype}")
        if self.offset.dim() and step.dim() and self.offset.dim() != step.dim():
            raise TypeError(f"cannot broadcast {self.shape} with {list(step.shape)}: they differ in rank")
        return Pointer(self.memory, self.offset + sign * step, self.name)

    def __add__(self, by: Operand) -> Pointer:
        return self._moved(by, 1)

    __radd__ = __add__

    def __sub__(self, by: Operand) -> Pointer:
        return self._moved(by, -1)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, Value(self.offset, torch.int64)[key].held, self.name)

    def reach(self, mask: Value | bool | None, action: str) -> tuple[Tensor, Tensor]:
        """Offsets, 0 where masked off, and the mask, in one shape; those not masked off lie within the tensor."""
        live = constant(True if mask is None else mask)
        if live.dtype != torch.bool:
            raise TypeError(f"a mask is boolean, not {live.dtype}")
        if live.held.dim() not in (0, self.offset.dim()) and self.offset.dim():
            raise TypeError(f"a mask of shape {live.shape} for pointers of shape {self.shape}")
        offset, held = torch.broadcast_tensors(self.offset, live.held)
        size = self.memory.numel()
        wrong = held & ((offset < 0) | (offset >= size))
        if bool(wrong.any()):
            at = int(offset[wrong].reshape(-1)[0])
            raise DeviceFault(f"{action} {self.name} at element {at}, beyond its {size}")
        return torch.where(held, offset, 0), held


def load(pointer: Pointer, mask: Value | bool | None = None, other: Operand | None = None, **hints: object) -> Value:
    """Elements that are masked off are `other`; without it, poison."""
    if other is not None and mask is None:
        raise ValueError("load: `other` without `mask`")
    here().program.pause()
    offset, live = pointer.reach(mask, "load from")
    memory = pointer.memory
    found = memory[offset] if bool(live.any()) else torch.zeros(offset.shape, dtype=memory.dtype)
    if mask is None:
        return value_of(found)
    rest = poison((), memory.dtype) if other is None else constant(other).to(memory.dtype).memory()
    return value_of(torch.where(live, found, rest))


def store(pointer: Pointer, value: Operand, mask: Value | bool | None = None, **hints: object) -> None:
    """The value is converted to the type of the memory, as the device does without asking."""
    here().program.pause()
    offset, live = pointer.reach(mask, "store to")
    new = constant(value).to(pointer.memory.dtype).expand(offset.shape).memory()
    pointer.memory[offset[live]] = new[live]


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What nobody has written yet: NaN, or the integer least likely to pass for a result."""
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    return torch.full(shape, float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min // 3, dtype=dtype)
