"""What one chunk does without its state, for sm_90: one warp a chunk and key head, all value heads of the group in it.

    A = (I + tril(beta K K^T, -1))^-1 diag(beta)        G = running sum of g / ln 2

A is the decay-free inverse with beta taken in: u = (E o A) V and w = (E o A) a K, with E and a as in the torch tier. It
is also (diag(1/beta) + tril(K K^T, -1))^-1, which makes the off-diagonal merges free of beta:

    A_ii    16 x 16, row r: a_r = beta_r (e_r + sum_(j < r) n_rj a_j)       fp32 on the CUDA cores, a lane a column
    A_ba = A_bb n_ba A_aa                                                  16 -> 32 -> 64, tensor cores

with n = -K K^T, formed once for the group. Merges take fp16 operands as hi + lo, three products each, 22 bits: one
alone (11 bits) misses the bf16 floor for collinear keys. Everything between the loads of k and the stores of A stays in
registers but for the 16-blocks.

Raw operands are made ready on the way: g and beta as they are loaded, and of q and k the inverse lengths alone, which
are stored for the kernels that follow. With r the keys' and K^ = diag(r) K the ready keys,

    n = -K^ K^^T = -diag(r) (K K^T) diag(r)        A, as it is stored: diag(r) A

so that (diag(r) A)^T K = A^T K^ and (Q K^T) diag(r) A = (Q K^^T) A need no other keys than those given. Before it is
stored, A is as without.

Tokens are relabelled inside a 16-block, position 8 t + 2 q + e for token 4 q + 2 t + e, so that a lane's accumulators
are four neighbouring columns; products do not care about labels.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deltaspan.kernels.hopper.gluon import add, gl, gluon, launch, mma_v2
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
    k, g, beta, chunks, A, G, broken, reach, NC, step, eighths, q, q_eighths, lengths, A_log, dt_bias, H: gl.constexpr,
    GROUP: gl.constexpr, L2NORM: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, SIGMOID: gl.constexpr,
):  # fmt: skip
    """k [T, H, 128] bf16, rows 8 * eighths apart; g and beta [T, H * GROUP], fp32 or bf16; chunks [NC, 2] int32: first
    token and tokens of each.

    A [HV, NC, 64, 64] bf16, G [HV, NC, 64] fp32, or, with a step of 64 tokens from one to the next instead of 1, of a
    chunk's first token in [T, HV, 64]. broken [H, NC] int32: the first row whose key breaks the promise of
    unit keys, 64 if there is none. reach [HV, NC] fp32: log2 of a bound of the norm of the chunk's map, NaN if a key is
    broken. Beyond a chunk's tokens rows and columns of A are zero, and G goes on with its last value. One program for
    each chunk and key head, heads first.

    L2NORM: k is raw, and q like it, rows 8 * q_eighths apart; lengths [H, NC, 2, 64] fp32 receives the inverse lengths
    of q and of k, and broken marks what is no number. GATE: g is raw, with A_log [H * GROUP] fp32 and, with BIAS,
    dt_bias like it. SIGMOID: the largest beta, if beta is raw, else 0. What is not named here is not touched.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    HV: gl.constexpr = H * GROUP
    h = gl.program_id(0) % H
    c = gl.program_id(0) // H
    start = gl.load(chunks + 2 * c).to(gl.int64)
    n = gl.load(chunks + 2 * c + 1)

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
        for i in gl.static_range(4):
            x = load_keys(q + start * (q_eighths * 8) + h * HEAD_DIM, i * 16, n, q_eighths * 8, MMA)
            measured(-mma_v2(x, as_right(x, MMA), zero), of_queries, i * 16, MMA)

    # n = -K K^T by 16-blocks of the lower half
    pitch = eighths * 8  # said so that 16 bytes can be loaded at once
    keys = k + start * pitch + h * HEAD_DIM
    k0 = load_keys(keys, 0, n, pitch, MMA)
    k1 = load_keys(keys, 16, n, pitch, MMA)
    k2 = load_keys(keys, 32, n, pitch, MMA)
    k3 = load_keys(keys, 48, n, pitch, MMA)
    r0 = as_right(k0, MMA)
    r1 = as_right(k1, MMA)
    r2 = as_right(k2, MMA)
    r3 = as_right(k3, MMA)
    n00 = -mma_v2(k0, r0, zero)
    n11 = -mma_v2(k1, r1, zero)
    n22 = -mma_v2(k2, r2, zero)
    n33 = -mma_v2(k3, r3, zero)

    LONGEST: gl.constexpr = LARGEST if L2NORM else LONGEST_KEY
    first = gl.minimum(
        gl.minimum(first_long(n00, 0, LONGEST, MMA), first_long(n11, 16, LONGEST, MMA)),
        gl.minimum(first_long(n22, 32, LONGEST, MMA), first_long(n33, 48, LONGEST, MMA)),
    )
    gl.store(broken + h.to(gl.int64) * NC + c, first)

    # by position, the inverse lengths of raw keys
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
    # rows from a broken key on are zero: NaN anyway, but what overflows there would make rows before NaN, too
    sign1 = minus_before(first, 16, MMA)
    sign2 = minus_before(first, 32, MMA)
    sign3 = minus_before(first, 48, MMA)
    n10, m10 = between(k1, r0, sign1, inverse, 1, 0, L2NORM, MMA)
    n20, m20 = between(k2, r0, sign2, inverse, 2, 0, L2NORM, MMA)
    n30, m30 = between(k3, r0, sign3, inverse, 3, 0, L2NORM, MMA)
    n21, m21 = between(k2, r1, sign2, inverse, 2, 1, L2NORM, MMA)
    n31, m31 = between(k3, r1, sign3, inverse, 3, 1, L2NORM, MMA)
    n32, m32 = between(k3, r2, sign3, inverse, 3, 2, L2NORM, MMA)

    # the diagonal blocks, two at a time: pairs (0, 1) and (2, 3)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    HALF: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    diagonal = gl.allocate_shared_memory(gl.float32, [2, 2, 256], PLAIN)
    strengths = gl.allocate_shared_memory(gl.float32, [GROUP * 2, 2, 16], PLAIN)
    hi = gl.allocate_shared_memory(gl.float16, [GROUP * 2, 32, 16], HALF)  # A_ii transposed: [column, row], positions
    lo = gl.allocate_shared_memory(gl.float16, [GROUP * 2, 32, 16], HALF)
    diagonal.index(0).slice(0, 1, 0).store(gl.reshape(by_token(n00), (1, 256)))
    diagonal.index(0).slice(1, 1, 0).store(gl.reshape(by_token(n11), (1, 256)))
    diagonal.index(1).slice(0, 1, 0).store(gl.reshape(by_token(n22), (1, 256)))
    diagonal.index(1).slice(1, 1, 0).store(gl.reshape(by_token(n33), (1, 256)))
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

    for e in range(GROUP):
        out = A + ((h * GROUP + e).to(gl.int64) * NC + c) * (CHUNK * CHUNK)
        merge(out, hi, lo, inverse, e * 2, n10, m10, n20, m20, n30, m30, n21, m21, n31, m31, n32, m32, L2NORM, MMA)


