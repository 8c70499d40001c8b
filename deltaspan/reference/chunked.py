"""Knows the gated delta rule in chunks of 64 tokens, head slab by head slab: the oracle for packs of full size.

One chunk of one value head, with G the running sum of g inside the chunk, S the state before it, and the decay inside
the inverse (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464):

    A = (I + strictly_lower(beta_i e^{G_i - G_j} k_i.k_j))^-1        W = A (beta e^G K)        U = A (beta V)
    R = U - W S        o = scale (e^G Q S + lower(e^{G_i - G_j} q_i.k_j) R)        S <- e^{G_C} S + (e^{G_C - G} K)^T R

Gradients are autograd's, never formulas of ours: this file judges a backward written by hand.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from deltaspan.reference.recurrent import SMALLEST_G, check_tensor, plain_operands, without_batch_axis

CHUNK = 64
BLOCK = 32 * CHUNK
"""Tokens whose intermediates are alive together: a block keeps its inputs, and the backward recomputes the rest."""


class HeadSlab(NamedTuple):
    """Outputs and gradients of one key head and its R = HV // H value heads, in float64, without batch axes."""

    key_heads: slice  # of the H key heads
    value_heads: slice  # of the HV value heads
    o: Tensor  # [T, R, V]
    final_state: Tensor  # [N, R, K, V]
    dq: Tensor  # [T, 1, K], summed over the value heads
    dk: Tensor  # [T, 1, K], summed over the value heads
    dv: Tensor  # [T, R, V]
    dg: Tensor  # [T, R]
    dbeta: Tensor  # [T, R]
    dinitial_state: Tensor | None  # [N, R, K, V]; None without an initial state


