"""The walk over the state's adjoint, backwards, for sm_90: one program a segment and value head.

With A and G of the prep stage, a = 2^G, D [K, V] the adjoint of the state at a chunk's end, and P = tril(Q K^T):

    Y = A K        Q' = scale a (Q - P Y)        D <- 2^(G_C) (D - Y^T (K D)) + Q'^T dO

It is the torch tier's walk with w = a Y and all decay taken together: E_ij a_j = a_i makes (E o P) w = a (P Y), and
what a token feels of D times what it hands on, 2^(G_C - G_i) a_i, is 2^(G_C) whatever the token. So nothing but a and
2^(G_C) is ever exponentiated. D^T [V, K] stays in registers, as S^T does in the forward:

    U^T = D^T K^T        D^T <- 2^(G_C) D^T + dO^T Q' - (2^(G_C) U^T) Y

Of its products the first and the last are the chain, the second fills the time between them. Partitions are the
forward's: two warpgroups walk, one on each half of V; one prepares Y and Q' for the next chunk; one warp loads. And as
there, two programs walk half of V each where one would leave multiprocessors idle, with the same bits. Rows of q, k and
do behind a fragment's end are set to zero in shared memory before anything is computed from them.

With STATES the walk also writes D at the end of every chunk, for the gradients. Without, only the adjoint of the entry
state is wanted, which feels the first chunks of a segment: the walk begins at the last of those, with the adjoint of
the exit state all the same, of which nothing is left at the entry.

A key that breaks the promise of unit keys turns the adjoint that leaves its chunk into NaN, all of it, by way of G.
"""

import math

from torch import Tensor

