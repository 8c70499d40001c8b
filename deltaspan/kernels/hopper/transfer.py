"""A segment's map M, S_out = M S_in + b, for sm_90: one program a segment and value head.

All decay comes off a chunk's map in front, for what token i reads has decayed by 2^(G_i) and what it writes decays by
2^(G_C - G_i). So M is 2^(sum of G_C) times the walk of a rule without decay, begun with the identity:

    M^T <- M^T - (M^T K^T) (A^T K)

A map goes to other ranks and is multiplied by others, so its chain keeps fp32: M^T and what it reads are split into two
fp16 numbers each, 22 bits (K and A^T K are exact in fp16, or near enough: entries below 2^-14 lose bits that are 2^-24
of a key). One fp16 or TF32 number alone, 11 bits, would not do over long chains of slow decay. Rows of M^T are walked
each by itself, so each is kept within fp16's range by powers of two of its own, which cost no bit.

Tensor cores cut sums off towards zero where the CUDA cores round. What is added to M^T chunk by chunk in their
accumulators shrinks it at each addition by half a unit of its last place, and 1,024 chunks by 2e-4. So M^T is never an
accumulator: products of halves begin at zero and are taken off it by the CUDA cores, the high halves' first. Nor do low
halves share an accumulator with high ones, whose last place would cut off what they bring: the product of a low half
of M^T with K is added to what is left of M^T K^T when its high half is taken.

Raw keys are multiplied by their inverse lengths on their way into fp16; A^T K, with A as prep leaves it then, is that
of ready keys already.

Where everything decays below the smallest fp32 number within the segment, M is zero and nothing is walked. All of it is
then -0.0, and no zero of any other map is: so whoever multiplies by it knows from its first element.
"""

from torch import Tensor