@gluon.jit
def away_from_zero(beta):
    """A token that writes nothing writes next to nothing: columns of A are then never zero, and A / beta is known."""
    faint = gl.where(beta < 0.0, -FAINTEST, FAINTEST)
    return gl.where(gl.abs(beta) < FAINTEST, faint, beta)


@gluon.jit
def measured(n_ii, lengths, first, MMA: gl.constexpr):
    """Inverse lengths of 16 rows by position, of -x x^T of theirs; stored by token, from row `first` on."""
    position = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))
    other = gl.arange(0, 16, layout=gl.SliceLayout(0, MMA))
    inverse = inverse_length(gl.sum(gl.where(position[:, None] == other[None, :], -n_ii, 0.0), 1))
    gl.store(lengths + first + token_of(position), inverse)
    return inverse


@gluon.jit
def normalised(n_ij, inverse, i: gl.constexpr, j: gl.constexpr, MMA: gl.constexpr):
    """A block of -K K^T between keys of length 1: one factor after the other, for both may be small or large."""
    n_ij = n_ij * inverse.index(i).load(gl.SliceLayout(1, MMA))[:, None]
    return n_ij * inverse.index(j).load(gl.SliceLayout(0, MMA))[None, :]


@gluon.jit
def between(k_i, r_j, sign, inverse, i: gl.constexpr, j: gl.constexpr, L2NORM: gl.constexpr, MMA: gl.constexpr):
    """Halves of n_ij."""
    n_ij = mma_v2(k_i, r_j, gl.zeros([16, 16], gl.float32, MMA)) * sign[:, None]
    if L2NORM:
        n_ij = normalised(n_ij, inverse, i, j, MMA)
    return halves(n_ij)