from deltaspan.kernels.hopper.forward import (
    chunks_felt,
    clear_behind,
    heads_apart,
    init_for_walks,
    no_state,
    walked_by_program,
)
from deltaspan.kernels.hopper.gluon import (
    Tilings,
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
from deltaspan.kernels.hopper.instructions import exp2, late, let_next_begin, mask, masked_negative, widened
from deltaspan.kernels.hopper.prep import Prepared

# Three stages, two of dO and both halves of D on their way out fill the shared memory. A walk holds D in 64 registers,
# its narrow copy in 32, U in 32 and operands; `prepare` holds Y or Q' in 64, P in 32, and spills under Triton 3.9 with
# fewer than 152.
LAUNCH = {"CHAIN_REGISTERS": 168, "PREPARE_REGISTERS": 152}

CHUNK = gl.constexpr(64)
HEAD_DIM = gl.constexpr(128)
HALF = gl.constexpr(64)  # of V, a warpgroup's share
STAGES = gl.constexpr(3)  # of q, k, A and G: one more than of dO, so that room for dO says that there is room for them


@gluon.jit(do_not_specialize=["given", "whole"])
def adjoint_kernel(
    q_tiles, k_tiles, do_tiles, A_tiles, G_tiles, state_tiles, leaving, nothing, entering, broken, reach,
    segments, given, whole, NC, scale_log2, H: gl.constexpr, GROUP: gl.constexpr, APART: gl.constexpr,
    STATES: gl.constexpr, CHAIN_REGISTERS: gl.constexpr, PREPARE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles (descriptors): q, k [T, H * 128] by [64, 128]; do [T, HV * 128] by [64, 64]; A [HV * NC * 64, 64] by
    [64, 64]; G [HV * NC, 64] by [1, 64] fp32; states [NC * HV * 128, 128] by [64, 128], the rows V and the columns K,
    touched with STATES only.

    leaving [given, HV, K, V] fp32, the adjoint of exit states; nothing [K, V] fp32, zero; entering [n, HV, K, V] fp32,
    that of entry states; of both APART heads lie from one row to the next; broken [H, NC] int32; reach [HV, NC] fp32;
    segments [n, 5] int32: first token, end, first chunk, row of leaving, from `given` on nothing, and of entering.
    Programs: as for the forward.
    """
    let_next_begin()
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
    if not STATES:
        n = chunks_felt(reach + hv.to(gl.int64) * NC + chunk, n, FROM_START=True)

    qs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, HEAD_DIM], q_tiles.layout)  # Q, and Q' in its place
    ks = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, HEAD_DIM], k_tiles.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, CHUNK], A_tiles.layout)
    gs = gl.allocate_shared_memory(gl.float32, [STAGES, 1, CHUNK], G_tiles.layout)
    dos = gl.allocate_shared_memory(gl.bfloat16, [2 * 2, CHUNK, HALF], do_tiles.layout)
    ys = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, HEAD_DIM], k_tiles.layout)
    outs = gl.allocate_shared_memory(gl.bfloat16, [2 if STATES else 1, HALF, HEAD_DIM], state_tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(STAGES):
        mbarrier.init(full.index(j), count=1)
    for j in gl.static_range(2):
        mbarrier.init(do_full.index(j), count=1)
        mbarrier.init(ready.index(j), count=1)
        init_for_walks(free.index(j), alone)

    h = hv // GROUP
    state = nothing
    if source < given:
        state = leaving + (source * APART + hv).to(gl.int64) * (HEAD_DIM * HEAD_DIM)
    walking = (
        state_tiles, state, entering, qs, ks, gs, dos, ys, outs, full, do_full, ready, free, chunk * HV + hv, n,
        target * APART + hv, first,
    )  # fmt: skip
    preparing = (
        qs, ks, ws, gs, dos, ys, full, do_full, ready, free, broken + h * NC + chunk, end - begin, n, scale_log2,
    )  # fmt: skip
    loading = (
        q_tiles, k_tiles, do_tiles, A_tiles, G_tiles, qs, ks, ws, gs, dos, full, do_full, free, begin, hv * NC + chunk,
        n, h * HEAD_DIM, hv * HEAD_DIM + first, alone,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (walk, (walking, HV, 0, STATES)),
            (walk_beside, (alone, walking, HV, STATES)),
            (prepare, preparing),
            (load, loading),
        ],
        [4, 4, 1],
        [CHAIN_REGISTERS, PREPARE_REGISTERS, 24],
    )


@gluon.jit
def load(
    q_tiles, k_tiles, do_tiles, A_tiles, G_tiles, qs, ks, ws, gs, dos, full, do_full, free, begin, row, n, key_column,
    value_column, alone,
):  # fmt: skip
    """Tiles of every chunk, from the last on; those of dO, which only the walk reads, two ahead at most."""
    BYTES: gl.constexpr = 2 * CHUNK * HEAD_DIM * 2 + CHUNK * CHUNK * 2 + CHUNK * 4
    VALUES: gl.constexpr = CHUNK * HALF * 2
    stage = 0
    for i in range(n):
        b = i & 1
        c = n - 1 - i
        token = begin + c * CHUNK
        mbarrier.expect(full.index(stage), BYTES)
        load_tile(k_tiles, [token, key_column], full.index(stage), ks.index(stage))
        load_tile(q_tiles, [token, key_column], full.index(stage), qs.index(stage))
        load_tile(A_tiles, [(row + c) * CHUNK, 0], full.index(stage), ws.index(stage))
        load_tile(G_tiles, [row + c, 0], full.index(stage), gs.index(stage))
        mbarrier.wait(free.index(b), ((i >> 1) & 1) ^ 1)
        if alone:
            mbarrier.expect(do_full.index(b), VALUES)
        else:
            mbarrier.expect(do_full.index(b), 2 * VALUES)
            load_tile(do_tiles, [token, value_column + HALF], do_full.index(b), dos.index(2 * b + 1))
        load_tile(do_tiles, [token, value_column], do_full.index(b), dos.index(2 * b))
        stage = stage + 1
        stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def prepare(qs, ks, ws, gs, dos, ys, full, do_full, ready, free, broken, tokens, n, scale_log2):
    """Y and Q' of every chunk, two ahead at most."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, ACC))
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ACC))
    low = mask(row[:, None] >= column[None, :])
    stage = 0
    phase = 0
    for i in range(n):
        b = i & 1
        c = n - 1 - i
        mbarrier.wait(free.index(b), ((i >> 1) & 1) ^ 1)
        first_broken = gl.load(broken + c)
        mbarrier.wait(full.index(stage), phase)
        q = qs.index(stage)
        k = ks.index(stage)
        a = ws.index(stage)
        y = ys.index(b)
        G = gs.index(stage).reshape([CHUNK])
        held = tokens - c * CHUNK
        if held < CHUNK:
            mbarrier.wait(do_full.index(b), (i >> 1) & 1)
            clear_behind(q, held)
            clear_behind(k, held)
            for half in range(2):
                clear_behind(dos.index(2 * b + half), held)
            fence_async_shared()
            barrier()
        if first_broken < CHUNK:  # a and gamma come from here
            G.store(gl.full([CHUNK], float("nan"), gl.float32, FLAT))
            barrier()
        P = gl.zeros([CHUNK, CHUNK], gl.float32, ACC)
        P = warpgroup_mma(q, k.permute((1, 0)), P, is_async=True)
        Y = gl.zeros([CHUNK, HEAD_DIM], gl.float32, WIDE)
        Y = warpgroup_mma(a, k, Y, is_async=True)
        P = warpgroup_mma_wait(1, deps=[P])
        p = gl.convert_layout(masked_negative(P.to(gl.bfloat16), low), LEFT)
        Y = warpgroup_mma_wait(0, deps=[Y, q, a, k])[0]
        y.store(Y.to(gl.bfloat16))
        fence_async_shared()
        barrier()
        decay = exp2(G.load(gl.SliceLayout(1, WIDE)) + scale_log2)
        Q = warpgroup_mma(p, y, widened(q.load(WIDE)), is_async=True)
        Q = warpgroup_mma_wait(0, deps=[Q, p, y])[0]
        q.store((Q * decay[:, None]).to(gl.bfloat16))
        fence_async_shared()
        barrier()
        mbarrier.arrive(ready.index(b), count=1)
        stage = stage + 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
    fence_async_shared()  # no load is under way when a partition ends