from deltaspan.kernels.hopper.forward import chunks_felt, clear_behind
from deltaspan.kernels.hopper.gluon import (
    Tilings,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    launch,
    load_tile,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltaspan.kernels.hopper.instructions import (
    exp2,
    in_fp16,
    late,
    let_next_begin,
    rounded_sum,
    uniform,
    widened,
)
from deltaspan.kernels.hopper.prep import Prepared

# A walk holds M^T in 64 registers, and then both halves of it in 32 each and M^T K^T in 32, or a product in 64 and the
# halves of M^T K^T in 16 each. The first partition has what the others leave of 512 registers: as many as the second.
LAUNCH = {"STAGES": 4, "CHAIN_REGISTERS": 208, "PREPARE_REGISTERS": 72}

CHUNK = gl.constexpr(64)
HEAD_DIM = gl.constexpr(128)
ROWS = gl.constexpr(64)  # of M^T, a warpgroup's share
PART = gl.constexpr(64)  # columns of K and X that are prepared at a time, in few registers
FRESH = gl.constexpr(4)  # chunks between two adjustments of the range
LARGEST = gl.constexpr(4)  # log2 of a row's largest element then, at most: it can grow by 2^8 before its product with K
# of 128 channels overflows fp16, and shrink by 2^6 before its lower half loses bits
NO_MAP = gl.constexpr(-(2**31))  # the bits of -0.0, every element of a map that was not walked


@gluon.jit(do_not_specialize=["step"])
def transfer_kernel(
    k_tiles, A_tiles, G, M, broken, reach, lengths, segments, NC, step, TERMS: gl.constexpr, H: gl.constexpr,
    GROUP: gl.constexpr, L2NORM: gl.constexpr, STAGES: gl.constexpr, CHAIN_REGISTERS: gl.constexpr,
    PREPARE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles, reach, lengths, segments and step as `forward_kernel` has them; G [HV, NC, 64] fp32, or [T, HV, 64]; M
    [S, HV, K, K] fp32.

    TERMS: 2; or 1, the control by which tests show that it needs two.
    """
    let_next_begin()
    HV: gl.constexpr = H * GROUP
    segment = segments + (gl.program_id(0) // HV) * 5
    hv = gl.program_id(0) % HV
    begin = gl.load(segment)
    end = gl.load(segment + 1)
    chunk = gl.load(segment + 2)
    target = gl.load(segment + 4)
    n = (end - begin + CHUNK - 1) // CHUNK
    first = hv.to(gl.int64) * NC + chunk
    G_row = gl.where(step > 1, begin.to(gl.int64) * HV + hv, first)
    apart = gl.where(step > 1, step * HV * CHUNK, CHUNK)
    decay = summed_decay(G + G_row * CHUNK + CHUNK - 1, apart, broken + (hv // GROUP) * NC + chunk, n)
    n = uniform(gl.where(chunks_felt(reach + first, n) == n, n, 0))
    decay = uniform(decay.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)

    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, HEAD_DIM], k_tiles.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], A_tiles.layout)
    keys = gl.allocate_shared_memory(gl.float16, [2, CHUNK, HEAD_DIM], k_tiles.layout)
    xs = gl.allocate_shared_memory(gl.float16, [2, CHUNK, HEAD_DIM], k_tiles.layout)
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])  # a warp's 32 numbers in 32 banks
    ms = gl.allocate_shared_memory(gl.float32, [2, HEAD_DIM, ROWS], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(STAGES):
        mbarrier.init(full.index(j), count=1)
        mbarrier.init(empty.index(j), count=1)
    for j in gl.static_range(2):
        mbarrier.init(ready.index(j), count=1)
        mbarrier.init(free.index(j), count=2)

    of_keys: gl.constexpr = None
    if L2NORM:
        of_keys = lengths + ((hv // GROUP).to(gl.int64) * NC + chunk) * (2 * CHUNK) + CHUNK
    out = M + (target * HV + hv).to(gl.int64) * (HEAD_DIM * HEAD_DIM)
    gl.warp_specialize(
        [
            (walk, (out, ms.index(0), keys, xs, ready, free, n, decay, 0, TERMS)),
            (walk, (out, ms.index(1), keys, xs, ready, free, n, decay, ROWS, TERMS)),
            (prepare, (ks, ws, keys, xs, full, empty, ready, free, of_keys, end - begin, n, STAGES, L2NORM)),
            (load, (k_tiles, A_tiles, ks, ws, full, empty, begin, hv * NC + chunk, n, (hv // GROUP) * HEAD_DIM,
                    STAGES)),
        ],
        [4, 4, 1],
        [CHAIN_REGISTERS, PREPARE_REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def summed_decay(G, apart, broken, n):
    """log2 of the decay over n chunks; NaN if a key among them breaks the promise of unit keys."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 128, layout=FLAT)
    total = 0.0
    for base in range(0, n, 128):
        held = base + lane < n
        decay = gl.load(G + (base + lane).to(gl.int64) * apart, mask=held, other=0.0)
        whole = gl.load(broken + base + lane, mask=held, other=CHUNK) == CHUNK
        total = total + gl.sum(gl.where(whole, decay, float("nan")), 0)
    return total


@gluon.jit
def load(k_tiles, A_tiles, ks, ws, full, empty, begin, row, n, key_column, STAGES: gl.constexpr):
    stage = 0
    phase = 0
    for i in range(n):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), CHUNK * HEAD_DIM * 2 + CHUNK * CHUNK * 2)
        load_tile(k_tiles, [begin + i * CHUNK, key_column], full.index(stage), ks.index(stage))
        load_tile(A_tiles, [(row + i) * CHUNK, 0], full.index(stage), ws.index(stage))
        stage = stage + 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def prepare(
    ks, ws, keys, xs, full, empty, ready, free, of_keys, tokens, n, STAGES: gl.constexpr, L2NORM: gl.constexpr,
):  # fmt: skip
    """K and A^T K in fp16, of every chunk, two ahead at most."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, WIDE))
    stage = 0
    phase = 0
    for i in range(n):
        b = i & 1
        mbarrier.wait(free.index(b), ((i >> 1) & 1) ^ 1)
        if L2NORM:
            inverse = gl.load(of_keys + i * (2 * CHUNK) + row)
        mbarrier.wait(full.index(stage), phase)
        k = ks.index(stage)
        held = tokens - i * CHUNK
        if held < CHUNK:
            for first in gl.static_range(
                0, CHUNK, 8
            ):  # a row a thread: more would be counted before the loop, and kept
                clear_behind(k.slice(first, 8, 0), held - first)
            fence_async_shared()
            barrier()
        at = ws.index(stage).permute((1, 0))
        for first in gl.static_range(0, HEAD_DIM, PART):
            X = gl.zeros([CHUNK, PART], gl.float32, ACC)
            X = warpgroup_mma(at, k.slice(first, PART, 1), X, is_async=True)
            for part in gl.static_range(first, first + PART, PART // 2):
                unit = widened(k.slice(part, PART // 2, 1).load(WIDE))
                if L2NORM:
                    unit = unit * inverse[:, None]
                keys.index(b).slice(part, PART // 2, 1).store(in_fp16(unit))
            X = warpgroup_mma_wait(0, deps=[X, at, k])[0]
            xs.index(b).slice(first, PART, 1).store(X.to(gl.float16))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(b), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        stage = stage + 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def walk(out, m, keys, xs, ready, free, n, decay, FIRST: gl.constexpr, TERMS: gl.constexpr):
    """64 rows of M^T, from FIRST on. They go out by way of m, and are begun by a row that the compiler does not know:
    places and addresses that both have in common would be laid by all along the walk."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    STATE_LEFT: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STATE))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, STATE))
    T = gl.where(late(FIRST + row)[:, None] == column[None, :], 1.0, 0.0)
    scaled = gl.zeros([ROWS], gl.int32, gl.SliceLayout(1, STATE))  # log2 of what a row was multiplied by
    for begin in range(0, n, FRESH):
        up = LARGEST - exponent(gl.max(gl.abs(T), 1))
        T = T * exp2(up.to(gl.float32))[:, None]
        scaled = scaled + up
        for i in range(begin, gl.minimum(begin + FRESH, n)):
            b = i & 1
            k = keys.index(b).permute((1, 0))
            x = xs.index(b)
            high = T.to(gl.float16)
            t = gl.convert_layout(high, LEFT)
            if TERMS == 2:
                t_low = gl.convert_layout((T - high.to(gl.float32)).to(gl.float16), LEFT)
            mbarrier.wait(ready.index(b), (i >> 1) & 1)
            U = gl.zeros([ROWS, CHUNK], gl.float32, ACC)
            U = warpgroup_mma(t, k, U, is_async=True)
            U, t, k = warpgroup_mma_wait(0, deps=[U, t, k])
            high = in_fp16(U)
            r = gl.convert_layout(high, STATE_LEFT)
            if TERMS == 2:
                U = warpgroup_mma(t_low, k, U - high.to(gl.float32), is_async=True)
                U, t_low, k = warpgroup_mma_wait(0, deps=[U, t_low, k])
                r_low = gl.convert_layout(in_fp16(U), STATE_LEFT)
            R = gl.zeros([ROWS, HEAD_DIM], gl.float32, STATE)
            R = warpgroup_mma(r, x, R, is_async=True)
            R, r, x = warpgroup_mma_wait(0, deps=[R, r, x])
            T = T - R
            if TERMS == 2:
                R = gl.zeros([ROWS, HEAD_DIM], gl.float32, STATE)
                R = warpgroup_mma(r_low, x, R, is_async=True)
                R, r_low, x = warpgroup_mma_wait(0, deps=[R, r_low, x])
                T = T - R
            mbarrier.arrive(free.index(b), count=1)
    nothing = gl.full([ROWS], NO_MAP, gl.int32, gl.SliceLayout(1, STATE)).to(gl.float32, bitcast=True)
    zero = gl.where(n > 0, 0.0, nothing)
    T = rounded_sum(T * gl.where(n > 0, exp2(decay - scaled.to(gl.float32)), nothing)[:, None], zero[:, None])
    m.permute((1, 0)).store(T)
    barrier()
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    channel = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(1, WIDE))
    value = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(0, WIDE))
    gl.store(out + channel[:, None] * HEAD_DIM + value[None, :], m.load(WIDE))


@gluon.jit
def exponent(x):
    """floor(log2 x) of numbers >= 0, but at least -110, whose inverse is far from the largest number."""
    return gl.maximum((x.to(gl.int32, bitcast=True) >> 23) - 127, -110)


def transfer(k: Tensor, made: Prepared, segments: Tensor, *, terms: int = 2, tilings: Tilings | None = None) -> Tensor:
    """Launches the kernel; k [T, H, 128] bf16, raw if `made` is of such; segments as `forward_kernel` has them. M
    [S, HV, K, K] fp32."""
    (_, H, D), (HV, NC) = k.shape, made.reach.shape
    n = segments.shape[0]
    M = made.G.new_empty(n, HV, D, D)
    if n:
        shared = Tilings() if tilings is None else tilings
        launch(
            transfer_kernel, (n * HV,), shared.rows(k), shared.of(made.A, 64, 64, 64), made.G, M, made.broken,
            made.reach, made.lengths, segments, NC, made.step, TERMS=terms, H=H, GROUP=HV // H,
            L2NORM=made.lengths is not None, num_warps=4, **LAUNCH,
        )  # fmt: skip
    return M
