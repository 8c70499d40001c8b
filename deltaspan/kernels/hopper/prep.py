"""What one chunk does without its state, for sm_90: one warp a chunk and key head, all value heads of the group in it.

    A = (I + tril(beta K K^T, -1))^-1 diag(beta)        G = running sum of g / ln 2

A is the decay-free inverse with beta taken in: u = (E o A) V and w = (E o A) a K, with E and a as in the torch tier. It
is also (diag(1/beta) + tril(K K^T, -1))^-1, which makes the off-diagonal merges free of beta:

    A_ii    16 x 16, row r: a_r = beta_r (e_r + sum_(j < r) n_rj a_j)       fp32 on the CUDA cores, a lane a column
    A_ba = A_bb n_ba A_aa                                                  16 -> 32 -> 64, tensor cores

with n = -K K^T, formed once for the group. Merges take fp16 operands as hi + lo, three products each, 22 bits: one
alone (11 bits) misses the bf16 floor for collinear keys. Keys come and A goes by the copy engine, whole tiles of it; in
between everything stays in registers but for the 16-blocks. A tile of keys may hold rows of the next document, or of
nothing that is a number: what they are felt in is replaced by zeros, never multiplied by them.

Raw operands are made ready on the way: g and beta as they are loaded, and of q and k the inverse lengths alone, which
are stored for the kernels that follow. With r the keys' and K^ = diag(r) K the ready keys,

    n = -K^ K^^T = -diag(r) (K K^T) diag(r)        A, as it is stored: diag(r) A

so that (diag(r) A)^T K = A^T K^ and (Q K^T) diag(r) A = (Q K^^T) A need no other keys than those given. Before it is
stored, A is as without.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deltaspan.kernels.hopper.gluon import (
    Tilings,
    add,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    launch,
    load_tile,
    mbarrier,
    mma_v2,
    store_tile,
    store_wait,
)
from deltaspan.kernels.hopper.raw import gate, inverse_length, sigmoid
from deltaspan.kernels.stages import READY, Raw

CHUNK = gl.constexpr(64)
HEAD_DIM = gl.constexpr(128)
LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST_DECAY = gl.constexpr(-110.0)  # e^-110 is zero in fp32; more would only cost the running sum its low bits
LONGEST_KEY = gl.constexpr(1.03)  # |k|^2 of a unit key rounded to bf16 stays below 1.01
LARGEST = gl.constexpr(3.4028234663852886e38)  # |k|^2 of a key that can be normalised
FAINTEST = gl.constexpr(2.0**-27)  # of writes: below fp32's rounding of one, and times RANGE still among fp16's numbers
RANGE = gl.constexpr(2.0**13)  # times which A is kept as fp16 halves: entries are at most 2^2
BACK = gl.constexpr(2.0**-13)


@gluon.jit(do_not_specialize=["step"])
def prep_kernel(
    k_tiles, A_tiles, g, beta, chunks, G, broken, reach, NC, step, q, q_eighths, lengths, A_log, dt_bias,
    H: gl.constexpr, GROUP: gl.constexpr, L2NORM: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
    SIGMOID: gl.constexpr,
):  # fmt: skip
    """k [T, H * 128] bf16 in tiles of [64, 128]; g and beta [T, H * GROUP], fp32 or bf16; chunks [NC, 2] int32: first
    token and tokens of each.

    A [HV * NC * 64, 64] bf16 in tiles of [64, 64], of [HV, NC]; G [HV, NC, 64] fp32, or, with a step of 64 tokens from
    one to the next instead of 1, of a chunk's first token in [T, HV, 64]. broken [H, NC] int32: the first row whose key
    breaks the promise of unit keys, 64 if there is none. reach [HV, NC] fp32: log2 of a bound of the norm of the
    chunk's map, NaN if a key is broken. Beyond a chunk's tokens rows and columns of A are zero, and G goes on with its
    last value. One program for each chunk and key head, heads first.

    L2NORM: k is raw, and q [T, H, 128] bf16 like it, rows 8 * q_eighths apart; lengths [H, NC, 2, 64] fp32 receives the
    inverse lengths of q and of k, and broken marks what is no number. GATE: g is raw, with A_log [H * GROUP] fp32 and,
    with BIAS, dt_bias like it. SIGMOID: the largest beta, if beta is raw, else 0. What is not named here is not
    touched.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    HV: gl.constexpr = H * GROUP
    h = gl.program_id(0) % H
    c = gl.program_id(0) // H
    begin = gl.load(chunks + 2 * c)
    start = begin.to(gl.int64)
    n = gl.load(chunks + 2 * c + 1)

    keys = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, HEAD_DIM], k_tiles.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived, count=1)
    mbarrier.expect(arrived, CHUNK * HEAD_DIM * 2)
    load_tile(k_tiles, [begin, h * HEAD_DIM], arrived, keys)

    row = gl.arange(0, CHUNK, layout=ROW)
    at = (start + row) * HV + h * GROUP
    betas = ()
    decays = ()
    for e in gl.static_range(GROUP):
        strength = gl.load(beta + at + e, mask=row < n, other=0.0).to(gl.float32)
        decay = gl.load(g + at + e, mask=row < n, other=0.0).to(gl.float32)
        if SIGMOID > 0:
            strength = sigmoid(strength, SIGMOID)
        strength = gl.where(row < n, away_from_zero(strength), 0.0)
        if BIAS:
            decay = decay + gl.load(dt_bias + h * GROUP + e)
        if GATE:
            decay = gl.where(row < n, gate(decay, gl.load(A_log + h * GROUP + e)), 0.0)
        betas = betas + (strength,)
        decays = decays + (decay,)

    zero = gl.zeros([16, 16], gl.float32, MMA)
    if L2NORM:
        of_queries = lengths + (h.to(gl.int64) * NC + c) * (2 * CHUNK)
        pitch = q_eighths * 8  # said so that 16 bytes can be loaded at once
        queries = ()
        for i in gl.static_range(4):  # all on their way before the first is waited for
            queries = queries + (load_queries(q + start * pitch + h * HEAD_DIM, i * 16, n, pitch, MMA),)
        for i in gl.static_range(4):
            measured(-mma_v2(queries[i], as_right(queries[i], MMA), zero), of_queries, i * 16, MMA)

    # n = -K K^T by 16-blocks of the lower half
    mbarrier.wait(arrived, 0)
    mbarrier.invalidate(arrived)  # its place may become another's
    n00 = along(keys, 0, n, MMA)
    n11 = along(keys, 1, n, MMA)
    n22 = along(keys, 2, n, MMA)
    n33 = along(keys, 3, n, MMA)

    LONGEST: gl.constexpr = LARGEST if L2NORM else LONGEST_KEY
    first = gl.minimum(
        gl.minimum(long_rows(n00, 0, LONGEST, MMA), long_rows(n11, 16, LONGEST, MMA)),
        gl.minimum(long_rows(n22, 32, LONGEST, MMA), long_rows(n33, 48, LONGEST, MMA)),
    )
    first = gl.min(gl.min(first, 1), 0)  # of all four blocks by one reduction
    gl.store(broken + h.to(gl.int64) * NC + c, first)

    # the inverse lengths of raw keys
    inverse = gl.allocate_shared_memory(gl.float32, [4, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if L2NORM:
        of_keys = lengths + (h.to(gl.int64) * NC + c) * (2 * CHUNK) + CHUNK
        inverse.index(0).store(measured(n00, of_keys, 0, MMA))
        inverse.index(1).store(measured(n11, of_keys, 16, MMA))
        inverse.index(2).store(measured(n22, of_keys, 32, MMA))
        inverse.index(3).store(measured(n33, of_keys, 48, MMA))
        n00 = normalised(n00, inverse, 0, 0, MMA)
        n11 = normalised(n11, inverse, 1, 1, MMA)
        n22 = normalised(n22, inverse, 2, 2, MMA)
        n33 = normalised(n33, inverse, 3, 3, MMA)
    # rows from a broken key on are zero: NaN anyway, but what overflows there would make rows before NaN, too; and so
    # are those beyond the chunk. Products are formed here, not before, so that fewer operands are held at once
    felt = gl.minimum(first, n)
    n10, m10 = between(keys, felt, inverse, 1, 0, L2NORM, MMA)
    n20, m20 = between(keys, felt, inverse, 2, 0, L2NORM, MMA)
    n21, m21 = between(keys, felt, inverse, 2, 1, L2NORM, MMA)
    n30, m30 = between(keys, felt, inverse, 3, 0, L2NORM, MMA)
    n31, m31 = between(keys, felt, inverse, 3, 1, L2NORM, MMA)
    n32, m32 = between(keys, felt, inverse, 3, 2, L2NORM, MMA)

    # the diagonal blocks, two at a time: pairs (0, 1) and (2, 3)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    HALF: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    diagonal = gl.allocate_shared_memory(gl.float32, [2, 2, 256], PLAIN)
    strengths = gl.allocate_shared_memory(gl.float32, [GROUP * 2, 2, 16], PLAIN)
    hi = gl.allocate_shared_memory(gl.float16, [GROUP * 2, 32, 16], HALF)  # A_ii transposed: [column, row]
    lo = gl.allocate_shared_memory(gl.float16, [GROUP * 2, 32, 16], HALF)
    diagonal.index(0).slice(0, 1, 0).store(gl.reshape(n00, (1, 256)))
    diagonal.index(0).slice(1, 1, 0).store(gl.reshape(n11, (1, 256)))
    diagonal.index(1).slice(0, 1, 0).store(gl.reshape(n22, (1, 256)))
    diagonal.index(1).slice(1, 1, 0).store(gl.reshape(n33, (1, 256)))
    for e in gl.static_range(GROUP):
        strength = gl.where(row < first, betas[e], 0.0)  # of broken keys, as above
        b0, b1 = gl.split(gl.permute(gl.reshape(strength, (2, 32)), (1, 0)))
        strengths.index(e * 2).store(gl.reshape(b0, (2, 16)))
        strengths.index(e * 2 + 1).store(gl.reshape(b1, (2, 16)))
        decay = gl.where(decays[e] < LOWEST_DECAY, LOWEST_DECAY, decays[e])  # a NaN stays one
        summed = gl.associative_scan(decay, 0, add) * LOG2_E
        hv = (h * GROUP + e).to(gl.int64)
        gl.store(G + gl.where(step > 1, start * HV + hv, hv * NC + c) * CHUNK + row, summed)
        # |I - beta k k^T| is at most 1, or beta |k|^2 - 1 = 1 + x where that is more, and log(1 + x) at most x
        growth = LONGEST_KEY * betas[e] - 2.0
        growth = gl.where(growth <= 0.0, 0.0, growth) * LOG2_E  # a NaN stays one
        bound = gl.sum(gl.where(row == CHUNK - 1, summed, 0.0) + growth, 0)
        bound = gl.where(first < CHUNK, float("nan"), bound)
        gl.store(reach + (h * GROUP + e).to(gl.int64) * NC + c, bound)
    for pair in range(2):
        solve_pair(diagonal, strengths, hi, lo, pair, GROUP)

    tile = gl.allocate_shared_memory(gl.bfloat16, [CHUNK, CHUNK], A_tiles.layout)
    for e in range(GROUP):
        merge(tile, hi, lo, inverse, e * 2, n10, m10, n20, m20, n30, m30, n21, m21, n31, m31, n32, m32, L2NORM, MMA)
        fence_async_shared()
        barrier()
        store_tile(A_tiles, [((h * GROUP + e) * NC + c) * CHUNK, 0], tile)
    store_wait(0)


@gluon.jit
def away_from_zero(beta):
    """A token that writes nothing writes next to nothing: columns of A are then never zero, and A / beta is known."""
    faint = gl.where(beta < 0.0, -FAINTEST, FAINTEST)
    return gl.where(gl.abs(beta) < FAINTEST, faint, beta)


@gluon.jit
def measured(n_ii, lengths, first, MMA: gl.constexpr):
    """Inverse lengths of 16 rows, of -x x^T of theirs; stored from row `first` on."""
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, MMA))
    inverse = inverse_length(gl.sum(gl.where(row[:, None] == column[None, :], -n_ii, 0.0), 1))
    gl.store(lengths + first + row, inverse)
    return inverse


