"""Scalars and tensors in registers: their types, how operators promote and round them, and 32 bits that overflow.

Integers are held as int64 beside the type that the device has, so that what does not fit is found, not wrapped. Python
numbers are constants and have no type of their own: they take that of what they meet, as in Triton.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tests.emulator.schedule import DeviceFault, here

BITS = {torch.int8: 8, torch.uint8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}
LIMITS = {dtype: (torch.iinfo(dtype).min, torch.iinfo(dtype).max) for dtype in BITS if dtype != torch.int64}
Number = bool | int | float
Operand = "Value | Number"


@dataclass(frozen=True)
class Type:
    """What `x.type` tells kernels of a tensor."""

    element_ty: torch.dtype
    shape: list[int]
    layout: Any = None  # whatever layout is asked of it, for none is emulated

    @property
    def scalar(self) -> torch.dtype:
        return self.element_ty


class Value:
    """A scalar (no dimensions) or a tensor in registers. `held` is int64 for integers of any width.

    Nobody changes `held`: values share it.
    """

    def __init__(self, held: Tensor, dtype: torch.dtype) -> None:
        if dtype in LIMITS and held.numel():
            low, high = LIMITS[dtype]
            if held.dim():
                extremes = torch.aminmax(held)
                least, most = extremes.min.item(), extremes.max.item()
            else:
                least = most = held.item()
            if least < low or most > high:
                worst = least if least < low else most
                raise DeviceFault(f"{worst} does not fit {dtype}: the device would wrap it around")
        self.held, self.dtype = held, dtype

    @property
    def shape(self) -> list[int]:
        return list(self.held.shape)

    @property
    def type(self) -> Type:
        return Type(self.dtype, self.shape)

    def memory(self) -> Tensor:
        """As it lies in memory, in its own type."""
        return self.held.to(self.dtype)

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        if dtype == self.dtype:
            return self
        if bitcast:
            return value_of(self.memory().view(dtype))
        if dtype in BITS and self.dtype.is_floating_point:
            return Value(self.held.double().trunc().long(), dtype)
        return Value(self.held.to(holder(dtype)), dtype)

    def expand(self, shape: Sequence[int]) -> Value:
        """Broadcast, which needs as many dimensions, or none at all."""
        if self.held.dim() not in (0, len(shape)):
            raise TypeError(f"cannot broadcast {self.shape} to {list(shape)}: they differ in rank")
        return Value(self.held.expand(tuple(shape)), self.dtype)

    def __getitem__(self, key: Any) -> Value:
        keys = key if isinstance(key, tuple) else (key,)
        if any(k is not None and k != slice(None) for k in keys) or sum(k is not None for k in keys) != self.held.dim():
            raise TypeError(f"a tensor of shape {self.shape} in registers takes only `:` and `None`, not [{key}]")
        return Value(self.held[keys], self.dtype)

    def __bool__(self) -> bool:
        here().program.check()
        if self.held.dim():
            raise TypeError(f"a branch on a tensor of shape {self.shape}; only scalars decide branches")
        return bool(self.held)

    def __repr__(self) -> str:
        return f"Value({self.held.tolist() if self.held.dim() == 0 else self.shape}, {self.dtype})"

    __hash__ = None  # type: ignore[assignment]  # comparison gives a tensor

    def __neg__(self) -> Value:
        return Value(-self.held, self.dtype)

    def __invert__(self) -> Value:
        return Value(~self.held, self.dtype)


def holder(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype in BITS else dtype


def value_of(tensor: Tensor) -> Value:
    """A tensor of memory as a value."""
    return Value(tensor.to(holder(tensor.dtype)), tensor.dtype)


def constant(number: Operand) -> Value:
    """The type that Triton gives a Python number that stands alone."""
    return number if isinstance(number, Value) else _weak(number, _own_type(number))


def _own_type(operand: Operand) -> torch.dtype:
    match operand:
        case Value():
            return operand.dtype
        case bool():
            return torch.bool
        case int():
            return torch.int32 if -(2**31) <= operand < 2**31 else torch.int64
        case float():
            tiny = operand != 0 and abs(operand) < 2.0**-126
            return torch.float64 if tiny else torch.float32
    raise TypeError(f"{type(operand).__name__} {operand!r} is no operand of device code")


def _kind(dtype: torch.dtype) -> int:
    return 2 if dtype.is_floating_point else dtype != torch.bool


def promoted(a: Operand, b: Operand, division: bool = False) -> torch.dtype:
    """The type in which a and b meet: Triton's computation_type_impl, without unsigned integers and fp8."""
    x, y = _own_type(a), _own_type(b)
    if x == y and not division:
        return x
    if isinstance(a, Value) != isinstance(b, Value):
        weak, strong = (y, x) if isinstance(a, Value) else (x, y)
        if _kind(weak) <= _kind(strong):
            return torch.float32 if division and strong in (torch.float16, torch.bfloat16) else strong
    for wide in (torch.float64, torch.float32):
        if wide in (x, y):
            return wide
    if torch.float16 in (x, y):
        return torch.float32 if division else torch.float16
    if torch.bfloat16 in (x, y):
        return torch.float32 if division or x != y else torch.bfloat16
    return max(x, y, key=lambda t: BITS.get(t, 1))


