"""Affine maps one after another, in fp32 on the CUDA cores: M X + b along every fragment's segments, and side by side.

One dot product an output element, in the order of K, whatever is composed beside it: exchanges that compose elsewhere
get the same bits. Tensor cores are not used, for what a chain of maps loses is lost for every token behind it.
"""

import torch
from torch import Tensor

from deltaspan.kernels.hopper.gluon import COMPILED_WITH, tl, triton

DIM = tl.constexpr(128)
PART = tl.constexpr(32)  # of K at a time: a product of 128 would be unrolled whole, into more than registers hold
COLUMNS = tl.constexpr(32)  # of one program: 8 programs a tile of [K, K + V] fill the device also for few tiles


@triton.jit
def step(M, x, b, WIDTH: tl.constexpr, PITCH: tl.constexpr, NEXT: tl.constexpr):
    """M x + b for M [128, 128] and x, whose rows are WIDTH apart, at pointers, b [128, COLUMNS]."""
    rows = tl.arange(0, DIM)
    columns = tl.arange(0, COLUMNS)
    for first in range(0, DIM, PART):
        inner = first + tl.arange(0, PART)
        m = tl.load(M + rows[:, None] * PITCH + inner[None, :] * NEXT)
        b = tl.dot(m, tl.load(x + inner[:, None] * WIDTH + columns[None, :]), b, input_precision="ieee")
    return b


@triton.jit
def merge_kernel(M, X, b, out, WIDTH: tl.constexpr, PITCH: tl.constexpr, NEXT: tl.constexpr):
    """out = M X + b for tiles M [n, 128, 128], X, b and out [n, 128, WIDTH], one after another; PITCH and NEXT: 128 and
    1, or 1 and 128 for M^T."""
    tile = tl.program_id(0).to(tl.int64)
    first = tile * (DIM * WIDTH) + tl.program_id(1) * COLUMNS
    at = first + tl.arange(0, DIM)[:, None] * WIDTH + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, step(M + tile * (DIM * DIM), X + first, tl.load(b + at), WIDTH, PITCH, NEXT))


@triton.jit
def chain_kernel(maps, offsets, steps, starts, out_maps, out_offsets, HV, PITCH: tl.constexpr, NEXT: tl.constexpr):
    """The map and the offset of every head of a chain: (M, b) of its first member, then (M_i M, M_i b + b_i).

    maps [rows, HV, 128, 128], offsets [rows, HV, 128, 128]; steps [n, 3] int32: a member's rows in both, and where what
    is composed up to it goes in out_maps and out_offsets; starts [chains + 1] int32, each chain's first step. Programs:
    chains and heads, then columns of maps and of offsets.
    """
    chain = tl.program_id(0) // HV
    head = (tl.program_id(0) % HV).to(tl.int64) * (DIM * DIM)
    size = HV.to(tl.int64) * (DIM * DIM)
    of_map = tl.program_id(1) < DIM // COLUMNS
    column = (tl.program_id(1) % (DIM // COLUMNS)) * COLUMNS
    rows = tl.arange(0, DIM)
    columns = column + tl.arange(0, COLUMNS)
    at = head + rows[:, None] * DIM + columns[None, :]
    out = out_offsets
    if of_map:
        out = out_maps
    begin = tl.load(starts + chain)
    end = tl.load(starts + chain + 1)
    before = out
    for i in range(begin, end):
        row = tl.load(steps + 3 * i).to(tl.int64) * size
        offset = tl.load(steps + 3 * i + 1).to(tl.int64) * size
        to = out + tl.load(steps + 3 * i + 2).to(tl.int64) * size
        x = tl.zeros([DIM, COLUMNS], tl.float32)
        if not of_map:
            x = tl.load(offsets + offset + at)
        if i > begin:
            x = step(maps + row + head, before + head + column, x, DIM, PITCH, NEXT)
        elif of_map:
            x = tl.load(maps + row + head + rows[:, None] * PITCH + columns[None, :] * NEXT)
        tl.store(to + at, x)
        tl.debug_barrier()  # the next step reads it
        before = to


def merge(M: Tensor, X: Tensor, b: Tensor) -> Tensor:
    """M X + b; M [..., 128, 128] or a transposed view of such, X and b [..., 128, a multiple of 32], fp32."""
    transposed = M.stride(-1) != 1
    M, X, b = ((M.mT if transposed else M).contiguous(), X.contiguous(), b.contiguous())
    out = torch.empty_like(b)
    n, width = M.numel() // (128 * 128), b.shape[-1]
    if n:
        merge_kernel[(n, width // 32)](M, X, b, out, WIDTH=width, **_pitch(transposed), num_warps=4, **COMPILED_WITH)
    return out


def compose(
    maps: Tensor, offsets: Tensor, steps: Tensor, starts: Tensor, places: int, *, transposed: bool
) -> tuple[Tensor, Tensor]:
    """Launches the chain kernel; maps, offsets [rows, HV, 128, 128] fp32, with `transposed` M^T stands for M. Returns
    maps and offsets [places, HV, 128, 128] of what is composed up to each member."""
    HV = maps.shape[1]
    out = maps.new_empty(places, *maps.shape[1:]), offsets.new_empty(places, *offsets.shape[1:])
    if len(starts) > 1:
        grid = ((len(starts) - 1) * HV, 2 * 128 // 32)
        chain_kernel[grid](maps, offsets, steps, starts, *out, HV, **_pitch(transposed), num_warps=4, **COMPILED_WITH)
    return out


def _pitch(transposed: bool) -> dict[str, int]:
    return {"PITCH": 1, "NEXT": 128} if transposed else {"PITCH": 128, "NEXT": 1}
