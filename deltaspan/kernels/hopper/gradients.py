"""The gradients of every chunk from the state at its start and the state's adjoint at its end, for sm_90: all chunks at
once, a key head with its value heads by one program.

With A and G of the prep stage, a = 2^G, r = 2^(G_C - G), gamma = 2^(G_C), E_ij = 2^(G_i - G_j) for i >= j, P =
tril(Q K^T), S the state at the chunk's start and D the adjoint of that at its end:

    T = E o A        F = scale E o P
    R = V - a (K S)        U = T R        dU = r (K D) + F^T dO        dR = T^T dU        dv = dR
    dP = scale E o (dO U^T)        Y = -E o tril(dR U^T, -1)
    x1 = scale a (dO S^T)        x2 = a (dR S^T)        x3 = r (U D^T)        kappa_i = <x3_i, k_i>
    dq = x1 + dP K        dk = x3 - x2 + dP^T Q + (Y + Y^T) K        summed over the group's value heads
    M = tril(dP o P + Y o K K^T, -1)
    dg_j = sum_(i >= j) (<x1_i, q_i> - <x2_i, k_i>) + sum_(i < j) kappa_i + sum_(l < j <= i) M_il + gamma <D, S>
    dbeta = <dR, R - tril(E o K K^T, -1) U> / beta = (<dR, R> + sum_l (Y o K K^T)_il) / beta

dg is the torch tier's sum, in fp32: nothing large cancels where decay is strong. Its inner products are taken before
x1, x2 and x3 are formed, <x1_i, q_i> = scale a_i <(Q S)_i, dO_i> and so on, so that these go straight into dq and dk:
rows are scaled in the left operands. Sums over l < j are products with a matrix of ones, of M in two bf16 terms.

In shared memory P and K K^T lie times the scale, and so M comes times it: F = E o P then, and a scale of E, in its
exponent, is that of dP.

A value head comes in two panels of 64 of V's channels, each a unit: v, dO and the rows of S^T and D^T for them. Four
partitions: one warpgroup makes U and dR of a unit; one T and F, which serve both panels, dP, dq and dg; one <D, S>, Y,
dk and dbeta; one warp loads. Each product runs into one accumulator in the order of value heads and panels, so bits do
not depend on how many programs share the chunks.

Rows of q, k, v and dO behind a fragment's end are set to zero in shared memory before anything is computed from them. A
key that breaks the promise of unit keys turns dO into NaN from its row on: dq from there, dk and dv of the whole chunk.
"""

from math import log2

from torch import Tensor

