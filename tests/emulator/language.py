"""`gl`: the functions of Gluon's language that kernels use, on values, pointers and shared memory of this emulator.

Layouts are accepted and forgotten: what they are for, who holds which element, has no meaning here.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests.emulator import barriers, pointers
from tests.emulator.schedule import here
from tests.emulator.shared import SharedMemory
from tests.emulator.values import Operand, Value, constant, holder, together

SMALLEST_NORMAL = 2.0**-126
LAYOUTS = (
    "AutoLayout", "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout",
    "NVMMASharedLayout", "SliceLayout", "SwizzledSharedLayout",
)  # fmt: skip


class Layout:
    """Any layout."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    @staticmethod
    def get_default_for(*args: object, **kwargs: object) -> Layout:
        return Layout()


def as_constexpr(value: Any) -> Any:
    """`gl.constexpr`, as an annotation and as a call: constants are plain Python here."""
    return value


# ---- who and where


def program_id(axis: int) -> Value:
    return constant(here().program.ids[axis])


def num_programs(axis: int) -> Value:
    return constant(here().program.grid[axis])


def thread_barrier() -> None:
    """Of a partition's own threads, which have no meaning here."""
    here().program.pause()


def static_assert(condition: bool, message: str = "") -> None:
    assert condition, message


def warp_specialize(
    functions_and_args: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
    worker_num_warps: Sequence[int],
    worker_num_regs: Sequence[int] | None = None,
) -> Any:
    """The form of Triton 3.6 on: the first function runs in the program's own warps, the others in warps of theirs."""
    program = here().program
    workers = len(functions_and_args) - 1
    if len(worker_num_warps) != workers or len(worker_num_regs or worker_num_warps) != workers:
        raise ValueError(f"warp_specialize: {workers} workers, {worker_num_warps} warps, {worker_num_regs} registers")
    if program.split:
        raise ValueError("warp_specialize within a partition, or for a second time")
    program.split = True
    for function, args in functions_and_args[1:]:
        if any(isinstance(a, Value | pointers.Pointer) and a.shape for a in args):
            raise TypeError(f"{function.__name__}: a worker takes no tensors in registers; only the first function may")
    return program.run_partitions([(f.__name__, lambda f=f, a=a: f(*a)) for f, a in functions_and_args])


def allocate_shared_memory(element_ty: torch.dtype, shape: Sequence[int], layout: object, value: Any = None) -> Any:
    name = _assigned_name()
    if layout is barriers.MBarrierLayout or isinstance(layout, barriers.MBarrierLayout):
        return barriers.allocate(element_ty, shape, name)
    memory = SharedMemory.allocate(element_ty, shape, name)
    if value is not None:
        memory.store(value)
    return memory


def _assigned_name() -> str:
    """What the kernel's line assigns an allocation to, for reports."""
    frame = sys._getframe(2)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    found = re.match(r"\s*(\w+)\s*=", line)
    return found[1] if found else "shared memory"


# ---- making and shaping tensors


def arange(start: int, end: int, layout: object = None) -> Value:
    if (end - start) & (end - start - 1):
        raise ValueError(f"arange({start}, {end}): a power of two of elements is wanted")
    return Value(torch.arange(start, end), torch.int32)


def full(shape: Sequence[int], value: Operand, dtype: torch.dtype, layout: object = None) -> Value:
    return constant(value).to(dtype).expand(shape)


def zeros(shape: Sequence[int], dtype: torch.dtype, layout: object = None) -> Value:
    return Value(torch.zeros(tuple(shape), dtype=holder(dtype)), dtype)


def convert_layout(value: Value, layout: object, assert_trivial: bool = False) -> Value:
    return Value(value.held, value.dtype)


def reshape(value: Value, shape: Sequence[int]) -> Value:
    return Value(value.held.reshape(tuple(shape)), value.dtype)


def permute(value: Value, dims: Sequence[int]) -> Value:
    return Value(value.held.permute(*dims), value.dtype)


def expand_dims(value: Value, axis: int) -> Value:
    return Value(value.held.unsqueeze(axis), value.dtype)


def split(value: Value) -> tuple[Value, Value]:
    if value.shape[-1] != 2:
        raise ValueError(f"split of {value.shape}: the last dimension must be 2")
    return Value(value.held[..., 0], value.dtype), Value(value.held[..., 1], value.dtype)


def join(a: Value, b: Value) -> Value:
    x, y, dtype = together(a, b)
    return Value(torch.stack(torch.broadcast_tensors(x, y), -1), dtype)