@gluon.jit
def solve_pair(diagonal, strengths, hi, lo, pair, GROUP: gl.constexpr):
    """Two diagonal blocks of every value head by forward substitution: hi + lo of RANGE A_ii, transposed, by
    position."""
    CUBE: gl.constexpr = gl.BlockedLayout([1, 1, 16], [2, 16, 1], [1, 1, 1], [2, 1, 0])  # block, column, row
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, CUBE)))[None, None, :]
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, CUBE)))[None, :]
    solved = ()
    for e in gl.static_range(GROUP):
        solved = solved + (gl.zeros([2, 16, 16], gl.float32, CUBE),)
    for i in gl.static_range(16):
        ni = diagonal.index(pair).slice(i * 16, 16, 1).load(gl.SliceLayout(1, CUBE))[:, None, :]
        unit = gl.where(column == i, RANGE, 0.0)
        longer = ()
        for e in gl.static_range(GROUP):
            x = solved[e]
            a = gl.sum(gl.where(row < i, ni * x, -0.0), 2) + unit
            a = a * strengths.index(e * 2 + pair).slice(i, 1, 1).load(gl.SliceLayout(2, CUBE))
            longer = longer + (gl.where(row == i, a[:, :, None], x),)
        solved = longer
    for e in gl.static_range(GROUP):
        x = gl.reshape(solved[e], (2, 4, 2, 2, 4, 2, 2))  # columns (q, t, e), then rows (q, t, e)
        x = gl.reshape(gl.permute(x, (0, 2, 1, 3, 5, 4, 6)), (32, 16))
        h, l = halves(x)
        hi.index(e * 2 + pair).store(h)
        lo.index(e * 2 + pair).store(l)


@gluon.jit
def merge(
    out, hi, lo, inverse, first, n10, m10, n20, m20, n30, m30, n21, m21, n31, m31, n32, m32, L2NORM: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """One value head's A from its diagonal blocks (pairs `first` and `first + 1` of hi, lo) and n (n + m)."""
    zero = gl.zeros([16, 16], gl.float32, MMA)
    clear(out + 32, 32, 32)
    clear(out + 16, 16, 16)
    clear(out + 32 * CHUNK + 48, 16, 16)
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
    put(out, 1, 0, a10, BACK * BACK, inverse, L2NORM, MMA)
    put(out, 3, 2, a32, BACK * BACK, inverse, L2NORM, MMA)
    put(out, 1, 1, joined(d1h, d1l, MMA), BACK, inverse, L2NORM, MMA)
    put(out, 3, 3, joined(d3h, d3l, MMA), BACK, inverse, L2NORM, MMA)
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
    put(out, 2, 0, product(d2h, d2l, as_right(h20, MMA), as_right(l20, MMA), zero), BACK * BACK, inverse, L2NORM, MMA)
    put(out, 2, 1, product(d2h, d2l, as_right(h21, MMA), as_right(l21, MMA), zero), BACK * BACK, inverse, L2NORM, MMA)
    a30 = product(fh, fl, as_right(h20, MMA), as_right(l20, MMA), zero)
    put(out, 3, 0, product(d3h, d3l, as_right(h30, MMA), as_right(l30, MMA), a30), BACK * BACK, inverse, L2NORM, MMA)
    a31 = product(fh, fl, as_right(h21, MMA), as_right(l21, MMA), zero)
    put(out, 3, 1, product(d3h, d3l, as_right(h31, MMA), as_right(l31, MMA), a31), BACK * BACK, inverse, L2NORM, MMA)
    put(out, 2, 2, joined(d2h, d2l, MMA), BACK, inverse, L2NORM, MMA)
    d0h, d0l = block(hi, lo, first, 0, False, MMA)
    put(out, 0, 0, joined(d0h, d0l, MMA), BACK, inverse, L2NORM, MMA)


@gluon.jit
def load_keys(keys, first, n, pitch, MMA: gl.constexpr):
    """16 keys or queries [positions, 128] from row `first` on as a left operand, zero beyond the chunk: 16-byte loads,
    channels relabelled so that they are the operand's registers."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    position = gl.arange(0, 16, layout=gl.SliceLayout(1, WIDE))
    channel = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, WIDE))
    token = first + token_of(position)
    x = gl.load(keys + token[:, None] * pitch + channel[None, :], mask=(token < n)[:, None], other=0.0)
    x = gl.permute(gl.reshape(x, (16, HEAD_DIM // 32, 4, 2, 2, 2)), (0, 1, 3, 4, 2, 5))
    return gl.convert_layout(gl.reshape(x, (16, HEAD_DIM)), gl.DotOperandLayout(0, MMA, 2))


@gluon.jit
def first_long(n_ii, first, LONGEST: gl.constexpr, MMA: gl.constexpr):
    """The first row of a diagonal block, counted in the chunk, whose key's |k|^2 is not up to LONGEST; 64 for none."""
    position = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))[:, None]
    other = gl.arange(0, 16, layout=gl.SliceLayout(0, MMA))[None, :]
    token = first + token_of(position)
    long = (position == other) & ~(-n_ii <= LONGEST)  # a NaN is no unit key
    return gl.min(gl.min(gl.where(long, token, CHUNK), 1), 0)