@gluon.jit
def normalised(n_ij, inverse, i: gl.constexpr, j: gl.constexpr, MMA: gl.constexpr):
    """A block of -K K^T between keys of length 1: one factor after the other, for both may be small or large."""
    n_ij = n_ij * inverse.index(i).load(gl.SliceLayout(1, MMA))[:, None]
    return n_ij * inverse.index(j).load(gl.SliceLayout(0, MMA))[None, :]


@gluon.jit
def along(keys, i: gl.constexpr, n, MMA: gl.constexpr):
    """n_ii, zero in columns beyond the chunk: of it the diagonal is read, and what stands above that in place of what
    stands below."""
    column = i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, MMA))
    return gl.where((column < n)[None, :], -key_products(keys, i, i, MMA), 0.0)


@gluon.jit
def between(keys, felt, inverse, i: gl.constexpr, j: gl.constexpr, L2NORM: gl.constexpr, MMA: gl.constexpr):
    """Halves of n_ij, zero in rows of the chunk from `felt` on: before are tokens, and so are all columns then."""
    row = i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))
    n_ij = gl.where((row < felt)[:, None], -key_products(keys, i, j, MMA), 0.0)
    if L2NORM:
        n_ij = normalised(n_ij, inverse, i, j, MMA)
    return halves(n_ij)


