"""Pieces of kernels over one chunk: triangles and decay ratios of its square, sums along rows, rows on their way out.

ACC is the layout of a product's accumulator, WIDE one of 16 bytes a lane.
"""

from deltaspan.kernels.hopper.gluon import (
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_tile,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltaspan.kernels.hopper.instructions import exp2, late, narrowed, two_products, widened

CHUNK = gl.constexpr(64)
HEAD_DIM = gl.constexpr(128)


@gluon.jit
def store_rows(to, x, held, pitch, LAYOUT: gl.constexpr):
    """Rows of x, so far apart, as many as there are tokens."""
    row = late(gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT)))
    column = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    gl.store(to + (row * pitch)[:, None] + column[None, :], x, mask=(row < held)[:, None])


@gluon.jit
def store_place(tiles, to, x, token, held, column, pitch):
    """A tile [64, 64] of shared memory; by the copy engine, which is to be waited for, if all its rows are tokens."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if held == CHUNK:
        store_tile(tiles, [token, column], x)
    else:
        store_rows(to + token.to(gl.int64) * pitch + column, x.load(LAYOUT), held, pitch, LAYOUT)


@gluon.jit
def by_rows(place, x, WIDE: gl.constexpr):
    """x in bf16 as it is stored to memory, by way of a place that nobody reads any more."""
    place.store(x.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    return place.load(WIDE)


@gluon.jit
def row_products(x, y, TILE: gl.constexpr):
    """The inner product of every two rows of two tiles of [64, 128], by 16 columns: more would take more registers.
    Products are summed by twos in bf16, as x and y are rounded themselves."""
    product = gl.zeros([64, 16], gl.float32, TILE)
    for j in gl.static_range(0, 128, 32):
        product += widened(
            two_products(
                x.slice(j, 16, 1).load(TILE), y.slice(j, 16, 1).load(TILE),
                x.slice(j + 16, 16, 1).load(TILE), y.slice(j + 16, 16, 1).load(TILE),
            )
        )  # fmt: skip
    return gl.sum(product, 1)


@gluon.jit
def following(stage, phase, STAGES: gl.constexpr):
    """The next of a ring's stages, and its phase. Counted: a modulo would spill."""
    stage = stage + 1
    return gl.where(stage == STAGES, 0, stage), gl.where(stage == STAGES, phase ^ 1, phase)


@gluon.jit
def in_place(count):
    """0, by way of the assembler, so that no descriptor of a product that depends on it is made before a loop that
    counts: there would be more of them than registers."""
    return late(count - count)


@gluon.jit
def lower(before, ACC: gl.constexpr):
    """Where i >= j, of a chunk's square."""
    return before.load(ACC).to(gl.float32) == 0.0


@gluon.jit
def strictly_lower(before, ACC: gl.constexpr):
    return before.permute((1, 0)).load(ACC).to(gl.float32) != 0.0


@gluon.jit
def decay_ratios(G, ACC: gl.constexpr, FIRST: gl.constexpr = 0, WIDTH: gl.constexpr = CHUNK, more=0.0):
    """2^(G_i - G_j + more) of columns from FIRST on. Above the diagonal it may be infinite: to be chosen away."""
    column = G.slice(FIRST, WIDTH, 0).load(gl.SliceLayout(0, ACC))
    return exp2((G.load(gl.SliceLayout(1, ACC)) + more)[:, None] - column[None, :])


@gluon.jit
def sums_before(M, before, ACC: gl.constexpr):
    """Along rows, for each column the sum of those before it, in 16 bits."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    high = narrowed(M)
    low = gl.convert_layout(narrowed(M - widened(high)), LEFT)
    high = gl.convert_layout(high, LEFT)
    summed = gl.zeros([CHUNK, CHUNK], gl.float32, ACC)
    summed = warpgroup_mma(high, before, summed, is_async=True)
    summed = warpgroup_mma(low, before, summed, is_async=True)
    return warpgroup_mma_wait(0, deps=[summed, high, low])[0]


@gluon.jit
def halves_of_A(A, HALF: gl.constexpr):
    row = late(gl.arange(0, CHUNK, layout=gl.SliceLayout(1, HALF)))
    at = A + row[:, None] * CHUNK + gl.arange(0, 32, layout=gl.SliceLayout(0, HALF))[None, :]
    return gl.load(at), gl.load(at + 32)


@gluon.jit
def decayed(A, G, p, before, HALF: gl.constexpr):
    """T and F of a value head, each by halves of its columns, as A is. One half after the other, beside accumulators
    that fill registers."""
    T_low, F_low = decayed_half(A[0], G, p, before, HALF, 0)
    T_high, F_high = decayed_half(A[1], G, p, before, HALF, 1)
    return T_low, T_high, F_low, F_high


@gluon.jit
def decayed_half(A, G, p, before, HALF: gl.constexpr, HALF_NUMBER: gl.constexpr):
    kept = lower(before.slice(HALF_NUMBER * 32, 32, 1), HALF)
    E = gl.where(kept, decay_ratios(G, HALF, HALF_NUMBER * 32, 32), 0.0)
    P = widened(p.slice(HALF_NUMBER * 32, 32, 1).load(HALF))
    return narrowed(widened(A) * E), narrowed(P * E)


@gluon.jit
def put(tf, T_and_F, signal):
    """T beside F, where products find them."""
    T_low, T_high, F_low, F_high = T_and_F
    tf.slice(0, 32, 1).store(T_low)
    tf.slice(32, 32, 1).store(T_high)
    tf.slice(64, 32, 1).store(F_low)
    tf.slice(96, 32, 1).store(F_high)
    fence_async_shared()
    barrier()
    mbarrier.arrive(signal, count=1)