@gluon.jit
def minus_before(row, first, MMA: gl.constexpr):
    """-1 for rows of a block before this one of the chunk, else 0."""
    position = gl.arange(0, 16, layout=gl.SliceLayout(1, MMA))
    return gl.where(first + token_of(position) < row, -1.0, 0.0)


@gluon.jit
def token_of(position):
    """In its 16-block."""
    return ((position >> 1) & 3) * 4 + (position >> 3) * 2 + (position & 1)


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
    return gl.convert_layout(high, MMA).to(gl.float32) + gl.convert_layout(low, MMA).to(gl.float32)


@gluon.jit
def by_token(x):
    """[16, 16] by position -> by token; within registers."""
    x = gl.permute(gl.reshape(x, (2, 4, 2, 2, 4, 2)), (1, 0, 2, 4, 3, 5))
    return gl.reshape(x, (16, 16))


@gluon.jit
def put(
    out, i: gl.constexpr, j: gl.constexpr, x, SCALE: gl.constexpr, inverse, L2NORM: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """Stores block (i, j) of A, SCALE times x, and with raw keys each row times its inverse length; 8 bytes a lane."""
    TILE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [2, 0]], [[0, 4], [0, 8], [1, 0], [4, 0], [8, 0]], [], [], [16, 16]
    )
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, TILE))
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, TILE))
    scale = SCALE
    if L2NORM:
        scale = (inverse.index(i).load(gl.SliceLayout(1, MMA)) * SCALE)[:, None]
    x = x * scale
    at = out + (i * 16 * CHUNK + j * 16) + row[:, None] * CHUNK + column[None, :]
    gl.store(at, gl.convert_layout(by_token(x.to(gl.bfloat16)), TILE))


@gluon.jit
def clear(out, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // COLUMNS, COLUMNS // 8], [1, 1], [1, 0])
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, TILE))
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, TILE))
    gl.store(out + row[:, None] * CHUNK + column[None, :], gl.zeros([ROWS, COLUMNS], gl.bfloat16, TILE))


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
    o: Tensor | None = None,
) -> Prepared:  # fmt: skip
    """Launches the kernel; k [T, H, 128] bf16, rows a multiple of 16 bytes apart; g and beta [T, HV] fp32 or bf16;
    chunks [NC, 2] int32: first token and tokens of each. q like k, read if they are raw; A_log and dt_bias [HV] fp32.
    o [T, HV, 128] bf16: has room for G until it is written.
    """
    NC, H, HV = chunks.shape[0], k.shape[1], g.shape[1]
    empty = partial(k.new_empty, dtype=torch.float32)
    A, broken = k.new_empty(HV, NC, 64, 64), k.new_empty(H, NC, dtype=torch.int32)
    lengths = empty(H, NC, 2, 64) if raw.l2norm else None
    G = empty(HV, NC, 64) if o is None else o.view(torch.float32)
    made = Prepared(A, G, broken, empty(HV, NC), lengths, o)
    if NC:
        queries = (q, q.stride(0) // 8) if raw.l2norm else (None, None)
        launch(
            prep_kernel, (NC * H,), k, g, beta, chunks, *made[:4], NC, made.step, k.stride(0) // 8, *queries, lengths,
            raw.A_log, raw.dt_bias, H=H, GROUP=HV // H, L2NORM=raw.l2norm, GATE=raw.A_log is not None,
            BIAS=raw.dt_bias is not None, SIGMOID=raw.largest_beta if raw.sigmoid else 0, num_warps=1,
        )  # fmt: skip
    return made
