"""The walk over states and the output, fused, for sm_90: one program a segment and value head.

With C = 64 tokens a chunk, in the transposed form that the tensor cores want (S^T [V, K] stays in registers, and is the
left operand of every product of the chain), A and G of the prep stage, a = 2^G, E_ij = 2^(G_i - G_j) for i >= j:

    X = diag(2^(G_C - G)) A^T K            W = scale E o (tril(Q K^T) A)
    R^T = V^T - a (S^T K^T)                what each token writes, before A mixes them
    O^T = scale a (S^T Q^T) + R^T W^T      S^T <- 2^(G_C) S^T + R^T X

Raw q and k stay as they are. With s and r their inverse lengths, as prep leaves them, and A as it leaves it then, rows
times r, the products (Q K^T) A and A^T K are those with ready keys. All else comes in by factors of a token:

    R^T = V^T - r a (S^T K^T)              W = scale s E o (tril(Q K^T) A)      O^T = scale s a (S^T Q^T) + R^T W^T

Four partitions: two warpgroups walk, one on each half of V; one prepares X, W and a for the next chunk, off the chain;
one warp loads. Of walks that would leave multiprocessors idle at the end each half of V is a program of its own, and X
and W are made for both: the same products, so the same bits. Rows of k and v behind a fragment's end, which the loads
take from the next document, are set to zero in shared memory before anything is computed from them; what q's rows there
give is not stored.

Without output the same walk gives a segment's exit state alone, for its summary. It may then begin late: what decays
below the smallest fp32 number until the end of the segment cannot be felt there. With STATES in place of the output it
writes the state at the start of every chunk, for the gradients.

A key that breaks the promise of unit keys turns the outputs from its row on, and the state that leaves its chunk, into
NaN: by the factor a of what is read from the state, and of the state itself, not by what meets the rows before in
products.
"""

import math
from functools import lru_cache

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
    store_tile,
    store_wait,
    tiles,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltaspan.kernels.hopper.instructions import exp2, late, mask, masked, masked_or, wait_for_previous, widened
from deltaspan.kernels.hopper.prep import Prepared

# Three stages fill the shared memory. A walk holds S in 64 registers, U, Q and O in 32 each, and operands; with fewer
# than 136 `prepare` spills addresses under Triton 3.9.
LAUNCH = {"STAGES": 3, "CHAIN_REGISTERS": 176, "PREPARE_REGISTERS": 136}

CHUNK = gl.constexpr(64)
HEAD_DIM = gl.constexpr(128)
HALF = gl.constexpr(64)  # of V, a warpgroup's share
NOTHING = gl.constexpr(-155.0)  # 2^-149 is the smallest fp32 number, a state of 32 then too


