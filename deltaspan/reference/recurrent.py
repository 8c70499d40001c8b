"""Knows the gated delta rule token by token, as its formula is written: the oracle that everything else answers to."""

from collections.abc import Iterable
from itertools import pairwise
from operator import index

import torch
from torch import Tensor

SMALLEST_G = -1000.0
"""Log decays below this count as this, with zero gradient: exp of it is 0 in every dtype, and -inf becomes harmless."""


def recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Iterable[int],
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over every document of a pack, one token after the other, in float64.

    For each document and value head, with S the state [K, V] and alpha = exp(g):

        S'  = alpha_t S_{t-1}
        e_t = beta_t (v_t - S'^T k_t)
        S_t = S' + k_t e_t^T
        o_t = scale S_t^T q_t

    This is the gated delta rule of Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv 2412.06464), with the
    state transposed (keys in rows), as flash-linear-attention's `chunk_gated_delta_rule` has it.

    Args:
        q, k: [T, H, K].
        v: [T, HV, V]; HV is a multiple of H and value head j reads key head j // (HV // H).
        g: [T, HV], natural-log decay; below -1000 (also -inf) it counts as -1000, with zero gradient.
        beta: [T, HV], write strength, after the sigmoid.
        cu_seqlens: N + 1 offsets of the N documents, from 0, never decreasing; a repeated offset is an empty document.
        scale: factor of the output; None means K**-0.5.
        initial_state: [N, HV, K, V], or None for zeros.

    Each tensor is of any floating dtype; all but the state may carry a leading batch axis of 1.

    Returns:
        o [T, HV, V] in float64, with a batch axis iff q has one. Rows past the last offset are zero and give zero
        gradient.
        final_state [N, HV, K, V] in float64; an empty document's is its initial state.

    Differentiable by autograd. A gradient arrives in its input's dtype: pass float64 leaves to see it unrounded.
    One state per token is kept for the backward: meant for short packs.

    Raises:
        ValueError, TypeError: see `plain_operands`.
    """
    has_batch_axis = isinstance(q, Tensor) and q.dim() == 4
    *operands, offsets, initial_state = plain_operands(q, k, v, g, beta, cu_seqlens, initial_state)
    q, k, v, g, beta = (x.double() for x in operands)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], dim=1) for x in (q, k))  # [T, HV, K]

    o = [v[:0]]  # so that o hangs in the graph even of a pack without tokens
    final_state = [initial_state.double()[:0]]
    for S, (start, end) in zip(initial_state.double(), pairwise(offsets), strict=True):
        # unbind: the backward of indexing x[t] would write a whole x for every token
        tokens = zip(*(x[start:end].unbind() for x in (q, k, v, g, beta)), strict=True)
        for q_t, k_t, v_t, g_t, beta_t in tokens:
            alpha = torch.exp(g_t.clamp(min=SMALLEST_G))
            S = alpha[:, None, None] * S
            e = beta_t[:, None] * (v_t - torch.einsum("hkv,hk->hv", S, k_t))
            S = S + torch.einsum("hk,hv->hkv", k_t, e)
            o.append(scale * torch.einsum("hkv,hk->hv", S, q_t)[None])
        final_state.append(S[None])
    o.append(v.new_zeros(len(v) - offsets[-1], *v.shape[1:]))

    o = torch.cat(o)
    return o[None] if has_batch_axis else o, torch.cat(final_state)


def plain_operands(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Iterable[int], initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[int], Tensor]:
    """Check the operands of the rule and return them without batch axes, offsets as ints, dtypes untouched.

    A missing initial state comes back as zeros [N, HV, K, V] that take no memory.

    Raises:
        TypeError: a tensor argument is no tensor, or cu_seqlens is no run of ints.
        ValueError: a shape or dtype does not fit the others, HV is no multiple of H, or cu_seqlens does not start at
            0, decreases, or runs past T.
    """
    q = without_batch_axis("q", q, 3)
    v = without_batch_axis("v", v, 3)
    (T, H, K), (HV, V) = q.shape, v.shape[1:]
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(f"v has {HV} heads and q has {H}; accepted: a positive multiple of q's")
    offsets = document_offsets(cu_seqlens, T)
    k = without_batch_axis("k", k, 3, (T, H, K))
    v = without_batch_axis("v", v, 3, (T, HV, V))
    g = without_batch_axis("g", g, 2, (T, HV))
    beta = without_batch_axis("beta", beta, 2, (T, HV))
    state_shape = (len(offsets) - 1, HV, K, V)
    if initial_state is None:
        initial_state = q.new_zeros(()).expand(state_shape)
    check_tensor("initial_state", initial_state, state_shape)
    return q, k, v, g, beta, offsets, initial_state


def document_offsets(cu_seqlens: Iterable[int], tokens: int) -> list[int]:
    """Return the offsets [N + 1] as ints, or raise: they start at 0, never decrease and end at `tokens` or before."""
    try:
        offsets = [index(offset) for offset in (cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens)]
    except TypeError:
        raise TypeError(f"cu_seqlens is {cu_seqlens!r}; accepted: a run of integers") from None
    if offsets[:1] != [0] or offsets != sorted(offsets) or offsets[-1] > tokens:
        raise ValueError(f"cu_seqlens is {offsets}; accepted: from 0, never decreasing, at most {tokens} tokens")
    return offsets


def without_batch_axis(name: str, x: Tensor, dim: int, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return x with `dim` axes, less a leading batch axis of 1 if it has one more, or raise."""
    check_tensor(name, x)
    if x.dim() not in (dim, dim + 1) or (x.dim() == dim + 1 and x.shape[0] != 1):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; accepted: {dim} axes, or a batch axis of 1 before them")
    x = x.squeeze(0) if x.dim() == dim + 1 else x
    check_tensor(name, x, shape)
    return x


def check_tensor(name: str, x: Tensor, shape: tuple[int, ...] | None = None) -> None:
    """Raise unless x is a floating-point tensor of that shape."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is of type {type(x).__name__}; accepted: torch.Tensor")
    if not x.is_floating_point():
        raise ValueError(f"{name} has dtype {x.dtype}; accepted: floating point")
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; accepted: {shape}")