from deltaspan.kernels.hopper.chunk import (
    by_rows,
    decay_ratios,
    decayed,
    following,
    halves_of_A,
    in_place,
    lower,
    put,
    row_products,
    store_place,
    store_rows,
    strictly_lower,
    sums_before,
)
from deltaspan.kernels.hopper.forward import clear_behind
from deltaspan.kernels.hopper.gluon import (
    Tilings,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    launch,
    load_tile,
    mbarrier,
    row_tiles,
    store_wait,
    tiles,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltaspan.kernels.hopper.instructions import exp2, late, narrowed, scaled, widened
from deltaspan.kernels.hopper.prep import Prepared, away_from_zero

# `of_keys` and `of_queries` each hold dk or dq in 64 registers, Y or dP in 32 and a left operand in 16; `update` two
# accumulators of 32, and a K S and R in 16 each. With fewer `of_keys` lays operands by, with more `update` does; with
# fewer for `of_queries` ptxas waits after every product.
LAUNCH = {"KEY_REGISTERS": 168, "QUERY_REGISTERS": 160}

CHUNK = gl.constexpr(64)
HEAD_DIM = gl.constexpr(128)
PANEL = gl.constexpr(64)  # of V
STAGES = gl.constexpr(3)  # of units; with all else they fill shared memory
# places of [64, 128]: Q, and dk; K; T beside F, and dq
OF_Q, OF_K, OF_TF = map(gl.constexpr, range(3))
# of [64, 64]: U of both panels; P, and K K^T above the diagonal; ones where l < j
OF_U, OF_P, ONES = map(gl.constexpr, (0, 2, 3))
# of [64] fp32: G of three heads; of each token <x1, q> - <x2, k>, kappa, and <dR, R>, then its row's of gamma <D, S>
READ, KAPPA, ERROR = map(gl.constexpr, (3, 4, 5))
# signals: of a unit's stage; U and dR of a panel; of an item q and k, and P; of a head T and F, dP, and Y
FULL, EMPTY, MADE, USED = map(gl.constexpr, (0, 3, 6, 8))
ITEM_FULL, ITEM_LEFT, SCORED, DECAYED, DP_MADE, Y_MADE = map(gl.constexpr, range(10, 16))


@gluon.jit
def gradients_kernel(
    q_tiles, k_tiles, v_tiles, do_tiles, S_tiles, D_tiles, dv_tiles, A, G, beta, broken, chunks, dq, dk, dv, dg, dbeta,
    items, NC, scale, exponent, unscaled, H: gl.constexpr, GROUP: gl.constexpr, APART: gl.constexpr,
    KEY_REGISTERS: gl.constexpr, QUERY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles (descriptors): q, k [T, H * 128] by [64, 128]; v, do, dv [T, HV * 128] by [64, 64]; S, D
    [NC * HV * 128, 128] by [64, 128], the rows V and the columns K. exponent = log2(scale), unscaled = 1 / scale.

    A [HV, NC, 64, 64] bf16; G [HV, NC, 64] fp32; beta [T, HV] fp32 or bf16; broken [H, NC] and chunks [NC, 2] int32
    as prep has them; dq, dk [T, H, 128], dv [T, HV, 128] bf16; dg, dbeta [T, HV] fp32, these and beta part of rows of
    APART key heads and their value heads; items = NC * H, which the programs take by turns.
    """
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], gl.bfloat16)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # few allocations with many places: what partitions are handed takes shared memory, of which 52 bytes are left
    wide = gl.allocate_shared_memory(gl.bfloat16, [3, CHUNK, HEAD_DIM], k_tiles.layout)
    square = gl.allocate_shared_memory(gl.bfloat16, [4, CHUNK, CHUNK], SQUARE)
    vs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, PANEL], v_tiles.layout)  # V, then R, dU, dR; and Y
    dos = gl.allocate_shared_memory(gl.bfloat16, [STAGES, CHUNK, PANEL], do_tiles.layout)  # dO; and dP
    states = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PANEL, HEAD_DIM], S_tiles.layout)
    costates = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PANEL, HEAD_DIM], D_tiles.layout)
    rows = gl.allocate_shared_memory(gl.float32, [6, CHUNK], LINE)
    sums = gl.allocate_shared_memory(gl.float32, [4, CHUNK], PLAIN)  # of dg, by warps
    signals = gl.allocate_shared_memory(gl.int64, [16, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(16):
        if j == ITEM_LEFT:
            mbarrier.init(signals.index(j), count=3)
        elif (j >= EMPTY and j < EMPTY + STAGES) or (j >= USED and j < USED + 2):
            mbarrier.init(signals.index(j), count=2)
        else:
            mbarrier.init(signals.index(j), count=1)
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, ACC))
    column = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, ACC))
    square.index(ONES).store(gl.where(row[:, None] < column[None, :], 1.0, 0.0).to(gl.bfloat16))
    fence_async_shared()
    barrier()

    places = wide, square, vs, dos, states, costates, rows, sums, signals
    updating = G, broken, chunks, items, NC, scale
    querying = A, G, chunks, dq, dg, items, NC, scale, exponent, unscaled
    keying = beta, chunks, dv_tiles, dv, dk, dbeta, items, unscaled
    loading = q_tiles, k_tiles, v_tiles, do_tiles, S_tiles, D_tiles, chunks, items
    gl.warp_specialize(
        [
            (update, (places, updating, H, GROUP, APART)),
            (of_keys, (places, keying, H, GROUP, APART)),
            (of_queries, (places, querying, H, GROUP, APART)),
            (load, (places, loading, H, GROUP)),
        ],
        [4, 4, 1],
        [KEY_REGISTERS, QUERY_REGISTERS, 24],
    )


@gluon.jit
def load(places, given, H: gl.constexpr, GROUP: gl.constexpr):
    """Units three ahead at most; q and k behind the first head's, whose place is free before theirs is."""
    wide, _, vs, dos, states, costates, _, _, signals = places
    q_tiles, k_tiles, v_tiles, do_tiles, S_tiles, D_tiles, chunks, items = given
    stage = 0
    phase = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        c = item // H
        h = item % H
        token = gl.load(chunks + 2 * c)
        for e in range(GROUP + in_place(item)):  # Triton 3.6 cannot compile a loop of one round
            hv = h * GROUP + e
            for panel in gl.static_range(2):
                row = (c * (H * GROUP) + hv) * HEAD_DIM + panel * PANEL
                column = hv * HEAD_DIM + panel * PANEL
                mbarrier.wait(signals.index(EMPTY + stage), phase ^ 1)
                mbarrier.expect(signals.index(FULL + stage), 2 * CHUNK * PANEL * 2 + 2 * PANEL * HEAD_DIM * 2)
                load_tile(S_tiles, [row, 0], signals.index(FULL + stage), states.index(stage))
                load_tile(v_tiles, [token, column], signals.index(FULL + stage), vs.index(stage))
                load_tile(do_tiles, [token, column], signals.index(FULL + stage), dos.index(stage))
                load_tile(D_tiles, [row, 0], signals.index(FULL + stage), costates.index(stage))
                stage, phase = following(stage, phase, STAGES)
            if e == 0:
                mbarrier.wait(signals.index(ITEM_LEFT), (turn & 1) ^ 1)
                mbarrier.expect(signals.index(ITEM_FULL), 2 * CHUNK * HEAD_DIM * 2)
                load_tile(k_tiles, [token, h * HEAD_DIM], signals.index(ITEM_FULL), wide.index(OF_K))
                load_tile(q_tiles, [token, h * HEAD_DIM], signals.index(ITEM_FULL), wide.index(OF_Q))
        turn = turn + 1


@gluon.jit
def update(places, given, H: gl.constexpr, GROUP: gl.constexpr, APART: gl.constexpr):
    """U and dR of every unit, and of a token's inner products those that they take part in."""
    wide, square, vs, dos, states, costates, rows, _, signals = places
    G, broken, chunks, items, NC, scale = given
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    row = gl.arange(0, CHUNK, layout=ROW)
    read = gl.zeros([CHUNK], gl.float32, ROW)
    kappa = gl.zeros([CHUNK], gl.float32, ROW)
    error = gl.zeros([CHUNK], gl.float32, ROW)
    stage = 0
    phase = 0
    head = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        c = item // H
        h = item % H
        held = gl.load(chunks + 2 * c + 1)
        first_broken = gl.load(broken + h * NC + c)
        at = (h * GROUP * NC + c) * CHUNK + row  # 32 bits do for the tokens of all heads
        mbarrier.wait(signals.index(ITEM_FULL), turn & 1)
        if held < CHUNK:  # another partition sets what is behind to zero
            mbarrier.wait(signals.index(SCORED), turn & 1)
        for unit in range(2 * GROUP):
            panel = unit & 1
            G_row = gl.load(G + at)  # of each row, also the end's: one number alone would be waited for at once
            G_end = gl.load(G + (at | (CHUNK - 1)))
            at = at + NC * (CHUNK * panel)
            here = in_place(unit)
            q = wide.index(OF_Q + here)
            k = wide.index(OF_K + here)
            t = wide.index(OF_TF + here).slice(0, CHUNK, 1)
            f = wide.index(OF_TF + here).slice(CHUNK, CHUNK, 1)
            v = vs.index(stage)
            do = dos.index(stage)
            state = states.index(stage)
            costate = costates.index(stage)
            u = square.index(OF_U + panel)
            mbarrier.wait(signals.index(FULL + stage), phase)
            if held < CHUNK:
                clear_behind(v, held)
                clear_behind(do, held)
            if first_broken < CHUNK:
                barrier()
                clear_behind(do, first_broken, float("nan"))
            if (held < CHUNK) | (first_broken < CHUNK):
                fence_async_shared()
                barrier()
            zero = gl.zeros([CHUNK, PANEL], gl.float32, ACC)
            KS = warpgroup_mma(k, state.permute((1, 0)), zero, is_async=True)
            QS = warpgroup_mma(q, state.permute((1, 0)), zero, is_async=True)
            KS, QS = warpgroup_mma_wait(0, deps=[KS, QS])
            a = exp2(G_row)
            read = gl.sum(QS * widened(do.load(ACC)), 1) * (a * scale) + gl.where(panel == 0, 0.0, read)
            KS = KS * a[:, None]
            seen = narrowed(KS)
            narrow = narrowed(widened(v.load(ACC)) - KS)
            v.store(narrow)
            fence_async_shared()
            barrier()
            mbarrier.wait(signals.index(DECAYED), head & 1)
            mbarrier.wait(signals.index(USED + panel), (head & 1) ^ 1)
            U = warpgroup_mma(t, v, zero, is_async=True)
            dU = warpgroup_mma(k, costate.permute((1, 0)), zero, is_async=True)
            U, dU = warpgroup_mma_wait(0, deps=[U, dU])
            u.store(U.to(gl.bfloat16))
            dU = dU * exp2(G_end - G_row)[:, None]
            kappa = gl.sum(dU * U, 1) + gl.where(panel == 0, 0.0, kappa)
            dU = warpgroup_mma(f.permute((1, 0)), do, dU, is_async=True)
            dU = warpgroup_mma_wait(0, deps=[dU])
            v.store(dU.to(gl.bfloat16))
            fence_async_shared()
            barrier()
            dR = warpgroup_mma_wait(0, deps=[warpgroup_mma(t.permute((1, 0)), v, zero, is_async=True)])
            barrier()  # every warp's product has read dU
            v.store(dR.to(gl.bfloat16))
            read = read - gl.sum(dR * widened(seen), 1)
            error = gl.sum(dR * widened(narrow), 1) + gl.where(panel == 0, 0.0, error)
            if panel == 1:
                rows.index(READ).store(read)
                rows.index(KAPPA).store(kappa)
                rows.index(ERROR).store(error)
            fence_async_shared()
            barrier()
            mbarrier.arrive(signals.index(MADE + panel), count=1)
            head = head + panel
            stage, phase = following(stage, phase, STAGES)
        mbarrier.arrive(signals.index(ITEM_LEFT), count=1)
        turn = turn + 1


@gluon.jit
def of_queries(places, given, H: gl.constexpr, GROUP: gl.constexpr, APART: gl.constexpr):
    """P and K K^T of every item, T and F of every head; dP, dq and dg."""
    wide, square, vs, dos, states, _, rows, sums, signals = places
    A, G, chunks, dq, dg, items, NC, scale, exponent, unscaled = given
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [1, 4], [1, 0])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    later = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, FLAT))
    HV_APART: gl.constexpr = APART * GROUP
    stage = 0
    head = 0
    third = 0  # head % 3
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        c = item // H
        h = item % H
        token = gl.load(chunks + 2 * c)
        held = gl.load(chunks + 2 * c + 1)
        first = (h * GROUP).to(gl.int64) * NC + c
        here = in_place(turn)
        q = wide.index(OF_Q + here)
        k = wide.index(OF_K + here)
        halves = halves_of_A(A + first * (CHUNK * CHUNK), HALF)
        rows.index(third).store(gl.load(G + first * CHUNK + late(gl.arange(0, CHUNK, layout=LINE))))
        mbarrier.wait(signals.index(ITEM_FULL), turn & 1)
        if held < CHUNK:
            clear_behind(q, held)
            clear_behind(k, held)
            fence_async_shared()
            barrier()
        zero = gl.zeros([CHUNK, CHUNK], gl.float32, ACC)
        P = warpgroup_mma(q, k.permute((1, 0)), zero, is_async=True)
        KK = warpgroup_mma(k, k.permute((1, 0)), zero, is_async=True)
        P, KK = warpgroup_mma_wait(0, deps=[P, KK])
        square.index(OF_P + here).store(
            (gl.where(lower(square.index(ONES + here), ACC), P, KK) * scale).to(gl.bfloat16)
        )
        barrier()
        mbarrier.arrive(signals.index(SCORED), count=1)
        p = square.index(OF_P + here)
        before = square.index(ONES + here)
        made = decayed(halves, rows.index(third), p, before, HALF)
        put(wide.index(OF_TF + here), made, signals.index(DECAYED))
        out = gl.zeros([CHUNK, HEAD_DIM], gl.float32, OUT)
        for e in range(GROUP + in_place(item)):  # Triton 3.6 cannot compile a loop of one round
            here = in_place(head)
            at = first + gl.minimum(e + 1, GROUP - 1) * NC
            halves = halves_of_A(A + at * (CHUNK * CHUNK), HALF)
            G_line = gl.load(G + at * CHUNK + late(gl.arange(0, CHUNK, layout=LINE)))
            dP = gl.zeros([CHUNK, CHUNK], gl.float32, ACC)
            for panel in gl.static_range(2):
                do = dos.index(stage)
                if panel == 0:
                    mbarrier.wait(signals.index(MADE), head & 1)
                    read = exp2(rows.index(third).load(gl.SliceLayout(1, LEFT))) * scale
                else:
                    if e + 1 < GROUP:  # T and F of the next head, ready when those of this one are free
                        ahead = rows.index(gl.where(third == 2, 0, third + 1))
                        ahead.store(G_line)
                        barrier()
                        p = square.index(OF_P + here)
                        before = square.index(ONES + here)
                        made = decayed(halves, ahead, p, before, HALF)
                        mbarrier.wait(signals.index(MADE + 1), head & 1)
                        put(wide.index(OF_TF + here), made, signals.index(DECAYED))
                    mbarrier.wait(signals.index(MADE + 1), head & 1)
                lessened = scaled(do.load(LEFT), read[:, None])
                dP = warpgroup_mma(do, square.index(OF_U + here + panel).permute((1, 0)), dP, is_async=True)
                out = warpgroup_mma(lessened, states.index(stage), out, is_async=True)
                dP, out, lessened = warpgroup_mma_wait(0, deps=[dP, out, lessened])
                if panel == 1:
                    E = decay_ratios(rows.index(third), ACC, more=exponent)
                    dP = gl.where(lower(square.index(ONES + here), ACC), dP * E, 0.0)
                    barrier()  # every warp has read dO
                    do.store(dP.to(gl.bfloat16))
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(signals.index(DP_MADE), count=1)
                    M = dP * widened(square.index(OF_P + here).load(ACC))
                    out = warpgroup_mma_wait(0, deps=[warpgroup_mma(do, wide.index(OF_K + here), out, is_async=True)])
                    if e + 1 == GROUP:  # what follows reads neither q nor k, and the next item's are on their way
                        fence_async_shared()  # of loads it is the same as for dk
                        barrier()
                        mbarrier.arrive(signals.index(ITEM_LEFT), count=1)
                    mbarrier.wait(signals.index(Y_MADE), head & 1)
                    KK = widened(square.index(OF_P + here).permute((1, 0)).load(ACC))
                    M = sums_before(M + widened(vs.index(stage).load(ACC)) * KK, square.index(ONES + here), ACC)
                    passed = rows.index(ERROR).load(gl.SliceLayout(1, ACC))
                    of_token = (rows.index(READ).load(gl.SliceLayout(1, ACC)) + passed) * scale
                    kappa = (rows.index(KAPPA).load(gl.SliceLayout(1, ACC)) + passed) * scale
                    M = gl.where(lower(square.index(ONES + here), ACC), M + of_token[:, None], kappa[:, None])
                    sums.store(gl.sum(gl.reshape(M, [4, 16, CHUNK]), 1))
                barrier()
                mbarrier.arrive(signals.index(USED + panel), count=1)
                mbarrier.arrive(signals.index(EMPTY + stage), count=1)
                stage = stage + 1
                stage = gl.where(stage == STAGES, 0, stage)
            total = gl.sum(sums.load(FLAT), 0)
            index = late(later)
            at = (token + index).to(gl.int64) * HV_APART + h * GROUP + e
            gl.store(dg + at, total * unscaled, mask=index < held)
            head = head + 1
            third = gl.where(third == 2, 0, third + 1)
        store_rows(
            dq + (token.to(gl.int64) * APART + h) * HEAD_DIM, by_rows(wide.index(OF_TF + here), out, WIDE), held,
            APART * HEAD_DIM, WIDE,
        )  # fmt: skip
        barrier()  # before T and F are written there
        turn = turn + 1