def chunked_gated_delta_rule(
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
    """Compute what `recurrent_gated_delta_rule` computes: same arguments, results, dtypes and errors, by chunks.

    Differentiable by autograd, all heads at once, so about H times the memory of one of `head_slabs`: for packs that
    fit. A NaN or infinity spreads within its document as it likes, and never into another one.
    """
    has_batch_axis = isinstance(q, Tensor) and q.dim() == 4
    *operands, offsets, initial_state = plain_operands(q, k, v, g, beta, cu_seqlens, initial_state)
    key_heads, scale = operands[0].shape[1], _scale(operands[0], scale)
    slabs = zip(*(x.double().chunk(key_heads, dim=1) for x in (*operands, initial_state)), strict=True)
    o, final_state = zip(*(_slab(*slab, offsets, scale) for slab in slabs), strict=True)
    o = torch.cat(o, dim=1)
    return o[None] if has_batch_axis else o, torch.cat(final_state, dim=1)


def head_slabs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Iterable[int],
    do: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    dfinal_state: Tensor | None = None,
) -> Iterator[HeadSlab]:
    """Yield outputs and gradients one key head at a time, so that a caller compares a slab and drops it.

    Arguments as for `recurrent_gated_delta_rule`, and

        do: [T, HV, V], the gradient of o; a leading batch axis of 1 may be there.
        dfinal_state: [N, HV, K, V], the gradient of the final state, or None for zeros.

    Peak bytes beyond the arguments, with R = HV // H, C = 64, N documents, T counting each of them in whole chunks, and
    B the lesser of 2048 and the longest of them:

        8 T (4 K + 4 R V + 6 R)       leaves, o, do, and the gradients of every block
      + 8 R K V (T / B + 6 N)         states: at each block's start; initial, final, their gradients
      + 8 max(T R V,                  the blocks' gradients being joined, or one block's intermediates,
              B R (8 C + 6 K + 7 V + 3 K V / C))    as measured on a CPU and rounded up

    For T = 254,976, H = 16, HV = 48, K = V = 128, N = 1 this is 4.21 + 0.05 + 0.78 = 5.0 GB. With q, k, v, do in bf16
    and g, beta in fp32 (8.5 GB), and the last slab still in the caller's hands, 8 T (2 K + 2 R V + 2 R) = 2.1 GB, a
    device holds 15.6 GB (14.5 GiB).

    Raises:
        ValueError, TypeError: at once, not at the first slab; see `recurrent_gated_delta_rule`.
    """
    *operands, offsets, state = plain_operands(q, k, v, g, beta, cu_seqlens, initial_state)
    do = without_batch_axis("do", do, 3, tuple(operands[2].shape))
    if dfinal_state is not None:
        check_tensor("dfinal_state", dfinal_state, tuple(state.shape))
    H, HV = operands[0].shape[1], do.shape[1]
    scale = _scale(operands[0], scale)

    def slab(key_heads: slice, value_heads: slice) -> HeadSlab:
        heads = (key_heads, key_heads, value_heads, value_heads, value_heads, value_heads)
        leaves = [x[:, h].detach().double().requires_grad_() for x, h in zip((*operands, state), heads, strict=True)]
        with torch.enable_grad():
            o, final_state = _slab(*leaves, offsets, scale)
        # A zero gradient is handed on too: the checkpoints keep what the backward does not visit.
        dfinal = torch.zeros_like(final_state) if dfinal_state is None else dfinal_state[:, value_heads].double()
        *grads, dstate = torch.autograd.grad(
            (o, final_state), leaves, (do[:, value_heads].double(), dfinal), allow_unused=True, materialize_grads=True
        )
        dinitial_state = None if initial_state is None else dstate
        return HeadSlab(key_heads, value_heads, o.detach(), final_state.detach(), *grads, dinitial_state)

    group = HV // H
    # A generator expression holds no slab while it makes the next one.
    return (slab(slice(h, h + 1), slice(h * group, (h + 1) * group)) for h in range(H))


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _slab(
    q: Tensor,  # [T, 1, K]
    k: Tensor,  # [T, 1, K]
    v: Tensor,  # [T, R, V]
    g: Tensor,  # [T, R]
    beta: Tensor,  # [T, R]
    initial_state: Tensor,  # [N, R, K, V]
    offsets: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Walk one key head and its value heads through all documents: o [T, R, V] and the final states [N, R, K, V]."""
    lengths = [end - start for start, end in pairwise(offsets)]
    blocks = [[min(BLOCK, length - at) for at in range(0, length, BLOCK)] for length in lengths]  # of each document
    tail = len(q) - offsets[-1]
    # split: its backward joins the blocks' gradients once, where indexing would write a whole gradient for every block
    sizes = [0, *chain.from_iterable(blocks), tail]
    operands = zip(*(x.split(sizes) for x in (q, k, v, g, beta)), strict=True)

    o = [next(operands)[2]]  # v's piece of 0 rows, so that o hangs in the graph even of a pack without tokens
    final_state = []
    for S, blocks_of_document in zip(initial_state, blocks, strict=True):
        for _ in blocks_of_document:
            o_block, S = checkpoint(_block, *next(operands), S, scale, use_reentrant=False, preserve_rng_state=False)
            o.append(o_block)
        final_state.append(S)
    o.append(v.new_zeros(tail, *v.shape[1:]))
    return torch.cat(o), torch.stack(final_state) if final_state else initial_state


def _block(
    q: Tensor,  # [L, 1, K], L tokens of one document, from the start of a chunk on
    k: Tensor,  # [L, 1, K]
    v: Tensor,  # [L, R, V]
    g: Tensor,  # [L, R]
    beta: Tensor,  # [L, R]
    S: Tensor,  # [R, K, V]
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Walk a run of n chunks: o [L, R, V] and the state behind them [R, K, V]."""
    L = len(q)
    q, k, v, g, beta = (_by_chunks(x) for x in (q, k, v, g.clamp(min=SMALLEST_G), beta[..., None]))

    ratio = _decay_ratios(g)  # [n, R, C, C]
    from_start = g.cumsum(-1).exp()[..., None]  # [n, R, C, 1], e^G
    through = from_start[..., -1:, :]  # [n, R, 1, 1], e^{G_C}
    k_to_end = ratio[..., -1, :, None] * k  # [n, R, C, K], e^{G_C - G} K
    coupling = beta * ratio * (k @ k.mT)
    right = torch.cat((beta * from_start * k, beta * v), dim=-1)
    # Of `coupling` only what lies strictly below the diagonal is read, and ones upon it: this is A, applied.
    solved = torch.linalg.solve_triangular(coupling, right, upper=False, unitriangular=True)
    W, U = solved.split((k.shape[-1], v.shape[-1]), dim=-1)

    states, residuals = [], []
    for W_c, U_c, k_c, through_c in zip(W, U, k_to_end.mT, through, strict=True):
        R_c = U_c - W_c @ S
        states.append(S)
        residuals.append(R_c)
        S = through_c * S + k_c @ R_c
    o = scale * (from_start * (q @ torch.stack(states)) + (ratio * (q @ k.mT)) @ torch.stack(residuals))
    return o.transpose(1, 2).flatten(0, 1)[:L], S


def _by_chunks(x: Tensor) -> Tensor:
    """[L, R, ...] to [n, R, C, ...]. Zero rows fill the last chunk: with g = beta = 0 they neither decay nor write."""
    x = pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % CHUNK))
    return x.unflatten(0, (-1, CHUNK)).transpose(1, 2)


def _decay_ratios(g: Tensor) -> Tensor:
    """[n, R, C] to e^{G_i - G_j} [n, R, C, C] for j <= i, else 0.

    G_i - G_j is summed as g_{j+1} + ... + g_i, since a difference of running sums loses what follows a strong decay;
    and it is masked before it is exponentiated, since above the diagonal it is positive.
    """
    ones = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device)
    terms = g[..., :, None].masked_fill(~ones.tril(-1), 0.0)  # g_i in row i, left of the diagonal
    return terms.cumsum(-2).masked_fill(~ones.tril(), -torch.inf).exp()