def together(a: Operand, b: Operand, division: bool = False) -> tuple[Tensor, Tensor, torch.dtype]:
    """Both operands in one type and shape."""
    dtype = promoted(a, b, division)
    x = a.to(dtype) if isinstance(a, Value) else _weak(a, dtype)
    y = b.to(dtype) if isinstance(b, Value) else _weak(b, dtype)
    if x.held.dim() and y.held.dim() and x.held.dim() != y.held.dim():
        raise TypeError(f"cannot broadcast {x.shape} with {y.shape}: they differ in rank")
    return x.held, y.held, dtype


def _weak(number: Number, dtype: torch.dtype) -> Value:
    return _whole(number, dtype) if isinstance(number, int) else Value(torch.tensor(number, dtype=holder(dtype)), dtype)


@lru_cache(4096, typed=True)
def _whole(number: int, dtype: torch.dtype) -> Value:
    """Kernels meet the same few at every turn."""
    return Value(torch.tensor(number, dtype=holder(dtype)), dtype)


def _arithmetic(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Operand, Operand], Any]:
    def apply(a: Operand, b: Operand) -> Any:
        if not isinstance(b, Value | bool | int | float):
            return NotImplemented
        x, y, dtype = together(a, b)
        return Value(function(x, y), dtype)

    return apply


def _quotient(whole: bool) -> Callable[[Operand, Operand], Any]:
    def apply(a: Operand, b: Operand) -> Any:
        x, y, dtype = together(a, b, division=True)
        if dtype in BITS and not whole:
            x, y, dtype = x.float(), y.float(), torch.float32
        if dtype not in BITS and whole:
            raise TypeError(f"// of {dtype}: the device divides integers so")
        if dtype in BITS and bool((y == 0).any()):
            raise DeviceFault("division of integers by zero")
        return Value(torch.div(x, y, rounding_mode="trunc" if whole else None), dtype)

    return apply


def _remainder(a: Operand, b: Operand) -> Value:
    x, y, dtype = together(a, b, division=True)
    if dtype in BITS and bool((y == 0).any()):
        raise DeviceFault("remainder of a division by zero")
    return Value(torch.fmod(x, y), dtype)  # as in C: the sign of the dividend


def _comparison(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Operand, Operand], Value]:
    def apply(a: Operand, b: Operand) -> Value:
        x, y, _ = together(a, b)
        return Value(function(x, y), torch.bool)

    return apply


def _bits(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Operand, Operand], Value]:
    def apply(a: Operand, b: Operand) -> Value:
        x, y, dtype = together(a, b)
        if dtype.is_floating_point:
            raise TypeError(f"bits of {dtype}: the device has this for integers only")
        return Value(function(x, y), dtype)

    return apply


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": _arithmetic(operator.add),
    "sub": _arithmetic(operator.sub),
    "mul": _arithmetic(operator.mul),
    "truediv": _quotient(whole=False),
    "floordiv": _quotient(whole=True),
    "mod": _remainder,
    "and": _bits(operator.and_),
    "or": _bits(operator.or_),
    "xor": _bits(operator.xor),
    "lshift": _bits(operator.lshift),
    "rshift": _bits(operator.rshift),
}


def _reflected(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda b, a: function(a, b)


for _name, _function in _OPERATORS.items():
    setattr(Value, f"__{_name}__", _function)
    setattr(Value, f"__r{_name}__", _reflected(_function))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _comparison(getattr(operator, _name)))
