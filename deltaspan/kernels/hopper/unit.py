"""Rows of q and k brought to length 1, and the way back to raw ones, for sm_90: each in one pass over memory.

With r = 1 / sqrt(|x|^2 + 1e-6) and y = r x:    dx = r (dy - <dy, y> y)

A forward does without: it takes lengths along as factors of a token. The backward's walks and gradients take ready q
and k, in bf16.
"""

from torch import Tensor

from deltaspan.kernels.hopper.gluon import gl, gluon, launch
from deltaspan.kernels.hopper.raw import inverse_length

HEAD_DIM = gl.constexpr(128)
ROWS = 32  # a program, so that each of 128 threads has four times 16 bytes under way


@gluon.jit
def unit_kernel(x, dy, y, rows, eighths, H: gl.constexpr, ROWS: gl.constexpr, GRADIENT: gl.constexpr):
    """x [T, H, 128] bf16, tokens 8 * eighths apart; y [T, H, 128] bf16, dense; with GRADIENT dy like y, which may be
    it, and y receives dx. rows = T * H, of which a program takes ROWS."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, WIDE))
    channel = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, WIDE))
    inside = (row < rows)[:, None]
    at = (row // H).to(gl.int64) * (eighths * 8) + row % H * HEAD_DIM
    own = (row.to(gl.int64) * HEAD_DIM)[:, None] + channel[None, :]
    X = gl.load(x + at[:, None] + channel[None, :], mask=inside, other=0.0).to(gl.float32)
    inverse = inverse_length(gl.sum(X * X, 1))[:, None]
    Y = X * inverse
    if GRADIENT:
        dY = gl.load(dy + own, mask=inside, other=0.0).to(gl.float32)
        Y = (dY - Y * gl.sum(dY * Y, 1)[:, None]) * inverse
    gl.store(y + own, Y.to(gl.bfloat16), mask=inside)


def unit(x: Tensor) -> Tensor:
    """Rows of x [T, H, 128] bf16, tokens a multiple of 16 bytes apart, by their lengths; dense."""
    y = x.new_empty(x.shape)
    _launch(x, y, y, gradient=False)
    return y


def to_raw_gradient(x: Tensor, dy: Tensor) -> None:
    """Turns the gradient dy [T, H, 128] of ready rows, bf16 and dense, into that of the raw rows x, in place."""
    _launch(x, dy, dy, gradient=True)


def _launch(x: Tensor, dy: Tensor, y: Tensor, *, gradient: bool) -> None:
    T, H, _ = x.shape
    if T * H:
        programs = -(-T * H // ROWS)
        given = x, dy, y, T * H, x.stride(0) // 8
        launch(unit_kernel, (programs,), *given, H=H, ROWS=ROWS, GRADIENT=gradient, num_warps=4)
