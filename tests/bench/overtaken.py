"""A kernel that copies tiles by way of one place, and says in different ways when that may be written again."""

from deltaspan.kernels.hopper.gluon import barrier, fence_async_shared, gl, gluon, load_tile, mbarrier


@gluon.jit
def bring(tiles, n, place, full, empty):
    for i in range(n):
        mbarrier.wait(empty, (i & 1) ^ 1)
        mbarrier.expect(full, 64 * 128 * 2)
        load_tile(tiles, [i * 64, 0], full, place)


@gluon.jit
def hand_on(out, n, place, full, empty, WAY: gl.constexpr):
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))[:, None] * 128
    at = at + gl.arange(0, 128, layout=gl.SliceLayout(0, WIDE))[None, :]
    for i in range(n):
        mbarrier.wait(full, i & 1)
        x = place.load(WIDE)
        if WAY == "fenced":
            fence_async_shared()
        if WAY == "used":
            gl.store(out + i * (64 * 128) + at, x)
        barrier()
        mbarrier.arrive(empty, count=1)
        if WAY != "used":
            gl.store(out + i * (64 * 128) + at, x)


@gluon.jit
def copy(tiles, out, n, WAY: gl.constexpr):
    """tiles and out: [n * 64, 128] bf16."""
    place = gl.allocate_shared_memory(gl.bfloat16, [64, 128], tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [(hand_on, (out, n, place, full, empty, WAY)), (bring, (tiles, n, place, full, empty))], [1], [24]
    )
