"""The causal convolution's forward in one launch, for sm_90: a row is read once, later taps find it in registers.

A program of one warp takes some channels of a run of tokens and walks them, 16 bytes a lane and token, with the last
W - 1 rows beside it in fp32. At a fragment's first token those rows are replaced by received ones, or by zeros where
the document begins: so every token goes through the same products and sums, wherever fragments end.
"""

from torch import Tensor

from deltaspan.kernels.hopper.gluon import gl, gluon, launch
from deltaspan.kernels.hopper.instructions import exp2, reciprocal
from deltaspan.kernels.stages import Edges

CHUNK = gl.constexpr(64)
RUN = 32  # tokens a program, a divisor of CHUNK; W - 1 more are read again, from the cache
AT_ONCE = gl.constexpr(4)  # rows that are loaded before the first of them is used
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def conv_kernel(
    x, history, weight, bias, y, fragments, bounds, history_row, tokens,
    D: gl.constexpr, PITCH: gl.constexpr, RECEIVED_PITCH: gl.constexpr, W: gl.constexpr, CHANNELS: gl.constexpr,
    RUN: gl.constexpr, BIAS: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """x [>= tokens, D] bf16, fp16 or fp32, rows PITCH apart; history [received, D] in its type, rows RECEIVED_PITCH
    apart; weight [D, W] and bias [D]; y [>= tokens, D] in x's type, of which the rows of tokens are written.

    fragments, bounds and history_row as `Edges` has them. One program for every CHANNELS channels of RUN tokens,
    channels first.
    """
    LANES: gl.constexpr = gl.BlockedLayout([CHANNELS // 32], [32], [1], [0])
    BLOCKS: gl.constexpr = (D + CHANNELS - 1) // CHANNELS
    first = gl.program_id(0) // BLOCKS * RUN
    d = gl.program_id(0) % BLOCKS * CHANNELS + gl.arange(0, CHANNELS, layout=LANES)
    inside = d < D
    n = gl.minimum(tokens - first, RUN)
    x += first.to(gl.int64) * PITCH
    y += first.to(gl.int64) * D
    weights = load_weights(weight, gl.program_id(0) % BLOCKS * CHANNELS, D, W, CHANNELS, LANES)
    shift = gl.zeros([CHANNELS], gl.float32, LANES)
    if BIAS:
        shift = gl.load(bias + d, mask=inside, other=0.0).to(gl.float32)

    fragment = gl.load(fragments + first // CHUNK)
    end = gl.load(bounds + fragment + 1)
    while end <= first:
        fragment += 1
        end = gl.load(bounds + fragment + 1)
    begin = gl.load(bounds + fragment)
    past = ()  # the rows of the W - 1 tokens before the next one
    for k in gl.static_range(W - 1):
        if first - begin >= W - 1 - k:
            row = gl.load(x + (d + (k - (W - 1)) * PITCH), mask=inside, other=0.0).to(gl.float32)
        else:
            row = received(history, history_row + fragment * (W - 1) + first - begin + k, d, inside, RECEIVED_PITCH)
        past = past + (row,)

    for i in range(0, n, AT_ONCE):
        ahead = ()
        for j in gl.static_range(AT_ONCE):
            ahead = ahead + (gl.load(x + (d + j * PITCH), mask=inside & (i + j < n), other=0.0),)
        for j in gl.static_range(AT_ONCE):
            if (first + i + j >= end) & (i + j < n):
                while end <= first + i + j:
                    fragment += 1
                    end = gl.load(bounds + fragment + 1)
                past = ()
                for k in gl.static_range(W - 1):
                    past = past + (received(history, history_row + fragment * (W - 1) + k, d, inside, RECEIVED_PITCH),)
            rows = past + (ahead[j].to(gl.float32),)
            pre = rows[0] * weights[0]
            for k in gl.static_range(1, W):
                pre = gl.fma(rows[k], weights[k], pre)
            if BIAS:
                pre = pre + shift
            if SILU:
                pre = silu(pre)
            gl.store(y + (d + j * D), pre.to(y.dtype.element_ty), mask=inside & (i + j < n))
            past = rows[1:]
        x += AT_ONCE * PITCH
        y += AT_ONCE * D


@gluon.jit
def load_weights(weight, first, D: gl.constexpr, W: gl.constexpr, CHANNELS: gl.constexpr, LANES: gl.constexpr):
    """The taps' weights in fp32, W vectors [CHANNELS], of the channels from `first` on."""
    TAPS: gl.constexpr = 1 if W == 1 else 2 if W == 2 else 4 if W <= 4 else 8
    TILE: gl.constexpr = gl.BlockedLayout([CHANNELS // 32, TAPS], [32, 1], [1, 1], [1, 0])
    d = first + gl.arange(0, CHANNELS, layout=gl.SliceLayout(1, TILE))[:, None]
    k = gl.arange(0, TAPS, layout=gl.SliceLayout(0, TILE))[None, :]
    tile = gl.load(weight + d * W + k, mask=(d < D) & (k < W), other=0.0).to(gl.float32)
    weights = ()
    for tap in gl.static_range(W):
        weights = weights + (gl.convert_layout(gl.sum(gl.where(k == tap, tile, -0.0), 1), LANES),)
    return weights


@gluon.jit
def received(history, place, d, inside, PITCH: gl.constexpr):
    """The row [CHANNELS] in fp32 whose number stands at `place`, zeros if that is -1."""
    row = gl.load(place)
    return gl.load(history + row * PITCH + d, mask=inside & (row >= 0), other=0.0).to(gl.float32)


@gluon.jit
def silu(x):
    """x / (1 + e^-x), a few units of fp32's last place off; -0 below about -87.3, where 1 / (1 + e^-x) is subnormal."""
    return x * reciprocal(1.0 + exp2(x * -LOG2_E))


def convolve(
    x: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, edges: Edges, activation: str | None
) -> Tensor:
    """Launches the kernel; x [T, D] bf16, fp16 or fp32, rows any distance apart, history [received, D] in its type,
    weight [D, W], bias [D] or None -> y [T, D] in x's type, zero where no fragment holds a token."""
    assert edges.width <= 8, "select refuses more"
    x, history = (t if t.stride(1) == 1 else t.contiguous() for t in (x, history))
    weight, D, tokens = weight.contiguous(), x.shape[1], edges.tokens
    y = x.new_empty(x.shape)
    if len(x) > tokens:
        y[tokens:] = 0
    channels = 32 * 16 // x.element_size()  # 16 bytes a lane
    programs = -(-D // channels) * -(-tokens // RUN)
    if programs:
        launch(
            conv_kernel, (programs,), x, history, weight, weight if bias is None else bias.contiguous(), y,
            edges.fragments, edges.bounds, edges.history_row, tokens,
            D=D, PITCH=x.stride(0), RECEIVED_PITCH=history.stride(0), W=edges.width, CHANNELS=channels, RUN=RUN,
            BIAS=bias is not None, SILU=activation == "silu", num_warps=1,
        )  # fmt: skip
    return y
