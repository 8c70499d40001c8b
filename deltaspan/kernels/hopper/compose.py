"""Affine maps one after another: M X + b along every fragment's segments, and side by side.

What a chain of maps loses is lost for every token behind it, so fp32 operands are split into two TF32 numbers each, and
of their products all but that of the small ones are formed on the tensor cores: 22 bits, as in the maps themselves. The
order of sums is that of K, whatever is composed beside it: exchanges that compose elsewhere get the same bits.

A map that says of itself that it is nothing (`transfer.py`), or whose last member does, takes no product. A state that
it would multiply is looked at all the same, column by column, for what is no number stays none; of a map that stands
before it the first column alone can hinder the two from being nothing again.
"""

import torch
from torch import Tensor

from deltaspan.kernels.hopper.gluon import launch, tl, triton
from deltaspan.kernels.hopper.transfer import NO_MAP
from deltaspan.plan import Chains, Passage

DIM = tl.constexpr(128)
PART = tl.constexpr(32)  # of K at a time: products of more take more registers than there are
COLUMNS = tl.constexpr(32)  # of one program: 8 programs a tile of [K, K + V] fill the device also for few tiles


@triton.jit
def step(M, x, b, WIDTH: tl.constexpr, PITCH: tl.constexpr, NEXT: tl.constexpr):
    """M x + b for M [128, 128] and x, whose rows are WIDTH apart, at pointers, b [128, COLUMNS]."""
    rows = tl.arange(0, DIM)
    columns = tl.arange(0, COLUMNS)
    if tl.load(M).to(tl.int32, bitcast=True) == NO_MAP:
        unread = tl.load(x + rows[:, None] * WIDTH + columns[None, :])
        b = tl.where((tl.sum(unread - unread, 0) == 0.0)[None, :], b, float("nan"))
    else:
        for first in range(0, DIM, PART):
            inner = first + tl.arange(0, PART)
            m = tl.load(M + rows[:, None] * PITCH + inner[None, :] * NEXT)
            b = tl.dot(m, tl.load(x + inner[:, None] * WIDTH + columns[None, :]), b, input_precision="tf32x3")
        b += 0.0  # of maps, no zero that would say that there is none
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
def tell_kernel(maps, arrived, reached, arriving, through, source, n, HV: tl.constexpr):
    """arrived [n, HV, 128, 128] into the rows `arriving` of reached [r, HV, 128, 128]; and the rows `through` of that
    become maps [places, HV, 128, 128] of the same rows times the rows `source` of arrived, plus what they were. One
    program a row, head and columns, those of `arriving` first."""
    i = tl.program_id(0) // HV
    head = tl.program_id(0) % HV
    tile = tl.arange(0, DIM)[:, None] * DIM + tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if i < n:
        to = (tl.load(arriving + i) * HV + head) * (DIM * DIM) + tile
        tl.store(reached + to, tl.load(arrived + (i * HV + head).to(tl.int64) * (DIM * DIM) + tile))
    else:
        row = (tl.load(through + i - n) * HV + head) * (DIM * DIM)
        there = (tl.load(source + i - n) * HV + head) * (DIM * DIM) + tl.program_id(1) * COLUMNS
        tl.store(reached + row + tile, step(maps + row, arrived + there, tl.load(reached + row + tile), DIM, DIM, 1))


