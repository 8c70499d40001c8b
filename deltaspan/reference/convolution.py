"""Knows the short causal convolution in front of the operator, document by document, in float64."""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from deltaspan.reference.recurrent import check_tensor, document_offsets, without_batch_axis


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Iterable[int],
    *,
    bias: Tensor | None = None,
    activation: str | None = "silu",
) -> Tensor:
    """Convolve every channel with its own taps, looking back within the document only.

        y_t = activation(bias + sum_w weight_w x_{t - (W - 1) + w}),    x = 0 before the document's first token

    Args:
        x: [T, D] or [1, T, D].
        weight: [D, W], W >= 1; the last tap meets the current token.
        cu_seqlens: N + 1 offsets of the N documents, from 0, never decreasing.
        bias: [D], or None.
        activation: "silu" or None.

    Returns:
        y in float64, shaped like x. Rows past the last offset are zero and give zero gradient.

    Differentiable by autograd; a gradient arrives in its input's dtype.

    Raises:
        TypeError: a tensor argument is no tensor, or cu_seqlens is no run of ints.
        ValueError: a shape, dtype or offset does not fit, or the activation is unknown.
    """
    has_batch_axis = isinstance(x, Tensor) and x.dim() == 3
    x = without_batch_axis("x", x, 2).double()
    T, D = x.shape
    check_tensor("weight", weight)
    if weight.dim() != 2 or weight.shape[0] != D or weight.shape[1] < 1:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; accepted: ({D}, W) with W >= 1")
    if bias is not None:
        check_tensor("bias", bias, (D,))
    if activation not in ("silu", None):
        raise ValueError(f'activation is {activation!r}; accepted: "silu" or None')
    offsets = document_offsets(cu_seqlens, T)
    taps = weight.double().unbind(dim=1)

    y = [x[:0]]  # so that y hangs in the graph even of a pack without tokens
    for start, end in pairwise(offsets):
        padded = pad(x[start:end], (0, 0, len(taps) - 1, 0))  # W - 1 zero rows before the first token
        y_document = sum(tap * padded[w : w + end - start] for w, tap in enumerate(taps))
        y_document = y_document if bias is None else y_document + bias.double()
        y.append(y_document if activation is None else silu(y_document))
    y.append(x.new_zeros(T - offsets[-1], D))
    y = torch.cat(y)
    return y[None] if has_batch_axis else y