@gluon.jit
def key_products(keys, i: gl.constexpr, j: gl.constexpr, MMA: gl.constexpr):
    """Block (i, j) of K K^T."""
    left = keys.slice(i * 16, 16, 0).load(gl.DotOperandLayout(0, MMA, 2))
    right = keys.slice(j * 16, 16, 0).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 2))
    return mma_v2(left, right, gl.zeros([16, 16], gl.float32, MMA))


@gluon.jit
def solve_pair(diagonal, strengths, hi, lo, pair, GROUP: gl.constexpr):
    """Two diagonal blocks of every value head by forward substitution: hi + lo of RANGE A_ii, transposed. Once a row is
    known, all later ones take it up: sixteen sums that wait for nothing but that row, where each row by itself would
    wait for a sum of its own."""
    CUBE: gl.constexpr = gl.BlockedLayout([1, 1, 16], [2, 16, 1], [1, 1, 1], [2, 1, 0])  # block, column, row
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, CUBE)))[None, None, :]
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, CUBE)))[None, :]
    solved = ()
    for e in gl.static_range(GROUP):
        solved = solved + (gl.where(row == column[:, :, None], gl.full([2, 16, 16], RANGE, gl.float32, CUBE), 0.0),)
    for i in gl.static_range(16):
        ni = diagonal.index(pair).slice(i * 16, 16, 1).load(gl.SliceLayout(1, CUBE))[:, None, :]  # n_ri, as n_ir
        further = ()
        for e in gl.static_range(GROUP):
            x = solved[e]
            a = row_of(x, i, row) * strengths.index(e * 2 + pair).slice(i, 1, 1).load(gl.SliceLayout(2, CUBE))
            further = further + (gl.where(row > i, x + ni * a[:, :, None], gl.where(row == i, a[:, :, None], x)),)
        solved = further
        if i == 7:
            barrier()  # or Triton 3.9 loads ahead until registers spill
    for e in gl.static_range(GROUP):
        h, l = halves(gl.reshape(solved[e], (32, 16)))
        hi.index(e * 2 + pair).store(h)
        lo.index(e * 2 + pair).store(l)


