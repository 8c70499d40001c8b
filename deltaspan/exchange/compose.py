"""Folding affine summaries along every document's chain, in its order; for the adjoint transposed and reversed."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from deltaspan.exchange.seams import Seams

Merge: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]  # (M, X, b) -> M X + b


def compose_states(merge: Merge, M: Tensor, b: Tensor, links: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Entry states of all fragments that state enters, from the summaries of all that it leaves.

    M [N, heads, K, K], b [N, heads, K, V], counted by out number -> [N, heads, K, V], counted by in number.
    X = b of the chain's first fragment, then X <- M X + b, each handed to the next fragment.
    """
    entry, state = b.new_empty(b.shape), None
    for out, entered in links:
        state = b[out] if state is None else merge(M[out], state[: len(out)], b[out])
        entry[entered] = state
    return entry


def compose_adjoints(merge: Merge, M: Tensor, d: Tensor, links: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Adjoints of the exit states of all fragments that state leaves, from the adjoint offsets of all that it enters.

    M [N, heads, K, K] by out number, d [N, heads, K, V] by in number -> [N, heads, K, V] by out number.
    X = d of the chain's last fragment, then X <- M^T X + d, each handed to the fragment before.
    """
    leaving, state = d.new_empty(d.shape), None
    for out, entered, entered_out in links:
        state = d[entered] if state is None else merge(M[entered_out].mT, state[: len(out)], d[entered])
        leaving[out] = state
    return leaving


def join_pairs(M: Tensor, b: Tensor) -> Tensor:
    """M [n, heads, K, K] and b [n, heads, K, V] as one row a head, [n, heads, K (K + V)]."""
    return torch.cat([M.flatten(2), b.flatten(2)], dim=-1)


def split_pairs(pairs: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `join_pairs`, with the K and V of states `like` [..., K, V]."""
    K, V = like.shape[-2:]
    return pairs[..., : K * K].unflatten(-1, (K, K)), pairs[..., K * K :].unflatten(-1, (K, V))


def flat_sizes(seams: Seams, d: Tensor) -> list[int]:
    """By rank, the numbers of one head in what `join_flat` makes."""
    K, V = d.shape[-2:]
    return [n_in * K * V + n_through * K * K for n_in, n_through in zip(seams.n_in, seams.n_through, strict=True)]


def join_flat(d: Tensor, M: Tensor) -> Tensor:
    """d [n_in, heads, K, V] and M [n_through, heads, K, K] as one row of numbers."""
    return torch.cat([d.flatten(), M.flatten()])


def split_flat(arrived: Tensor, seams: Seams, heads: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse for all ranks' rows in turn: d [N_in, heads, K, V], and M [N_out, heads, K, K], defined for fragments
    that state enters and leaves."""
    K, V = like.shape[-2:]
    rows = arrived.split([heads * n for n in flat_sizes(seams, like)])
    sizes = [heads * n * K * V for n in seams.n_in]
    pairs = [row.split([size, len(row) - size]) for row, size in zip(rows, sizes, strict=True)]
    d, through = (torch.cat(column) for column in zip(*pairs, strict=True))
    M = like.new_empty(sum(seams.n_out), heads, K, K)
    M[seams.through] = through.view(len(seams.through), heads, K, K)
    return d.view(sum(seams.n_in), heads, K, V), M
