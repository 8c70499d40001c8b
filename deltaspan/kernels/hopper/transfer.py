"""A segment's map M, S_out = M S_in + b, for sm_90: one program a segment and value head.

M is the walk of `forward` without what is written, begun with the identity:

    M^T <- 2^(G_C) M^T - (a (M^T K^T)) X

A map goes to other ranks and is multiplied by others, so its chain keeps fp32: M^T and what it reads are split into two
fp16 numbers each, 22 bits (K and X are exact in fp16, or near enough: entries below 2^-14 lose bits that are 2^-24 of
a key). One fp16 or TF32 number alone, 11 bits, would not do over long chains of slow decay.

Where everything decays below the smallest fp32 number within the segment, M is zero and nothing is walked.
"""

import torch
from torch import Tensor

from deltaspan.kernels.hopper.forward import chunks_felt, clear_behind
from deltaspan.kernels.hopper.gluon import (
    COMPILED_WITH,
    barrier,
    exp2,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    row_tiles,
    tiles,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltaspan.kernels.hopper.prep import Prepared

# A walk holds M^T in 64 registers and both halves of it in 32 each. With 192 : 112 ptxas waits after every product.
LAUNCH = {"STAGES": 3, "CHAIN_REGISTERS": 200, "PREPARE_REGISTERS": 96}

CHUNK = gl.constexpr(64)
HEAD_DIM = gl.constexpr(128)
ROWS = gl.constexpr(64)  # of M^T, a warpgroup's share


@gluon.jit
def transfer_kernel(
    k_tiles, A_tiles, G_tiles, M, broken, reach, segments, NC, TERMS: gl.constexpr, H: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, CHAIN_REGISTERS: gl.constexpr, PREPARE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles, broken, reach and segments as `forward_kernel` has them; M [S, HV, K, K] fp32.

    TERMS: 2; or 1, the control by which tests show that it needs two.
    """
    HV: gl.constexpr = H * GROUP
    segment = segments + (gl.program_id(0) // HV) * 4
    hv = gl.program_id(0) % HV
    begin = gl.load(segment)
    end = gl.load(segment + 1)
    chunk = gl.load(segment + 2)
    target = gl.load(segment + 3)
    n = (end - begin + CHUNK - 1) // CHUNK
    felt = chunks_felt(reach + hv.to(gl.int64) * NC + chunk, n)
    passes = gl.where(felt == n, 1.0, 0.0)
    n = gl.where(felt == n, n, 0)

    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, HEAD_DIM], k_tiles.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], A_tiles.layout)
    gs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, CHUNK], G_tiles.layout)
    keys = gl.allocate_shared_memory(gl.float16, [2, CHUNK, HEAD_DIM], k_tiles.layout)
    xs = gl.allocate_shared_memory(gl.float16, [2, CHUNK, HEAD_DIM], k_tiles.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    writes = gl.allocate_shared_memory(gl.float32, [2, CHUNK], PLAIN)
    reads = gl.allocate_shared_memory(gl.float32, [2, CHUNK], PLAIN)
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

    h = hv // GROUP
    out = M + (target * HV + hv).to(gl.int64) * (HEAD_DIM * HEAD_DIM)
    gl.warp_specialize(
        [
            (walk, (out, keys, xs, writes, reads, ready, free, n, passes, 0, TERMS)),
            (walk, (out, keys, xs, writes, reads, ready, free, n, passes, ROWS, TERMS)),
            (prepare, (ks, ws, gs, keys, xs, writes, reads, full, empty, ready, free, broken + h * NC + chunk, begin,
                       end, n, STAGES)),
            (load, (k_tiles, A_tiles, G_tiles, ks, ws, gs, full, empty, begin, hv * NC + chunk, n, h * HEAD_DIM,
                    STAGES)),
        ],
        [4, 4, 1],
        [CHAIN_REGISTERS, PREPARE_REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def load(k_tiles, A_tiles, G_tiles, ks, ws, gs, full, empty, begin, row, n, key_column, STAGES: gl.constexpr):
    stage = 0
    phase = 0
    for i in range(n):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), CHUNK * HEAD_DIM * 2 + CHUNK * CHUNK * 2 + CHUNK * 4)
        load_tile(k_tiles, [begin + i * CHUNK, key_column], full.index(stage), ks.index(stage))
        load_tile(A_tiles, [(row + i) * CHUNK, 0], full.index(stage), ws.index(stage))
        load_tile(G_tiles, [row + i, 0], full.index(stage), gs.index(stage))
        stage = stage + 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def prepare(ks, ws, gs, keys, xs, writes, reads, full, empty, ready, free, broken, begin, end, n, STAGES: gl.constexpr):
    """K and X in fp16, and a, of every chunk, two ahead at most."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    token = gl.arange(0, CHUNK, layout=FLAT)
    stage = 0
    phase = 0
    for i in range(n):
        b = i & 1
        mbarrier.wait(free.index(b), ((i >> 1) & 1) ^ 1)
        first_broken = gl.load(broken + i)
        mbarrier.wait(full.index(stage), phase)
        k = ks.index(stage)
        G = gs.index(stage).reshape([CHUNK])
        held = end - begin - i * CHUNK
        if held < CHUNK:
            clear_behind(k, held)
            fence_async_shared()
            barrier()
        keys.index(b).store(k.load(WIDE).to(gl.float16))
        decay = exp2(G.load(FLAT))
        writes.index(b).store(decay)
        reads.index(b).store(gl.where(token >= first_broken, float("nan"), decay))
        at = ws.index(stage).permute((1, 0)).load(LEFT)
        G_row = G.load(gl.SliceLayout(1, ACC))
        to_end = exp2(G.slice(CHUNK - 1, 1, 0).load(gl.SliceLayout(1, ACC)) - G_row)
        for half in gl.static_range(2):
            X = gl.zeros([CHUNK, CHUNK], gl.float32, ACC)
            X = warpgroup_mma(at, k.slice(half * CHUNK, CHUNK, 1), X, is_async=True)
            X = warpgroup_mma_wait(0, deps=[X, at, k])[0]
            xs.index(b).slice(half * CHUNK, CHUNK, 1).store((X * to_end[:, None]).to(gl.float16))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(b), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        stage = stage + 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def walk(out, keys, xs, writes, reads, ready, free, n, passes, FIRST: gl.constexpr, TERMS: gl.constexpr):
    """64 rows of M^T, from FIRST on."""
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    STATE_LEFT: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, STATE))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, STATE))
    T = gl.where((FIRST + row)[:, None] == column[None, :], passes, 0.0)
    for i in range(n):
        b = i & 1
        k = keys.index(b)
        x = xs.index(b)
        high = T.to(gl.float16)
        t = gl.convert_layout(high, LEFT)
        if TERMS == 2:
            t_low = gl.convert_layout((T - high.to(gl.float32)).to(gl.float16), LEFT)
        mbarrier.wait(ready.index(b), (i >> 1) & 1)
        U = gl.zeros([ROWS, CHUNK], gl.float32, ACC)
        U = warpgroup_mma(t, k.permute((1, 0)), U, is_async=True)
        if TERMS == 2:
            U = warpgroup_mma(t_low, k.permute((1, 0)), U, is_async=True)
            U, t, t_low, k = warpgroup_mma_wait(0, deps=[U, t, t_low, k])
        else:
            U, t, k = warpgroup_mma_wait(0, deps=[U, t, k])
        written = writes.index(b).load(gl.SliceLayout(0, ACC))
        gamma = reads.index(b).slice(CHUNK - 1, 1, 0).load(gl.SliceLayout(0, STATE))
        R = -written[None, :] * U
        high = R.to(gl.float16)
        r = gl.convert_layout(high, STATE_LEFT)
        T = T * gamma[None, :]
        T = warpgroup_mma(r, x, T, is_async=True)
        if TERMS == 2:
            r_low = gl.convert_layout((R - high.to(gl.float32)).to(gl.float16), STATE_LEFT)
            T = warpgroup_mma(r_low, x, T, is_async=True)
            T, r, r_low, x = warpgroup_mma_wait(0, deps=[T, r, r_low, x])
        else:
            T, r, x = warpgroup_mma_wait(0, deps=[T, r, x])
        mbarrier.arrive(free.index(b), count=1)
    gl.store(out + column[None, :] * HEAD_DIM + (FIRST + row)[:, None], T)


def transfer(k: Tensor, made: Prepared, segments: Tensor, *, terms: int = 2) -> Tensor:
    """Launches the kernel; k [T, H, 128] bf16; segments as `forward_kernel` has them. M [S, HV, K, K] fp32."""
    (_, H, D), (HV, NC) = k.shape, made.reach.shape
    M = torch.empty(len(segments), HV, D, D, dtype=torch.float32, device=k.device)
    if len(segments):
        rows = row_tiles(k), tiles(made.A.view(-1, 64), 64, 64), tiles(made.G.view(-1, 64), 1, 64)
        transfer_kernel[(len(segments) * HV,)](
            *rows, M, made.broken, made.reach, segments, NC, TERMS=terms,
            H=H, GROUP=HV // H, num_warps=4, **LAUNCH, **COMPILED_WITH,
        )  # fmt: skip
    return M
