"""Affine maps one after another: M X + b along every fragment's segments, and side by side.

What a chain of maps loses is lost for every token behind it, so products are formed in fp32 on the CUDA cores, which
round each sum where tensor cores would cut it off. Terms are summed onto b in the order of K, whatever is composed
beside them and however many columns a program takes: exchanges that compose elsewhere get the same bits.

A map that says of itself that it is nothing (`transfer.py`), or whose last member does, takes no product. A state that
it would multiply is looked at all the same, column by column, for what is no number stays none; of a map that stands
before it the first column alone can hinder the two from being nothing again.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltaspan.kernels.hopper.gluon import barrier, copies_begun, copies_wait, copy_in, gl, gluon, launch
from deltaspan.kernels.hopper.instructions import uniform
from deltaspan.kernels.hopper.transfer import NO_MAP
from deltaspan.plan import Chains, Passage

DIM = gl.constexpr(128)
PART = gl.constexpr(16)  # of K at a time: what a thread has of both operands in registers
SHARED = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 8, [1, 0]))  # 16 bytes of every second row lie in 32 banks


class Width(NamedTuple):
    """Columns of a tile that a program takes, maps that it has room for, and warps."""

    COLUMNS: int
    PLACES: int
    num_warps: int


# Of few tiles the time of a step counts: 8 columns are 1,024 sums a thread, and the next map comes meanwhile. Of many
# it is the work of all that does: 64 columns read a map an eighth as often, and two programs share a multiprocessor.
NARROW, WIDE = Width(COLUMNS=8, PLACES=2, num_warps=4), Width(COLUMNS=64, PLACES=1, num_warps=8)
AT_ONCE = 132  # narrow programs that are few


@gluon.constexpr_function
def rows(COLUMNS):
    """Each thread has 4 columns of rows that lie together, 2 or twice 4; 2 or 8 threads read the same of a map."""
    size, lanes, warps = ([2, 4], [16, 2], [4, 1]) if COLUMNS == 8 else ([4, 4], [4, 8], [4, 2])
    return gl.BlockedLayout(size, lanes, warps, [1, 0])


@gluon.constexpr_function
def copied(COLUMNS):
    """A row of a map a warp."""
    return gl.BlockedLayout([1, 4], [1, 32], [4 if COLUMNS == 8 else 8, 1], [1, 0])


@gluon.jit
def tile(PITCH, NEXT, COLUMNS: gl.constexpr):
    """The places of [128, COLUMNS] numbers, rows and columns so many apart."""
    row = gl.arange(0, DIM, layout=gl.SliceLayout(1, rows(COLUMNS)))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, rows(COLUMNS)))
    return row[:, None] * PITCH + column[None, :] * NEXT


@gluon.jit
def places(COLUMNS: gl.constexpr, PLACES: gl.constexpr):
    """Shared memory for maps and states."""
    ms = gl.allocate_shared_memory(gl.float32, [PLACES, DIM, DIM], SHARED)
    xs = gl.allocate_shared_memory(gl.float32, [PLACES, DIM, COLUMNS], SHARED)
    return ms, xs


@gluon.jit
def ask(m, M, COLUMNS: gl.constexpr):
    """The map at the pointer comes into its place."""
    row = gl.arange(0, DIM, layout=gl.SliceLayout(1, copied(COLUMNS)))
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, copied(COLUMNS)))
    copy_in(m, M + (row[:, None] * DIM + column[None, :]))
    copies_begun()


@gluon.jit
def is_something(first):
    """What the first element of a map says of the map."""
    return uniform(first.to(gl.int32, bitcast=True)) != NO_MAP


@gluon.jit
def product(m, x, b, TRANSPOSED: gl.constexpr, COLUMNS: gl.constexpr):
    """M x + b for a map and a state in shared memory."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, rows(COLUMNS), 0)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, rows(COLUMNS), 0)
    if TRANSPOSED:
        m = m.permute((1, 0))
    for k in gl.static_range(0, DIM, PART):
        b = gl.dot_fma(m.slice(k, PART, 1).load(LEFT), x.slice(k, PART, 0).load(RIGHT), b)
    return b + 0.0  # of maps, no zero that would say that there is none


@gluon.jit
def instead(x, b):
    """What b is behind a map that is nothing."""
    return gl.where((gl.sum(x - x, 0) == 0.0)[None, :], b, float("nan"))


@gluon.jit
def merged(M, x, b, TRANSPOSED: gl.constexpr, COLUMNS: gl.constexpr):
    """M x + b for a map at a pointer."""
    ms, xs = places(COLUMNS, 1)
    if is_something(gl.load(M)):
        ask(ms.index(0), M, COLUMNS)
        xs.index(0).store(x)
        copies_wait(0)
        barrier()
        b = product(ms.index(0), xs.index(0), b, TRANSPOSED, COLUMNS)
    else:
        b = instead(x, b)
    return b