@triton.jit
def chain_kernel(
    maps, offsets, members, starts, wanted, out_maps, out_offsets, map_row, map_head, offset_row, offset_head,
    HV: tl.constexpr, PITCH: tl.constexpr, NEXT: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    """The map and the offset of every head of a chain: (M, b) of its first member, then (M_i M, M_i b + b_i).

    maps, offsets [rows, HV, 128, 128], rows and heads so many numbers apart; members [n, 3] int32: rows of both, and
    the place in out_maps and out_offsets of what is composed up to the member; starts [chains + 1] int32, each chain's
    first; wanted [chains] int32, whether its maps are. Programs: chains and heads, then columns, with MAPS first those
    of maps.
    """
    chain = tl.program_id(0) // HV
    head = (tl.program_id(0) % HV).to(tl.int64)
    of_map = MAPS and tl.program_id(1) < DIM // COLUMNS
    rows = tl.arange(0, DIM)
    column = (tl.program_id(1) % (DIM // COLUMNS)) * COLUMNS
    columns = tl.arange(0, COLUMNS)
    maps += head * map_head
    offsets += head * offset_head + column
    out = out_offsets
    begin = tl.load(starts + chain)
    end = tl.load(starts + chain + 1)
    if of_map:
        out = out_maps
        end = tl.where(tl.load(wanted + chain) != 0, end, begin)
    out += head * (DIM * DIM) + column
    before = out
    for i in range(begin, end):
        row = tl.load(members + 3 * i).to(tl.int64) * map_row
        offset = tl.load(members + 3 * i + 1).to(tl.int64) * offset_row
        to = out + tl.load(members + 3 * i + 2).to(tl.int64) * (HV * DIM * DIM)
        x = tl.full([DIM, COLUMNS], NO_MAP, tl.int32).to(tl.float32, bitcast=True)
        if not of_map:
            x = tl.load(offsets + offset + rows[:, None] * DIM + columns[None, :])
        if i > begin:
            x = step(maps + row, before, x, DIM, PITCH, NEXT)
        elif of_map:
            x = tl.load(maps + row + rows[:, None] * PITCH + (column + columns)[None, :] * NEXT)
        tl.store(to + rows[:, None] * DIM + columns[None, :], x)
        tl.debug_barrier()  # the next step reads it
        before = to


def merge(M: Tensor, X: Tensor, b: Tensor) -> Tensor:
    """M X + b; M [..., 128, 128] or a transposed view of such, X and b [..., 128, a multiple of 32], fp32."""
    transposed = M.stride(-1) != 1
    M, X, b = ((M.mT if transposed else M).contiguous(), X.contiguous(), b.contiguous())
    out = torch.empty_like(b)
    n, width = M.numel() // (128 * 128), b.shape[-1]
    if n:
        launch(merge_kernel, (n, width // 32), M, X, b, out, WIDTH=width, **_pitch(transposed), num_warps=4)
    return out


def tell(maps: Tensor | None, arrived: Tensor, reached: Tensor, way: Passage[Tensor]) -> None:
    """As `exchange.Affine` says; all fp32, maps and reached dense."""
    HV, rows = arrived.shape[1], way.arriving.shape[0] + way.through.shape[0]
    launch(
        tell_kernel, (rows * HV, 4), reached if maps is None else maps, arrived.contiguous(), reached, way.arriving,
        way.through, way.source, way.arriving.shape[0], HV=HV, num_warps=4,
    )  # fmt: skip


def chain(
    M: Tensor, b: Tensor | None, chains: Chains[Tensor], *, maps: bool, in_place: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Launches the chain kernel; M [rows, HV, 128, 128] fp32 or a transposed view of such, b [rows, HV, 128, 128] fp32,
    rows and heads any distance apart. Returns maps, with `maps`, and offsets, if any are given, [places, HV, 128, 128]
    of what is composed up to each member; where nobody wants a map, or a place is no member's, it is left as it was.
    in_place: as `exchange.Affine` has it. A program reads of an offset what it then writes there, and no more."""
    HV = M.shape[1]
    transposed = M.stride(-1) != 1
    out_maps = M.new_empty(chains.places, HV, 128, 128) if maps else None
    out_offsets = b
    if b is not None and not (in_place and b.is_contiguous()):
        out_offsets = M.new_empty(chains.places, HV, 128, 128)
    columns = (maps + (b is not None)) * (128 // 32)
    n = chains.wanted.shape[0]
    if n and HV and columns:
        M = M.mT if transposed else M
        like = M if b is None else b
        assert M.stride()[2:] == like.stride()[2:] == (128, 1)
        launch(
            chain_kernel, (n * HV, columns), M, like, chains.table, chains.starts, chains.wanted,
            like if out_maps is None else out_maps, like if out_offsets is None else out_offsets,
            *M.stride()[:2], *like.stride()[:2], HV=HV, **_pitch(transposed), MAPS=maps, num_warps=4,
        )  # fmt: skip
    return out_maps, out_offsets


def _pitch(transposed: bool) -> dict[str, int]:
    return {"PITCH": 1, "NEXT": 128} if transposed else {"PITCH": 128, "NEXT": 1}
