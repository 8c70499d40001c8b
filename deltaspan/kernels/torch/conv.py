"""The depthwise causal convolution over fragments: pre[t] = sum_k w[:, k] x[t - W + 1 + k] + bias, y = act(pre).

Taps are summed in their order, in FP32 (FP64 stays), so that a token's result does not depend on where fragments end.
"""

import torch
from torch import Tensor

from deltaspan.kernels.stages import Edges
from deltaspan.kernels.torch.chunks import whole_chunks


def convolve(
    x: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, edges: Edges, activation: str | None
) -> Tensor:
    """x [T, D], history [received, D], weight [D, W], bias [D] or None -> y like x, zero where no fragment holds a
    token."""
    pre = preactivation(x, history, weight, bias, edges)
    return _pad(pre * _sigmoid(pre) if activation == "silu" else pre, x)


def preactivation(x: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, edges: Edges) -> Tensor:
    """Operands as `convolve` has them -> pre [tokens, D] in the type of the sums.

    The backward forms it again, also where a kernel computed y: its sums may then differ from the forward's in the last
    bit of FP32, for a kernel adds each product before it is rounded.
    """
    rows, weight = _rows(x, history, edges), weight.to(_sum_type(x))
    pre = sum_taps(rows, weight, edges.before)
    return pre if bias is None else pre + bias.to(pre.dtype)


def activation_gradient(pre: Tensor, activation: str | None, dy: Tensor) -> Tensor:
    """dpre [tokens, D], at the unrounded preactivation."""
    dy = dy[: len(pre)].to(pre.dtype).contiguous()  # sums over tokens follow the order of memory
    if activation is None:
        return dy
    s = _sigmoid(pre)
    return dy * (s * (1 + pre * (1 - s)))


def conv_gradients(
    x: Tensor, history: Tensor, weight: Tensor, dpre: Tensor, following: Tensor, edges: Edges
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [T, D] in x's type, and this rank's share of dweight [D, W] and dbias [D]; following is [received, D]."""
    rows = _rows(x, history, edges)
    dweight = torch.stack([(dpre * rows[tap]).sum(0) for tap in edges.before.unbind(1)], dim=1)
    dx = sum_taps(_with_zeros(dpre, following), weight.to(dpre.dtype).flip(1), edges.after)
    return _pad(dx, x), dweight, dpre.sum(0)


def sum_taps(rows: Tensor, weight: Tensor, taps: Tensor) -> Tensor:
    """sum_k weight[:, k] rows[taps[:, k]]: rows [R, D], weight [D, W], taps [T, W] -> [T, D]."""
    total = rows[taps[:, 0]] * weight[:, 0]
    for k in range(1, weight.shape[1]):
        total = total + rows[taps[:, k]] * weight[:, k]
    return total


def _sigmoid(pre: Tensor) -> Tensor:
    return whole_chunks(pre).sigmoid()[: len(pre)]


def _sum_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _rows(x: Tensor, history: Tensor, edges: Edges) -> Tensor:
    return _with_zeros(x[: edges.tokens].to(_sum_type(x)), history.to(_sum_type(x)))


def _with_zeros(rows: Tensor, received: Tensor) -> Tensor:
    return torch.cat([rows, received, rows.new_zeros(1, rows.shape[1])])


def _pad(rows: Tensor, like: Tensor) -> Tensor:
    out = torch.zeros_like(like)
    out[: len(rows)] = rows.to(like.dtype)
    return out