def dot_fma(a: Value, b: Value, acc: Value) -> Value:
    """acc + a b on the CUDA cores, term by term in the order of K, each sum rounded once."""
    if {a.dtype, b.dtype, acc.dtype} != {torch.float32}:
        raise TypeError(f"dot_fma of {a.dtype}, {b.dtype} and {acc.dtype}: fp32 alone is emulated")
    if a.shape[1] < 16:
        raise ValueError(f"dot_fma: K is {a.shape[1]}, and at least 16")
    left, right, sums = a.held.double(), b.held.double(), acc.held
    for k in range(left.shape[1]):  # products of fp32 are exact in fp64
        sums = (left[:, k, None] * right[k] + sums.double()).float()
    return Value(sums, torch.float32)


# ---- elements


def where(condition: Value | bool, a: Operand, b: Operand) -> Value:
    mask = constant(condition)
    x, y, dtype = together(a, b)
    ranks = {t.dim() for t in (mask.held, x, y)} - {0}
    if mask.dtype != torch.bool or len(ranks) > 1:
        raise TypeError(f"where({mask!r}, ...) of ranks {sorted(ranks)}: a boolean and one rank are wanted")
    return Value(torch.where(mask.held, x, y), dtype)


def maximum(a: Operand, b: Operand) -> Value:
    """Of a number and a NaN, the number."""
    x, y, dtype = _bf16_widened(a, b)
    return Value((torch.fmax if dtype.is_floating_point else torch.maximum)(x, y), dtype)


def minimum(a: Operand, b: Operand) -> Value:
    """Of a number and a NaN, the number."""
    x, y, dtype = _bf16_widened(a, b)
    return Value((torch.fmin if dtype.is_floating_point else torch.minimum)(x, y), dtype)


def _bf16_widened(a: Operand, b: Operand) -> Any:
    values = [constant(v) for v in (a, b)]
    return together(*(v.to(torch.float32) if v.dtype == torch.bfloat16 else v for v in values))


def cdiv(a: Operand, b: Operand) -> Any:
    return (a + b - 1) // b


def exp2(x: Value) -> Value:
    """ex2.approx.ftz.f32 without its two units of error in the last place: subnormals are zeros."""
    _of_fp32("exp2", x)
    return Value(_flushed(torch.exp2(_flushed(x.held))), x.dtype)


def reciprocal(x: Value) -> Value:
    """rcp.approx.ftz.f32 without its unit of error in the last place: subnormals are zeros."""
    _of_fp32("reciprocal", x)
    return Value(_flushed(1 / _flushed(x.held)), x.dtype)


def _flushed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < SMALLEST_NORMAL, torch.zeros_like(x).copysign(x), x)


def _of_fp32(name: str, x: Value) -> None:
    if x.dtype != torch.float32:
        raise TypeError(f"{name} of {x.dtype}: the device has it for fp32 alone")


def _mathematics(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    def apply(x: Value) -> Value:
        _of_fp32(function.__name__, x)
        return Value(function(x.held), x.dtype)

    return apply


def fma(a: Value, b: Value, c: Value) -> Value:
    """Rounded once: products of fp32 are exact in fp64."""
    _of_fp32("fma", a)
    return Value((a.held.double() * b.held.double() + c.held.double()).float(), torch.float32)


def absolute(x: Value) -> Value:
    return Value(x.held.abs(), x.dtype)


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Value], dtype: torch.dtype, is_pure: bool, pack: int
) -> Value:
    """Only what is known here, told apart by its instructions and how many numbers it takes."""
    instructions = tuple(line.split()[0] for line in asm.split(";") if line.strip())
    known = ASSEMBLY.get((*instructions, len(args)))
    if known is None:
        raise NotImplementedError(f"the emulator does not know {asm!r}")
    return known(*args)


def _in_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).float()


def _products(a: Value, b: Value, c: Value, d: Value) -> Value:
    """c d and the rounded a b, summed and rounded once."""
    a, b, c, d = (x.held.float() for x in (a, b, c, d))
    return Value((c * d + _in_bf16(a * b)).to(torch.bfloat16), torch.bfloat16)