@gluon.jit
def merge_kernel(M, X, b, out, WIDTH: gl.constexpr, TRANSPOSED: gl.constexpr, COLUMNS: gl.constexpr):
    """out = M X + b for tiles M [n, 128, 128], X, b and out [n, 128, WIDTH], one after another; with TRANSPOSED of the
    transpose of M."""
    i = gl.program_id(0).to(gl.int64)
    at = i * (DIM * WIDTH) + gl.program_id(1) * COLUMNS + tile(WIDTH, 1, COLUMNS)
    gl.store(out + at, merged(M + i * (DIM * DIM), gl.load(X + at), gl.load(b + at), TRANSPOSED, COLUMNS))


@gluon.jit
def tell_kernel(maps, arrived, reached, arriving, through, source, n, HV: gl.constexpr, COLUMNS: gl.constexpr):
    """arrived [n, HV, 128, 128] into the rows `arriving` of reached [r, HV, 128, 128]; and the n rows `through` of that
    become maps [places, HV, 128, 128] of the same rows times the rows `source` of arrived, plus what they were. One
    program a row, head and columns, those of `through` first."""
    i = gl.program_id(0) // HV
    head = gl.program_id(0) % HV
    at = gl.program_id(1) * COLUMNS + tile(DIM, 1, COLUMNS)
    if i < n:
        row = (gl.load(through + i) * HV + head) * (DIM * DIM)
        x = gl.load(arrived + (gl.load(source + i) * HV + head) * (DIM * DIM) + at)
        gl.store(reached + row + at, merged(maps + row, x, gl.load(reached + row + at), False, COLUMNS))
    else:
        row = (gl.load(arriving + i - n) * HV + head) * (DIM * DIM)
        gl.store(reached + row + at, gl.load(arrived + ((i - n) * HV + head).to(gl.int64) * (DIM * DIM) + at))