@gluon.jit
def walk_beside(alone, given, HV: gl.constexpr, STATES: gl.constexpr):
    """The second walk of a program that is not for half of V."""
    if alone:
        fence_async_shared()  # as at the end of the others
    else:
        walk(given, HV, HALF, STATES)


@gluon.jit
def walk(given, HV: gl.constexpr, HELD: gl.constexpr, STATES: gl.constexpr):
    """The chain over 64 of the channels of V, from HELD on of those in shared memory, which begin with `first`."""
    (
        state_tiles, state, entering, qs, ks, gs, dos, ys, outs, full, do_full, ready, free, row, n, target, first,
    ) = given  # fmt: skip
    first = first + HELD
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    STATE_LEFT: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    value = gl.arange(0, HALF, layout=gl.SliceLayout(1, STATE))
    key = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, STATE))
    size = HEAD_DIM * HEAD_DIM
    D = gl.load(state + key[None, :] * HEAD_DIM + (first + value)[:, None])
    stage = 0
    phase = 0
    for i in range(n):
        b = i & 1
        k = ks.index(stage)
        q = qs.index(stage)
        y = ys.index(b)
        do = dos.index(2 * b + HELD // HALF).permute((1, 0))
        narrow = D.to(gl.bfloat16)
        d = gl.convert_layout(narrow, LEFT)
        mbarrier.wait(full.index(stage), phase)
        mbarrier.wait(do_full.index(b), (i >> 1) & 1)
        mbarrier.wait(ready.index(b), (i >> 1) & 1)
        G = gs.index(stage).reshape([CHUNK]).slice(CHUNK - 1, 1, 0)
        D = D * exp2(G.load(gl.SliceLayout(0, STATE)))[None, :]
        gamma = -exp2(G.load(gl.SliceLayout(0, ACC)))
        U = gl.zeros([HALF, CHUNK], gl.float32, ACC)
        U = warpgroup_mma(d, k.permute((1, 0)), U, is_async=True)
        D = warpgroup_mma(do, q, D, is_async=True)
        if STATES:  # while the products run; the copy engine counts rows, which int32 holds
            out = outs.index(HELD // HALF)
            store_wait(0)
            barrier()
            out.store(narrow)
            fence_async_shared()
            barrier()
            store_tile(state_tiles, [(row + (n - 1 - i) * HV) * HEAD_DIM + first, 0], out)
        U, d = warpgroup_mma_wait(1, deps=[U, d])
        u = gl.convert_layout((U * gamma[None, :]).to(gl.bfloat16), STATE_LEFT)
        D = warpgroup_mma(u, y, D, is_async=True)
        D = warpgroup_mma_wait(0, deps=[D, u, y, do, q, k])[0]
        mbarrier.arrive(free.index(b), count=1)
        stage = stage + 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
    channel = first + late(value)
    gl.store(entering + target.to(gl.int64) * size + key[None, :] * HEAD_DIM + channel[:, None], D)
    store_wait(0)


def adjoint(
    q: Tensor, k: Tensor, do: Tensor, made: Prepared, leaving: Tensor, segments: Tensor, scale: float,
    *, states: bool, whole: int | None = None, tilings: Tilings | None = None, found: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launches the kernel; q, k [T, H, 128], do [T, HV, 128] bf16, rows of any pitch; leaving [E, HV, K, V] fp32, the
    adjoint of exit states, or those heads of more; segments as the kernel has them; whole: as for the forward. found:
    where the adjoint of entry states goes to, as far apart as leaving.

    Returns the adjoint of entry states [n, HV, K, V], and with `states` D at the end of every chunk [NC, HV, V, K]
    bf16, transposed. Without, the walk begins where the entry state begins to feel it. tilings: as for the forward.
    """
    A, G, broken, reach, lengths, _ = made
    n, H, (HV, NC) = segments.shape[0], k.shape[1], reach.shape
    assert lengths is None, "the walk takes ready q and k"
    whole = n * HV if whole is None else whole
    entering = leaving.new_empty(n, *leaving.shape[1:]) if found is None else found
    apart = heads_apart(leaving)
    assert apart == heads_apart(entering)
    written = do.new_empty(NC, HV, 128, 128) if states else None
    if n:
        shared = Tilings() if tilings is None else tilings
        A_tiles = shared.of(A, 64, 64, 64)
        launch(
            adjoint_kernel, (2 * n * HV - whole,), shared.rows(q), shared.rows(k), shared.rows(do, 64), A_tiles,
            shared.of(G, 64, 1, 64), A_tiles if written is None else tiles(written, 128, 64, 128), leaving,
            no_state(leaving.device), entering, broken, reach, segments, leaving.shape[0], whole, NC, math.log2(scale),
            H=H, GROUP=HV // H, APART=apart, STATES=states, num_warps=4, **LAUNCH,
        )  # fmt: skip
    return entering, written