@gluon.jit
def row_of(x, i: gl.constexpr, row):
    """Row i of x [block, column, row], a register of each lane: by bits, of which no order of sums remains."""
    bits = gl.where(row == i, x.to(gl.int32, bitcast=True), 0)
    return gl.reduce(bits, 2, either).to(gl.float32, bitcast=True)


@gluon.jit
def either(a, b):
    return a | b


@gluon.jit
def merge(
    tile, hi, lo, inverse, first, n10, m10, n20, m20, n30, m30, n21, m21, n31, m31, n32, m32, L2NORM: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """One value head's A from its diagonal blocks (pairs `first` and `first + 1` of hi, lo) and n (n + m), to where the
    one before it has left."""
    zero = gl.zeros([16, 16], gl.float32, MMA)
    none = gl.zeros([16, 16], gl.bfloat16, MMA)
    t0h, t0l = block(hi, lo, first, 0, True, MMA)  # A_00^T
    t1h, t1l = block(hi, lo, first, 1, True, MMA)
    t2h, t2l = block(hi, lo, first + 1, 0, True, MMA)
    d1h, d1l = block(hi, lo, first, 1, False, MMA)  # A_11
    d3h, d3l = block(hi, lo, first + 1, 1, False, MMA)
    # blocks (1, 0) and (3, 2)
    zh, zl = halves(product(t0h, t0l, as_right(n10, MMA), as_right(m10, MMA), zero))  # (n_10 A_00)^T
    yh, yl = halves(product(t2h, t2l, as_right(n32, MMA), as_right(m32, MMA), zero))
    a10 = product(d1h, d1l, as_right(zh, MMA), as_right(zl, MMA), zero)
    s10 = product(as_left(zh, MMA), as_left(zl, MMA), as_right(d1h, MMA), as_right(d1l, MMA), zero)  # A_10^T
    a32 = product(d3h, d3l, as_right(yh, MMA), as_right(yl, MMA), zero)
    o10 = written(1, a10, BACK * BACK, inverse, L2NORM, MMA)
    o32 = written(3, a32, BACK * BACK, inverse, L2NORM, MMA)
    o11 = written(1, joined(d1h, d1l, MMA), 1.0, inverse, L2NORM, MMA)
    o33 = written(3, joined(d3h, d3l, MMA), 1.0, inverse, L2NORM, MMA)
    store_wait(0)  # for the value head before, whose tile has been on its way since
    barrier()
    place(tile, 1, o10, o11, none, none)
    sh, sl = halves(s10 * BACK)
    sh = as_left(sh, MMA)
    sl = as_left(sl, MMA)
    fh, fl = halves(a32 * BACK)
    fh = as_left(fh, MMA)
    fl = as_left(fl, MMA)
    # blocks (2, 0) to (3, 1): z_ba^T = sum over columns of (n A)^T
    z20 = product(t0h, t0l, as_right(n20, MMA), as_right(m20, MMA), zero)
    z20 = product(sh, sl, as_right(n21, MMA), as_right(m21, MMA), z20)
    z30 = product(t0h, t0l, as_right(n30, MMA), as_right(m30, MMA), zero)
    z30 = product(sh, sl, as_right(n31, MMA), as_right(m31, MMA), z30)
    z21 = product(t1h, t1l, as_right(n21, MMA), as_right(m21, MMA), zero)
    z31 = product(t1h, t1l, as_right(n31, MMA), as_right(m31, MMA), zero)
    d2h, d2l = block(hi, lo, first + 1, 0, False, MMA)
    h20, l20 = halves(z20)
    h21, l21 = halves(z21)
    h30, l30 = halves(z30)
    h31, l31 = halves(z31)
    o20 = written(2, product(d2h, d2l, as_right(h20, MMA), as_right(l20, MMA), zero), BACK * BACK, inverse, L2NORM, MMA)
    o21 = written(2, product(d2h, d2l, as_right(h21, MMA), as_right(l21, MMA), zero), BACK * BACK, inverse, L2NORM, MMA)
    a30 = product(fh, fl, as_right(h20, MMA), as_right(l20, MMA), zero)
    o30 = written(3, product(d3h, d3l, as_right(h30, MMA), as_right(l30, MMA), a30), BACK * BACK, inverse, L2NORM, MMA)
    a31 = product(fh, fl, as_right(h21, MMA), as_right(l21, MMA), zero)
    o31 = written(3, product(d3h, d3l, as_right(h31, MMA), as_right(l31, MMA), a31), BACK * BACK, inverse, L2NORM, MMA)
    o22 = written(2, joined(d2h, d2l, MMA), 1.0, inverse, L2NORM, MMA)
    place(tile, 2, o20, o21, o22, none)
    d0h, d0l = block(hi, lo, first, 0, False, MMA)
    o00 = written(0, joined(d0h, d0l, MMA), 1.0, inverse, L2NORM, MMA)
    place(tile, 0, o00, none, none, none)
    place(tile, 3, o30, o31, o32, o33)


@gluon.jit
def load_queries(q, first, n, pitch, MMA: gl.constexpr):
    """16 queries [16, 128] from row `first` on as a left operand, zero beyond the chunk: 16-byte loads, channels
    relabelled so that they are the operand's registers."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    token = first + gl.arange(0, 16, layout=gl.SliceLayout(1, WIDE))
    channel = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, WIDE))
    x = gl.load(q + token[:, None] * pitch + channel[None, :], mask=(token < n)[:, None], other=0.0)
    x = gl.permute(gl.reshape(x, (16, HEAD_DIM // 32, 4, 2, 2, 2)), (0, 1, 3, 4, 2, 5))
    return gl.convert_layout(gl.reshape(x, (16, HEAD_DIM)), gl.DotOperandLayout(0, MMA, 2))


@gluon.jit
def long_rows(n_ii, first, LONGEST: gl.constexpr, MMA: gl.constexpr):
    """On a diagonal block's diagonal, where a key's |k|^2 is not up to LONGEST: its row in the chunk; else 64."""
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))[:, None]
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, MMA))[None, :]
    long = (row == column) & ~(-n_ii <= LONGEST)  # a NaN is no unit key
    return gl.where(long, first + row, CHUNK)


@gluon.jit
def halves(x):
    """fp32 as a sum of two fp16."""
    high = x.to(gl.float16)
    return high, (x - high.to(gl.float32)).to(gl.float16)


@gluon.jit
def product(left_high, left_low, right_high, right_low, acc):
    """acc + left right, of fp16 halves, but for the product of the lows."""
    acc = mma_v2(left_low, right_high, acc)
    acc = mma_v2(left_high, right_low, acc)
    return mma_v2(left_high, right_high, acc)


@gluon.jit
def as_right(x, MMA: gl.constexpr):
    """[n, k], an accumulator or a left operand, as the right operand [k, n]; within registers."""
    return gl.convert_layout(gl.permute(x, (1, 0)), gl.DotOperandLayout(1, MMA, 2))


@gluon.jit
def as_left(x, MMA: gl.constexpr):
    return gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2))


@gluon.jit
def block(hi, lo, pair, which: gl.constexpr, TRANSPOSED: gl.constexpr, MMA: gl.constexpr):
    """Halves of a diagonal block A_ii as left operands, or of A_ii^T, as which it is stored."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    high = hi.index(pair).slice(which * 16, 16, 0)
    low = lo.index(pair).slice(which * 16, 16, 0)
    if not TRANSPOSED:
        high = high.permute((1, 0))
        low = low.permute((1, 0))
    return high.load(LEFT), low.load(LEFT)


@gluon.jit
def joined(high, low, MMA: gl.constexpr):
    """BACK (high + low), exact: as a product, for which no half is converted or moved."""
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, RIGHT))[:, None]
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, RIGHT))[None, :]
    identity = gl.where(row == column, gl.full([16, 16], BACK, gl.float32, RIGHT), 0.0).to(gl.float16)
    return mma_v2(high, identity, mma_v2(low, identity, gl.zeros([16, 16], gl.float32, MMA)))