@gluon.jit(do_not_specialize=["apart"])
def chain_kernel(
    maps, offsets, members, starts, wanted, out_maps, out_offsets, beyond, apart, map_row, map_head, offset_row,
    offset_head, HV: gl.constexpr, TRANSPOSED: gl.constexpr, MAPS: gl.constexpr, COLUMNS: gl.constexpr,
    PLACES: gl.constexpr,
):  # fmt: skip
    """The map and the offset of every head of a chain: (M, b) of its first member, then (M_i M, M_i b + b_i).

    maps, offsets [rows, HV, 128, 128], rows and heads so many numbers apart; members [n, 3] int32: rows of both, and
    the place in out_maps and out_offsets of what is composed up to the member, of offsets from place `apart` on in
    beyond; starts [chains + 1] int32, each chain's first; wanted [chains] int32, whether its maps are. Programs: chains
    and heads, then columns, with MAPS first those of maps.
    """
    chain = gl.program_id(0) // HV
    head = (gl.program_id(0) % HV).to(gl.int64)
    of_offset = gl.program_id(1) >= MAPS * (DIM // COLUMNS)
    column = (gl.program_id(1) % (DIM // COLUMNS)) * COLUMNS
    maps += head * map_head
    offsets += head * offset_head + column
    begin = uniform(gl.load(starts + chain))
    last = uniform(gl.load(starts + chain + 1)) - 1
    near = out_offsets
    far = beyond - apart.to(gl.int64) * (HV * DIM * DIM)
    if MAPS:
        asked = uniform(gl.load(wanted + chain))
        if of_offset == 0:
            near = out_maps
            far = out_maps
            last = gl.where(asked != 0, last, begin - 1)
    at = tile(DIM, 1, COLUMNS)
    to = head * (DIM * DIM) + column + at
    no_offset = gl.full([DIM, COLUMNS], NO_MAP, gl.int32, rows(COLUMNS)).to(gl.float32, bitcast=True)
    ms, xs = places(COLUMNS, PLACES)
    if begin <= last:
        # What does not depend on the state is asked for ahead: the map and the offset of a step one step, and two what
        # the map says of itself, which tells whether it is wanted.
        x = gl.load(offsets + gl.load(members + 3 * begin + 1).to(gl.int64) * offset_row + at, mask=of_offset, other=0)
        if MAPS and of_offset == 0:
            first = maps + gl.load(members + 3 * begin).to(gl.int64) * map_row
            x = gl.load(first + (column * DIM + tile(1, DIM, COLUMNS) if TRANSPOSED else column + at))
        member = members + 3 * gl.minimum(begin + 1, last)
        following = maps + gl.load(member).to(gl.int64) * map_row
        further = maps + gl.load(members + 3 * gl.minimum(begin + 2, last)).to(gl.int64) * map_row
        felt = False
        says = 0.0
        if begin < last:  # of one member the row of a map means nothing
            felt = is_something(gl.load(following))
            says = gl.load(further)
        if felt:
            ask(ms.index(0), following, COLUMNS)
        b = gl.load(offsets + gl.load(member + 1).to(gl.int64) * offset_row + at, mask=of_offset, other=no_offset)
        following = further
        place = gl.load(members + 3 * begin + 2)
        goes = near
        if place >= apart:
            goes = far
        gl.store(goes + place.to(gl.int64) * (HV * DIM * DIM) + to, x)
        room = 0
        for i in range(begin + 1, last + 1):
            wants = (i < last) & is_something(says)
            further = maps + gl.load(members + 3 * gl.minimum(i + 2, last)).to(gl.int64) * map_row
            says = gl.load(further)
            offset = gl.load(members + 3 * gl.minimum(i + 1, last) + 1).to(gl.int64) * offset_row
            place = gl.load(members + 3 * i + 2)
            if felt:
                xs.index(room).store(x)
                copies_wait(0)
                barrier()
                other = (PLACES - 1) - room
                if PLACES == 2 and wants:
                    ask(ms.index(other), following, COLUMNS)
                x = product(ms.index(room), xs.index(room), b, TRANSPOSED, COLUMNS)
                if PLACES == 1:
                    barrier()
                    if wants:
                        ask(ms.index(other), following, COLUMNS)
                room = other
            else:
                x = instead(x, b)
                if wants:
                    ask(ms.index(room), following, COLUMNS)
            b = gl.load(offsets + offset + at, mask=of_offset, other=no_offset)
            goes = near
            if place >= apart:
                goes = far
            gl.store(goes + place.to(gl.int64) * (HV * DIM * DIM) + to, x)
            felt = wants
            following = further


def merge(M: Tensor, X: Tensor, b: Tensor) -> Tensor:
    """M X + b; M [..., 128, 128] or a transposed view of such, X and b [..., 128, a multiple of 64], fp32."""
    transposed = M.stride(-1) != 1
    M, X, b = ((M.mT if transposed else M).contiguous(), X.contiguous(), b.contiguous())
    out = torch.empty_like(b)
    n, width = M.numel() // (128 * 128), b.shape[-1]
    if n:
        of = _width(n * width // 128)
        launch(
            merge_kernel, (n, width // of.COLUMNS), M, X, b, out, WIDTH=width, TRANSPOSED=transposed,
            COLUMNS=of.COLUMNS, num_warps=of.num_warps,
        )  # fmt: skip
    return out


def tell(maps: Tensor | None, arrived: Tensor, reached: Tensor, way: Passage[Tensor]) -> None:
    """As `exchange.Affine` says; all fp32, maps and reached dense."""
    HV, n = arrived.shape[1], way.through.shape[0]
    tiles = (n + way.arriving.shape[0]) * HV
    of = _width(tiles)
    launch(
        tell_kernel, (tiles, 128 // of.COLUMNS), reached if maps is None else maps, arrived.contiguous(), reached,
        way.arriving, way.through, way.source, n, HV=HV, COLUMNS=of.COLUMNS, num_warps=of.num_warps,
    )  # fmt: skip


def chain(
    M: Tensor, b: Tensor | None, chains: Chains[Tensor], *, maps: bool, in_place: bool = False, apart: int | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """As `exchange.Affine` says; M [rows, HV, 128, 128] fp32 or a transposed view of such, b [rows, HV, 128, 128] fp32,
    rows and heads any distance apart. Where nobody wants a map, or a place is no member's, results are left as they
    were allocated. A program reads of an offset what it then writes there, and no more."""
    HV = M.shape[1]
    transposed = M.stride(-1) != 1
    near = chains.places if apart is None else apart
    out_maps = M.new_empty(chains.places, HV, 128, 128) if maps else None
    out, beyond = b, None
    if b is not None and not (in_place and b.is_contiguous()):
        out = M.new_empty(near, HV, 128, 128)
        beyond = None if apart is None else M.new_empty(chains.places - apart, HV, 128, 128)
    kinds, n = maps + (b is not None), chains.wanted.shape[0]
    if n and HV and kinds:
        M = M.mT if transposed else M
        like = M if b is None else b
        assert M.stride()[2:] == like.stride()[2:] == (128, 1)
        of = _width(n * HV * kinds)
        launch(
            chain_kernel, (n * HV, kinds * (128 // of.COLUMNS)), M, like, chains.table, chains.starts,
            chains.wanted, like if out_maps is None else out_maps, like if out is None else out,
            like if beyond is None else beyond, near, *M.stride()[:2], *like.stride()[:2], HV=HV,
            TRANSPOSED=transposed, MAPS=maps, **of._asdict(),
        )  # fmt: skip
    return out_maps, out, beyond


def _width(tiles: int) -> Width:
    return NARROW if tiles * (128 // NARROW.COLUMNS) <= AT_ONCE else WIDE