@gluon.jit(do_not_specialize=["given", "whole", "step"])  # nothing but bounds: it would only be compiled again
def forward_kernel(
    q_tiles, k_tiles, v_tiles, A_tiles, G_tiles, o_tiles, state_tiles, o, entry, nothing, exit, broken, reach, lengths,
    segments, given, whole, NC, step, scale, scale_log2, H: gl.constexpr, GROUP: gl.constexpr, APART: gl.constexpr,
    L2NORM: gl.constexpr, OUTPUT: gl.constexpr, STATES: gl.constexpr, EXIT: gl.constexpr,
    STAGES: gl.constexpr, CHAIN_REGISTERS: gl.constexpr, PREPARE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles (descriptors): q, k [T, H * 128] by [64, 128]; v, o [T, HV * 128] by [64, 64]; A [HV * NC * 64, 64] by
    [64, 64]; G [HV * NC, 64] by [1, 64] fp32, or, with a step of 64, [T, HV * 64], of which a chunk's first row has its
    own; states [NC * HV * 128, 128] by [64, 128], the rows V and the columns K,
    touched with STATES only.

    o [T, HV, 128] bf16; entry [given, HV, K, V] fp32, of which APART heads lie from one row to the next; nothing
    [K, V] fp32, zero; exit [n, HV, K, V] fp32; broken [H, NC] int32; reach [HV, NC] fp32; segments [n, 5] int32: first
    token, end, first chunk, row of entry, from `given` on nothing, and, with EXIT, of exit. Programs: segments, then
    heads, the first `whole` of them, and then two for each of the others. Without OUTPUT neither q nor o is touched,
    and lengths [H, NC, 2, 64] fp32 only with L2NORM.
    """
    HV: gl.constexpr = H * GROUP
    item, first, alone = walked_by_program(whole)
    segment = segments + (item // HV) * 5
    hv = item % HV
    begin = gl.load(segment)
    end = gl.load(segment + 1)
    chunk = gl.load(segment + 2)
    source = gl.load(segment + 3)
    target = gl.load(segment + 4)
    n = (end - begin + CHUNK - 1) // CHUNK
    if not OUTPUT and not STATES:
        skipped = n - chunks_felt(reach + hv.to(gl.int64) * NC + chunk, n)
        source = gl.where(skipped > 0, given, source)
        begin = begin + skipped * CHUNK
        chunk = chunk + skipped
        n = n - skipped

    qs = gl.allocate_shared_memory(gl.bfloat16, [STAGES if OUTPUT else 1, CHUNK, HEAD_DIM], q_tiles.layout)
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, HEAD_DIM], k_tiles.layout)
    vs = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, CHUNK, HALF], v_tiles.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], A_tiles.layout)  # A, and W in its place
    gs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, CHUNK], G_tiles.layout)
    xs = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, HEAD_DIM], k_tiles.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    writes = gl.allocate_shared_memory(gl.float32, [2, CHUNK], PLAIN)  # a, for what is written
    reads = gl.allocate_shared_memory(gl.float32, [2, CHUNK], PLAIN)  # a, for what is read
    keeps = reads  # a, whose last is for the state
    if L2NORM:
        keeps = gl.allocate_shared_memory(gl.float32, [2, CHUNK], PLAIN)
    if STATES:
        outs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, HEAD_DIM], state_tiles.layout)
    else:
        outs = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, HALF], o_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(STAGES):
        mbarrier.init(full.index(j), count=1)
        init_for_walks(empty.index(j), alone)
    for j in gl.static_range(2):
        mbarrier.init(ready.index(j), count=1)
        init_for_walks(free.index(j), alone)

    h = hv // GROUP
    state = nothing
    if source < given:
        state = entry + (source * APART + hv).to(gl.int64) * (HEAD_DIM * HEAD_DIM)
    inverse: gl.constexpr = None
    if L2NORM:
        inverse = lengths + (h.to(gl.int64) * NC + chunk) * (2 * CHUNK)
    walking = (
        state_tiles if STATES else o_tiles, o, state, exit, qs, ks, vs, ws, xs, writes, reads, keeps, outs, full, empty,
        ready, free, begin, end, chunk * HV + hv, n, target, hv, scale, first,
    )  # fmt: skip
    preparing = (
        qs, ks, vs, ws, gs, xs, writes, reads, keeps, full, ready, free, broken + h * NC + chunk, begin, end, n,
        scale_log2,
    )  # fmt: skip
    loading = (
        q_tiles, k_tiles, v_tiles, A_tiles, G_tiles, qs, ks, vs, ws, gs, full, empty, begin, hv * NC + chunk, step, n,
        h * HEAD_DIM, hv * HEAD_DIM + first, alone,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (walk_first, (alone, walking, HV, STAGES, OUTPUT, STATES, EXIT)),
            (walk_beside, (alone, walking, HV, STAGES, OUTPUT, STATES, EXIT)),
            (prepare, (preparing, inverse, STAGES, L2NORM, OUTPUT)),
            (load, (loading, STAGES, OUTPUT)),
        ],
        [4, 4, 1],
        [CHAIN_REGISTERS, PREPARE_REGISTERS, 24],
    )
    if not OUTPUT:
        wait_for_previous()


@gluon.jit
def walked_by_program(whole):
    """Of the walks of segments and heads the one that is this program's, its first channel of V, and whether it walks
    no further than half of them: the first `whole` are a program each, and all others two."""
    program = gl.program_id(0)
    behind = gl.maximum(program - whole, 0)
    return gl.minimum(program, whole) + behind // 2, behind % 2 * HALF, program >= whole


@gluon.jit
def init_for_walks(barrier, alone):
    """For an arrival of each walk."""
    if alone:
        mbarrier.init(barrier, count=1)
    else:
        mbarrier.init(barrier, count=2)


@gluon.jit
def load(given, STAGES: gl.constexpr, OUTPUT: gl.constexpr):
    (
        q_tiles, k_tiles, v_tiles, A_tiles, G_tiles, qs, ks, vs, ws, gs, full, empty, begin, row, step, n, key_column,
        value_column, alone,
    ) = given  # fmt: skip
    G_row = gl.where(step > 1, begin, row)
    G_column = gl.where(step > 1, value_column // HEAD_DIM * CHUNK, 0)
    BYTES: gl.constexpr = (2 if OUTPUT else 1) * CHUNK * HEAD_DIM * 2 + CHUNK * CHUNK * 2 + CHUNK * 4
    VALUES: gl.constexpr = CHUNK * HALF * 2
    stage = 0
    phase = 0
    for i in range(n):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        token = begin + i * CHUNK
        if alone:
            mbarrier.expect(full.index(stage), BYTES + VALUES)
        else:
            mbarrier.expect(full.index(stage), BYTES + 2 * VALUES)
            load_tile(v_tiles, [token, value_column + HALF], full.index(stage), vs.index(2 * stage + 1))
        load_tile(k_tiles, [token, key_column], full.index(stage), ks.index(stage))
        if OUTPUT:
            load_tile(q_tiles, [token, key_column], full.index(stage), qs.index(stage))
        load_tile(A_tiles, [(row + i) * CHUNK, 0], full.index(stage), ws.index(stage))
        load_tile(G_tiles, [G_row + i * step, G_column], full.index(stage), gs.index(stage))
        load_tile(v_tiles, [token, value_column], full.index(stage), vs.index(2 * stage))
        stage = stage + 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def prepare(given, inverse, STAGES: gl.constexpr, L2NORM: gl.constexpr, OUTPUT: gl.constexpr):
    """X, W and a of every chunk, two ahead at most."""
    qs, ks, vs, ws, gs, xs, writes, reads, keeps, full, ready, free, broken, begin, end, n, scale_log2 = given
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, ACC))
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ACC))
    low = mask(row[:, None] >= column[None, :])
    token = gl.arange(0, CHUNK, layout=FLAT)
    stage = 0
    phase = 0
    for i in range(n):
        b = i & 1
        mbarrier.wait(free.index(b), ((i >> 1) & 1) ^ 1)
        first_broken = gl.load(broken + i)
        mbarrier.wait(full.index(stage), phase)
        q = qs.index(stage if OUTPUT else 0)
        k = ks.index(stage)
        a = ws.index(stage)
        G = gs.index(stage).reshape([CHUNK])
        held = end - begin - i * CHUNK
        if held < CHUNK:
            clear_behind(k, held)
            for half in range(2):
                clear_behind(vs.index(2 * stage + half), held)
            fence_async_shared()
            barrier()
        if OUTPUT:
            P = gl.zeros([CHUNK, CHUNK], gl.float32, ACC)
            P = warpgroup_mma(q, k.permute((1, 0)), P, is_async=True)
        at = a.permute((1, 0))
        if OUTPUT:  # which takes A's place
            at = at.load(LEFT)
        G_row = G.load(gl.SliceLayout(1, ACC))
        to_end = exp2(G.slice(CHUNK - 1, 1, 0).load(gl.SliceLayout(1, ACC)) - G_row)
        if OUTPUT:
            P = warpgroup_mma_wait(0, deps=[P, q, k])[0]
            p = gl.convert_layout(masked(P.to(gl.bfloat16), low), LEFT)
            W = gl.zeros([CHUNK, CHUNK], gl.float32, ACC)
            W = warpgroup_mma(p, a, W, is_async=True)
            G_column = G.load(gl.SliceLayout(0, ACC))
            E = exp2((G_row + scale_log2)[:, None] - G_column[None, :])
            if L2NORM:
                E = E * gl.load(inverse + i * (2 * CHUNK) + row)[:, None]
            W = warpgroup_mma_wait(0, deps=[W, p, a])[0]
            w = masked((W * E).to(gl.bfloat16), low)  # above the diagonal E may be infinite
            barrier()  # every warp has read A
            a.store(w)
        # X by halves of K; without output there are registers for both, and one wait in line behind the walks is saved
        X = warpgroup_mma(at, k.slice(0, HALF, 1), gl.zeros([CHUNK, HALF], gl.float32, ACC), is_async=True)
        if not OUTPUT:
            Y = warpgroup_mma(at, k.slice(HALF, HALF, 1), gl.zeros([CHUNK, HALF], gl.float32, ACC), is_async=True)
        written = exp2(G.load(FLAT))
        kept = gl.where(token >= first_broken, float("nan"), written)
        keeps.index(b).store(kept)
        if L2NORM:
            written = written * gl.load(inverse + i * (2 * CHUNK) + CHUNK + token)
            if OUTPUT:
                reads.index(b).store(kept * gl.load(inverse + i * (2 * CHUNK) + token))
        writes.index(b).store(-written)  # its sign costs nothing, that of what it multiplies 32 instructions a chunk
        X = warpgroup_mma_wait(0 if OUTPUT else 1, deps=[X])
        xs.index(b).slice(0, HALF, 1).store((X * to_end[:, None]).to(gl.bfloat16))
        if OUTPUT:
            Y = warpgroup_mma(at, k.slice(HALF, HALF, 1), gl.zeros([CHUNK, HALF], gl.float32, ACC), is_async=True)
        Y = warpgroup_mma_wait(0, deps=[Y, at, k])[0]
        xs.index(b).slice(HALF, HALF, 1).store((Y * to_end[:, None]).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(b), count=1)
        stage = stage + 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
    fence_async_shared()  # no load is under way when a partition ends


@gluon.jit
def clear_behind(tile, held, to: gl.constexpr = 0.0):
    """Sets the rows of a tile, 64 or fewer, from `held` on to zero, or to what is given, whatever stands there."""
    WIDTH: gl.constexpr = tile.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    kept = late(gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, WIDE))) < held
    filling = gl.where(kept, 0.0, to).to(gl.bfloat16)
    tile.store(masked_or(tile.load(WIDE), mask(kept)[:, None], filling[:, None]))


@gluon.jit
def walk_first(
    alone, given, HV: gl.constexpr, STAGES: gl.constexpr, OUTPUT: gl.constexpr, STATES: gl.constexpr,
    EXIT: gl.constexpr,
):  # fmt: skip
    """The first walk of a program. Two with output walk 4 to 6 % faster if S decays early, one alone 4 % slower."""
    if OUTPUT:
        if alone:
            walk(given, HV, 0, STAGES, OUTPUT, STATES, EXIT, False)
        else:
            walk(given, HV, 0, STAGES, OUTPUT, STATES, EXIT, True)
    else:
        walk(given, HV, 0, STAGES, OUTPUT, STATES, EXIT, False)


@gluon.jit
def walk_beside(
    alone, given, HV: gl.constexpr, STAGES: gl.constexpr, OUTPUT: gl.constexpr, STATES: gl.constexpr,
    EXIT: gl.constexpr,
):  # fmt: skip
    """The second walk of a program that is not for half of V."""
    if alone:
        fence_async_shared()  # as at the end of the others
    else:
        walk(given, HV, HALF, STAGES, OUTPUT, STATES, EXIT, OUTPUT)


@gluon.jit
def walk(
    given, HV: gl.constexpr, HELD: gl.constexpr, STAGES: gl.constexpr, OUTPUT: gl.constexpr, STATES: gl.constexpr,
    EXIT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The chain over 64 of the channels of V, from HELD on of those in shared memory, which begin with `first`.
    EARLY: S decays while its product with K runs, not behind it."""
    (
        out_tiles, o, state, exit, qs, ks, vs, ws, xs, writes, reads, keeps, outs, full, empty, ready, free, begin, end,
        row, n, target, hv, scale, first,
    ) = given  # fmt: skip
    first = first + HELD
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    STATE_LEFT: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    value = gl.arange(0, HALF, layout=gl.SliceLayout(1, STATE))
    key = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, STATE))
    size = HEAD_DIM * HEAD_DIM
    S = gl.load(state + key[None, :] * HEAD_DIM + (first + value)[:, None])
    stage = 0
    phase = 0
    for i in range(n):
        b = i & 1
        k = ks.index(stage)
        q = qs.index(stage if OUTPUT else 0)
        x = xs.index(b)
        w = ws.index(stage)
        narrow = S.to(gl.bfloat16)
        s = gl.convert_layout(narrow, LEFT)
        mbarrier.wait(full.index(stage), phase)
        mbarrier.wait(ready.index(b), (i >> 1) & 1)
        U = gl.zeros([HALF, CHUNK], gl.float32, ACC)
        U = warpgroup_mma(s, k.permute((1, 0)), U, is_async=True)
        if STATES:  # while the product runs; the copy engine counts rows, which int32 holds
            out = outs.index(HELD // HALF)
            store_wait(0)
            barrier()
            out.store(narrow)
            fence_async_shared()
            barrier()
            store_tile(out_tiles, [(row + i * HV) * HEAD_DIM + first, 0], out)
        if EARLY:
            S = S * decay_of(keeps.index(b), STATE)
        U = warpgroup_mma_wait(0, deps=[U, s, k])[0]
        v = vs.index(2 * stage + HELD // HALF).permute((1, 0)).load(ACC)
        written = writes.index(b).load(gl.SliceLayout(0, ACC))
        if OUTPUT:
            read = reads.index(b).load(gl.SliceLayout(0, ACC))
        R = (widened(v) + written[None, :] * U).to(gl.bfloat16)
        if not EARLY:
            S = S * decay_of(keeps.index(b), STATE)
        r = gl.convert_layout(R, STATE_LEFT)
        if OUTPUT:
            Q = gl.zeros([HALF, CHUNK], gl.float32, ACC)
            Q = warpgroup_mma(s, q.permute((1, 0)), Q, is_async=True)
            S = warpgroup_mma(r, x, S, is_async=True)
            Q = warpgroup_mma_wait(1, deps=[Q])
            O = Q * (read * scale)[None, :]
            r2 = gl.convert_layout(R, LEFT)
            O = warpgroup_mma(r2, w.permute((1, 0)), O, is_async=True)
            S, O, s, r, r2, x, w, q = warpgroup_mma_wait(0, deps=[S, O, s, r, r2, x, w, q])
            token = begin + i * CHUNK
            store_output(
                out_tiles, o, outs.index(HELD // HALF), O.to(gl.bfloat16), token, end, hv * HEAD_DIM + first, HV
            )
        else:
            S = warpgroup_mma(r, x, S, is_async=True)
            S = warpgroup_mma_wait(0, deps=[S, r, x])[0]
        mbarrier.arrive(free.index(b), count=1)
        mbarrier.arrive(empty.index(stage), count=1)
        stage = stage + 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
    if EXIT:
        channel = first + late(value)
        gl.store(exit + (target * HV + hv).to(gl.int64) * size + key[None, :] * HEAD_DIM + channel[:, None], S)
    store_wait(0)


@gluon.jit
def decay_of(keeps, LAYOUT: gl.constexpr):
    """2^(G_C), the last of a chunk's a, for rows of S^T."""
    return keeps.slice(CHUNK - 1, 1, 0).load(gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def store_output(o_tiles, o, os, out, token, end, column, HV):
    """64 tokens of O^T [64 of V, tokens] by way of shared memory; only those before `end`."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    store_wait(0)
    barrier()
    os.permute((1, 0)).store(out)
    fence_async_shared()
    barrier()
    if token + CHUNK <= end:
        store_tile(o_tiles, [token, column], os)
    else:  # a tile would overwrite the next document
        row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, WIDE))
        channel = gl.arange(0, HALF, layout=gl.SliceLayout(0, WIDE))
        at = (token + row).to(gl.int64)[:, None] * (HV * HEAD_DIM) + column + channel[None, :]
        gl.store(o + at, os.load(WIDE), mask=((token + row) < end)[:, None])


@gluon.jit
def chunks_felt(reach, n, FROM_START: gl.constexpr = False):
    """How many chunks from a run's end back are felt there: beyond them everything has decayed to nothing. Or how many
    from its start on, for what is walked backwards."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 128, layout=FLAT)
    felt = n
    total = 0.0
    for base in range(0, n, 128):
        back = base + lane
        decay = gl.load(reach + (back if FROM_START else n - 1 - back), mask=back < n, other=0.0)
        summed = total + gl.associative_scan(decay, 0, add)
        felt = gl.minimum(felt, gl.min(gl.where(summed < NOTHING, back + 1, n), 0))
        total = total + gl.sum(decay, 0)
    return gl.where(total == total, felt, n)  # a NaN is felt everywhere


def forward(
    q: Tensor, k: Tensor, v: Tensor, made: Prepared, entry: Tensor, segments: Tensor, scale: float,
    *, output: bool = True, states: bool = False, exits: bool = True, whole: int | None = None,
    tilings: Tilings | None = None, found: tuple[Tensor | None, Tensor | None] = (None, None), beside: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Launches the kernel; q, k [T, H, 128], v [T, HV, 128] bf16, rows of any pitch; entry [E, HV, K, V] fp32,
    or those heads of more; segments as the kernel has them; raw q and k if `made` is of such. whole: how many walks of
    a head along a segment, in their order, are a program each, None for all; of the others each is two. Returns o like
    v, dense, the exit states [n, HV, K, V], and, in place of o, the state at the start of every chunk [NC, HV, V, K]
    bf16, transposed; None of what is not asked for.

    For exit states alone the walk begins where they begin to feel it. tilings: of what launches before this one read.
    found: o and exit states that this launch adds to. beside: as `launch` has it, without output.
    """
    assert not (output and states), "both do not fit into shared memory"
    assert not (output and beside), "it would not wait for the launch before it"
    A, G, broken, reach, lengths, room = made
    n, H, (HV, NC) = segments.shape[0], k.shape[1], reach.shape
    whole = n * HV if whole is None else whole
    assert room is None or not output or whole == n * HV, "one half would overwrite what the other reads"
    o, exit = found
    if o is None:
        o = (v.new_empty(v.shape) if room is None else room) if output else v
    if exit is None:
        exit = entry.new_empty(n, *entry.shape[1:]) if exits else entry
    written = v.new_empty(NC, HV, 128, 128) if states else None
    if n:
        shared = Tilings() if tilings is None else tilings
        A_tiles = shared.of(A, 64, 64, 64)
        launch(
            forward_kernel, (2 * n * HV - whole,), shared.rows(q), shared.rows(k), shared.rows(v, 64), A_tiles,
            shared.of(G, 64 if room is None else HV * 64, 1, 64), tiles(o, HV * 128, 64, 64) if output else A_tiles,
            tiles(written, 128, 64, 128) if states else A_tiles, o, entry, no_state(entry.device), exit, broken, reach,
            lengths, segments, entry.shape[0], whole, NC, made.step, scale, math.log2(scale), H=H, GROUP=HV // H,
            APART=heads_apart(entry), L2NORM=lengths is not None, OUTPUT=output, STATES=states, EXIT=exits, num_warps=4,
            beside=beside, **LAUNCH,
        )  # fmt: skip
    return (o if output else None), (exit if exits else None), written


@lru_cache
def no_state(device: torch.device) -> Tensor:
    """What every head of a run without a given state starts from."""
    return torch.zeros(128, 128, dtype=torch.float32, device=device)


def heads_apart(states: Tensor) -> int:
    """How many heads lie from one row to the next in states [E, HV, 128, 128], dense but for that."""
    pitch, *inner = states.stride()
    assert inner == [128 * 128, 128, 1]
    return pitch // (128 * 128)
