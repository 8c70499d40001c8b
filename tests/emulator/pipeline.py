"""A kernel that uses what the Hopper tier's kernels use, to try the emulator on: a delta-rule walk without decay.

One partition loads tiles of 64 tokens into a ring of three stages, the other walks them. Per segment, from S = 0, the
state transposed as [V, K] in fp32 registers:

    R = (V - K S)^T      o = K S, before the chunk      S <- S / 2 + R K       the final S is stored

S and R enter products as bf16. Behind a segment's end a tile holds the next segment's rows: their keys are cleared in
shared memory and their values masked by select, since zero times NaN is NaN; a masked store spares their outputs.
"""

from deltaspan.kernels.hopper.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STAGES = gl.constexpr(3)
STATE = gl.constexpr(64 * 128)


@gluon.jit
def produce(k, v, segments, n, k_ring, v_ring, full, empty):
    s = 0
    phase = 0
    for seg in range(gl.program_id(0), n, gl.num_programs(0)):
        first = gl.load(segments + 3 * seg)
        last = gl.load(segments + 3 * seg + 1)
        for t in range(first, last, 64):
            mbarrier.wait(empty.index(s), phase ^ 1)
            mbarrier.expect(full.index(s), (64 * 128 + 64 * 64) * 2)
            load_tile(k, [t, 0], full.index(s), k_ring.index(s))
            load_tile(v, [t, 0], full.index(s), v_ring.index(s))
            s = s + 1
            phase = gl.where(s == STAGES, phase ^ 1, phase)
            s = gl.where(s == STAGES, 0, s)


@gluon.jit
def consume(o, o_rows, states, segments, n, first_slot, k_ring, v_ring, staged, full, empty):
    ST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])  # [V, K]
    UT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])  # [V, token]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # [token, V]
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, ST))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, ST))
    token = gl.arange(0, 64, layout=gl.SliceLayout(0, UT))
    out_token = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    out_column = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])  # [token, K]
    wide_token = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    s = 0
    phase = 0
    for seg in range(gl.program_id(0), n, gl.num_programs(0)):
        first = gl.load(segments + 3 * seg)
        last = gl.load(segments + 3 * seg + 1)
        slot = gl.load(segments + 3 * seg + 2)
        S = gl.zeros([64, 128], gl.float32, ST)
        for t in range(first, last, 64):
            keys = k_ring.index(s)
            entry = gl.convert_layout(S.to(gl.bfloat16), gl.DotOperandLayout(0, UT, 2))
            mbarrier.wait(full.index(s), phase)
            if t + 64 > last:
                tile = keys.load(WIDE)
                keys.store(gl.where((t + wide_token < last)[:, None], tile, gl.zeros([64, 128], gl.bfloat16, WIDE)))
                fence_async_shared()
                barrier()
            U = gl.zeros([64, 64], gl.float32, UT)
            U = warpgroup_mma(entry, keys.permute((1, 0)), U, is_async=True)
            value = v_ring.index(s).permute((1, 0)).load(UT).to(gl.float32)
            U, entry = warpgroup_mma_wait(0, deps=[U, entry])
            R = gl.where((t + token < last)[None, :], value - U, 0.0)
            rest = gl.convert_layout(R.to(gl.bfloat16), gl.DotOperandLayout(0, ST, 2))
            S = S * 0.5
            S = warpgroup_mma(rest, keys, S, is_async=True)
            store_wait(0)
            barrier()
            staged.permute((1, 0)).store(U.to(gl.bfloat16))
            fence_async_shared()
            barrier()
            if t + 64 <= last:
                store_tile(o, [t, 0], staged)
            else:
                tile = staged.load(ROWS)
                at = o_rows + (t + out_token).to(gl.int64)[:, None] * 64 + out_column[None, :]
                gl.store(at, tile, mask=(t + out_token < last)[:, None])
            S, rest = warpgroup_mma_wait(0, deps=[S, rest])
            barrier()
            mbarrier.arrive(empty.index(s), count=1)
            s = s + 1
            phase = gl.where(s == STAGES, phase ^ 1, phase)
            s = gl.where(s == STAGES, 0, s)
        place = slot.to(gl.int64) * STATE - first_slot.to(gl.int64) * STATE
        gl.store(states + place + row[:, None] * 128 + column[None, :], S)
    store_wait(0)


@gluon.jit
def walk(k, v, o, o_rows, states, segments, n, first_slot):
    """k [T, 128], v and o [T, 64], bf16, as descriptors of boxes of 64 rows; o_rows: o again, as a pointer.

    segments [n, 3] int32: first token, end, and slot of each; states [slots, 64, 128] fp32, of which slot `first_slot`
    is the first. Programs share segments in turns.
    """
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 128], k.layout)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], v.layout)
    staged = gl.allocate_shared_memory(gl.bfloat16, [64, 64], o.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (consume, (o, o_rows, states, segments, n, first_slot, k_ring, v_ring, staged, full, empty)),
            (produce, (k, v, segments, n, k_ring, v_ring, full, empty)),
        ],
        [1],
        [24],
    )