@gluon.jit
def of_keys(places, given, H: gl.constexpr, GROUP: gl.constexpr, APART: gl.constexpr):
    """<D, S> and Y, which `of_queries` adds to dg, dk and dbeta."""
    wide, square, vs, dos, states, costates, rows, _, signals = places
    beta, chunks, dv_tiles, dv, dk, dbeta, items, unscaled = given
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    row = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, ACC))
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [0, 1])  # eight lanes by eight rows: no bank twice
    HV_APART: gl.constexpr = APART * GROUP
    stage = 0
    phase = 0
    head = 0
    third = 0  # head % 3
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        c = item // H
        h = item % H
        token = gl.load(chunks + 2 * c)
        held = gl.load(chunks + 2 * c + 1)
        out = gl.zeros([CHUNK, HEAD_DIM], gl.float32, OUT)
        for e in range(GROUP + in_place(item)):  # Triton 3.6 cannot compile a loop of one round
            here = in_place(head)
            k = wide.index(OF_K + here)
            hv = h * GROUP + e
            decay = rows.index(third)
            end = decay.slice(CHUNK - 1, 1, 0)
            passed = gl.zeros([CHUNK], gl.float32, gl.SliceLayout(1, TILE))
            Y = gl.zeros([CHUNK, CHUNK], gl.float32, ACC)
            for panel in gl.static_range(2):
                v = vs.index(stage)
                u = square.index(OF_U + here + panel)
                mbarrier.wait(signals.index(FULL + stage), phase)
                passed = passed + row_products(states.index(stage), costates.index(stage), TILE)
                mbarrier.wait(signals.index(MADE + panel), head & 1)
                store_place(dv_tiles, dv, v, token, held, hv * HEAD_DIM + panel * PANEL, HV_APART * HEAD_DIM)
                if panel == 0:
                    G_left = decay.load(gl.SliceLayout(1, LEFT))
                    taken = -exp2(G_left)
                    given_on = exp2(end.load(gl.SliceLayout(1, LEFT)) - G_left)
                dr = scaled(v.load(LEFT), taken[:, None])
                Y = warpgroup_mma(v, u.permute((1, 0)), Y, is_async=True)
                out = warpgroup_mma(dr, states.index(stage), out, is_async=True)
                Y, out, dr = warpgroup_mma_wait(0, deps=[Y, out, dr])
                written = scaled(u.load(LEFT), given_on[:, None])
                out = warpgroup_mma(written, costates.index(stage), out, is_async=True)
                out, written = warpgroup_mma_wait(0, deps=[out, written])
                if panel == 1:
                    E = decay_ratios(decay, ACC)
                    Y = gl.where(strictly_lower(square.index(ONES + here), ACC), -Y * E, 0.0)
                    error = rows.index(ERROR).load(gl.SliceLayout(1, ACC))
                    store_wait(0)
                    barrier()  # every warp has read that and dR, and so has the copy engine
                    rows.index(ERROR).store(passed * exp2(end.load(gl.SliceLayout(1, TILE))))
                    narrow = narrowed(Y)
                    v.store(narrow)
                    fence_async_shared()
                    barrier()
                    mbarrier.arrive(signals.index(Y_MADE), count=1)
                    error += gl.sum(Y * widened(square.index(OF_P + here).permute((1, 0)).load(ACC)), 1) * unscaled
                    index = late(row)
                    at = (token + index).to(gl.int64) * HV_APART + hv
                    strength = gl.load(beta + at, mask=index < held, other=1.0).to(gl.float32)
                    gl.store(dbeta + at, error / away_from_zero(strength), mask=index < held)
                    both = gl.convert_layout(narrow, LEFT) + v.permute((1, 0)).load(LEFT)  # they share no element
                    mbarrier.wait(signals.index(DP_MADE), head & 1)
                    out = warpgroup_mma(both, k, out, is_async=True)
                    out = warpgroup_mma(dos.index(stage).permute((1, 0)), wide.index(OF_Q + here), out, is_async=True)
                    out, both = warpgroup_mma_wait(0, deps=[out, both])
                else:
                    store_wait(0)
                barrier()
                mbarrier.arrive(signals.index(USED + panel), count=1)
                if e + panel < GROUP:  # of the last unit dk goes out by way of D's place
                    mbarrier.arrive(signals.index(EMPTY + stage), count=1)
                    stage, phase = following(stage, phase, STAGES)
            head = head + 1
            third = gl.where(third == 2, 0, third + 1)
        mbarrier.arrive(signals.index(ITEM_LEFT), count=1)
        out = by_rows(costates.index(stage), out, WIDE)
        fence_async_shared()  # loads are carried out before the copy engine hears of it: no barrier waits for them
        barrier()
        mbarrier.arrive(signals.index(EMPTY + stage), count=1)
        stage, phase = following(stage, phase, STAGES)
        store_rows(dk + (token.to(gl.int64) * APART + h) * HEAD_DIM, out, held, APART * HEAD_DIM, WIDE)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, do: Tensor, made: Prepared, states: Tensor, costates: Tensor,
    chunks: Tensor, scale: float, found: tuple[Tensor, ...], *, programs: int, tilings: Tilings | None = None,
) -> None:  # fmt: skip
    """Launches the kernel; ready q, k [T, H, 128], v, do [T, HV, 128] bf16, rows of any pitch; beta [T, HV] fp32 or
    bf16; the state at every chunk's start and its adjoint at every chunk's end [NC, HV, V, K] bf16; chunks [NC, 2]
    int32. programs: at most so many, as many as run at once. tilings: as for the forward.

    found: where dq, dk [T, H, 128], dv [T, HV, 128] bf16 and dg, dbeta [T, HV] fp32 go to, like beta whole tensors or
    views of the same heads of larger ones. Nothing is written for tokens outside all chunks.
    """
    (_, H, D), HV, NC = k.shape, v.shape[1], chunks.shape[0]
    A, G, broken, _, lengths, _ = made
    assert lengths is None, "the gradients take ready q and k"
    apart, group = found[0].stride(0) // D, HV // H
    assert [x.stride() for x in (*found, beta)] == [
        *[(heads * D, D, 1) for heads in (apart, apart, apart * group)], *[(apart * group, 1)] * 3
    ]  # fmt: skip
    if NC:
        shared = Tilings() if tilings is None else tilings
        launch(
            gradients_kernel, (min(programs, NC * H),), shared.rows(q), shared.rows(k), shared.rows(v, 64),
            shared.rows(do, 64), tiles(states, 128, 64, 128), tiles(costates, 128, 64, 128), row_tiles(found[2], 64), A,
            G, beta, broken, chunks, *found, NC * H, NC, scale, log2(scale), 1.0 / scale, H=H, GROUP=group,
            APART=apart, num_warps=4, **LAUNCH,
        )  # fmt: skip