@gluon.jit
def written(i: gl.constexpr, x, SCALE: gl.constexpr, inverse, L2NORM: gl.constexpr, MMA: gl.constexpr):
    """A block of A's rows from 16 i on: SCALE times x, and with raw keys each row times its inverse length."""
    scale = SCALE
    if L2NORM:
        scale = (inverse.index(i).load(gl.SliceLayout(1, MMA)) * SCALE)[:, None]
    return (x * scale).to(gl.bfloat16)


@gluon.jit
def place(tile, i: gl.constexpr, a, b, c, d):
    """Rows of A from 16 i on, by their blocks [16, 16]."""
    x = gl.join(gl.join(a, b), gl.join(c, d))
    tile.slice(i * 16, 16, 0).store(gl.reshape(gl.permute(x, (0, 3, 2, 1)), (16, CHUNK)))


class Prepared(NamedTuple):
    """What the kernel leaves."""

    A: Tensor  # [HV, NC, 64, 64] bf16
    G: Tensor  # [HV, NC, 64] fp32; or [T, HV, 64], of every chunk's first token, in the place of o
    broken: Tensor  # [H, NC] int32
    reach: Tensor  # [HV, NC] fp32
    lengths: Tensor | None = None  # [H, NC, 2, 64] fp32, inverse, of raw q and k
    o: Tensor | None = None  # [T, HV, 128] bf16, if that is where G lies

    @property
    def step(self) -> int:
        """From a chunk's G to the next one's of a head, in rows of the head."""
        return 1 if self.o is None else 64