def _by_bits(operation: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    def apply(*args: Value) -> Value:
        bits = operation(*(x.held.view(torch.int16) for x in args))
        return Value(bits.view(torch.bfloat16), torch.bfloat16)

    return apply


ASSEMBLY = {
    ("ex2.approx.ftz.f32", 1): exp2,
    ("rcp.approx.ftz.f32", 1): reciprocal,
    ("add.rn.f32", 2): lambda x, y: x + y,
    ("griddepcontrol.launch_dependents", "mov.u32", 0): lambda: None,  # one launch after the other here
    ("griddepcontrol.wait", "mov.u32", 0): lambda: None,
    ("mov.b32", 1): lambda x: x,
    ("mov.u32", 1): lambda x: x,
    ("shfl.sync.idx.b32", 1): lambda x: x,
    ("shl.b32", "and.b32", 1): lambda x: x.to(torch.float32),
    ("cvt.rn.f16x2.f32", 1): lambda x: x.to(torch.float16),
    ("and.b32", 2): _by_bits(lambda x, mask: x & mask),
    ("and.b32", "or.b32", 3): _by_bits(lambda x, mask, other: x & mask | other),
    ("xor.b32", "and.b32", 2): _by_bits(lambda x, mask: (x ^ -0x8000) & mask),
    ("mul.rn.bf16x2", "fma.rn.bf16x2", 3): lambda x, high, low: _products(x, low, x, high),
    ("mul.rn.bf16x2", "fma.rn.bf16x2", 4): _products,
}


# ---- along an axis


def reduce(value: Value | tuple[Value, ...], axis: int, combine_fn: Callable[..., Any]) -> Any:
    """Halves combined until one is left, rounded at each step."""
    parts = value if isinstance(value, tuple) else (value,)
    while (n := parts[0].shape[axis]) > 1:
        halves = [[Value(p.held.narrow(axis, i, n // 2), p.dtype) for p in parts] for i in (0, n // 2)]
        combined = combine_fn(*halves[0], *halves[1])
        parts = combined if isinstance(combined, tuple) else (combined,)
    parts = tuple(Value(p.held.squeeze(axis), p.dtype) for p in parts)
    return parts if isinstance(value, tuple) else parts[0]


def sum(value: Value, axis: int) -> Value:
    wide = value if value.dtype.is_floating_point or value.dtype == torch.int64 else value.to(torch.int32)
    return reduce(wide, axis, lambda a, b: a + b)


def max(value: Value, axis: int) -> Value:
    return reduce(value, axis, maximum)


def min(value: Value, axis: int) -> Value:
    return reduce(value, axis, minimum)


def associative_scan(
    value: Value | tuple[Value, ...], axis: int, combine_fn: Callable[..., Any], reverse: bool = False
) -> Any:
    """Inclusive, by doubling distances."""
    parts = value if isinstance(value, tuple) else (value,)
    held = [p.held.flip(axis) if reverse else p.held for p in parts]
    n, step = held[0].shape[axis], 1
    while step < n:
        early = [Value(h.narrow(axis, 0, n - step), p.dtype) for h, p in zip(held, parts, strict=True)]
        late = [Value(h.narrow(axis, step, n - step), p.dtype) for h, p in zip(held, parts, strict=True)]
        combined = combine_fn(*early, *late)
        combined = combined if isinstance(combined, tuple) else (combined,)
        held = [torch.cat([h.narrow(axis, 0, step), c.held], axis) for h, c in zip(held, combined, strict=True)]
        step *= 2
    done = tuple(Value(h.flip(axis) if reverse else h, p.dtype) for h, p in zip(held, parts, strict=True))
    return done if isinstance(value, tuple) else done[0]


class Language(SimpleNamespace):
    """A namespace that says what it lacks."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not emulated; tests/emulator/language.py is where it would stand")


gl = Language(
    constexpr=as_constexpr,
    int1=torch.bool,
    **{n: getattr(torch, n) for n in ("int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")},
    **{n: type(n, (Layout,), {}) for n in LAYOUTS},
    **{f.__name__: _mathematics(f) for f in (torch.exp, torch.log, torch.log2, torch.sqrt, torch.rsqrt)},
    program_id=program_id, num_programs=num_programs, thread_barrier=thread_barrier, barrier=thread_barrier,
    warp_specialize=warp_specialize, allocate_shared_memory=allocate_shared_memory, static_assert=static_assert,
    static_range=range, load=pointers.load, store=pointers.store, arange=arange, full=full, zeros=zeros,
    convert_layout=convert_layout, reshape=reshape, permute=permute, expand_dims=expand_dims, split=split, join=join,
    dot_fma=dot_fma, where=where, maximum=maximum, minimum=minimum, cdiv=cdiv, abs=absolute, exp2=exp2, fma=fma,
    reduce=reduce, sum=sum, max=max, min=min, associative_scan=associative_scan,
    inline_asm_elementwise=inline_asm_elementwise,
)  # fmt: skip