def prep(
    k: Tensor, g: Tensor, beta: Tensor, chunks: Tensor, *, q: Tensor | None = None, raw: Raw = READY,
    o: Tensor | None = None, tilings: Tilings | None = None,
) -> Prepared:  # fmt: skip
    """Launches the kernel; k [T, H, 128] bf16, rows a multiple of 16 bytes apart; g and beta [T, HV] fp32 or bf16;
    chunks [NC, 2] int32: first token and tokens of each. q like k, read if they are raw; A_log and dt_bias [HV] fp32.
    o [T, HV, 128] bf16: has room for G until it is written. tilings: for launches after this one.
    """
    NC, H, HV = chunks.shape[0], k.shape[1], g.shape[1]
    empty = partial(k.new_empty, dtype=torch.float32)
    A, broken = k.new_empty(HV, NC, 64, 64), k.new_empty(H, NC, dtype=torch.int32)
    lengths = empty(H, NC, 2, 64) if raw.l2norm else None
    G = empty(HV, NC, 64) if o is None else o.view(torch.float32)
    made = Prepared(A, G, broken, empty(HV, NC), lengths, o)
    if NC:
        shared = Tilings() if tilings is None else tilings
        queries = (q, q.stride(0) // 8) if raw.l2norm else (None, None)
        launch(
            prep_kernel, (NC * H,), shared.rows(k), shared.of(A, 64, 64, 64), g, beta, chunks, *made[1:4], NC,
            made.step, *queries, lengths, raw.A_log, raw.dt_bias, H=H, GROUP=HV // H, L2NORM=raw.l2norm,
            GATE=raw.A_log is not None, BIAS=raw.dt_bias is not None, SIGMOID=raw.largest_beta if raw.sigmoid else 0,
            num_warps=1,
        )  # fmt: skip
    return made
