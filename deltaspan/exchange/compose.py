"""Affine maps of states, X -> M X + b, between ranks: what a tier does with them, and how they are packed to go out."""

from collections.abc import Iterator
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from deltaspan.exchange.seams import Seams
from deltaspan.plan import Chains, Passage, head_ranges


class Affine(Protocol):
    """What a tier does with affine maps; the bits of a result do not depend on what is computed beside it."""

    def merge(self, M: Tensor, X: Tensor, b: Tensor) -> Tensor:
        """M X + b; M [..., K, K], X and b [..., K, V]."""

    def chain(
        self, M: Tensor, b: Tensor | None, chains: Chains[Tensor], *, maps: bool, in_place: bool = False,
        apart: int | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """Composes maps M [rows, HV, K, K], or a transposed view, and offsets b [rows, HV, K, V] along chains: [places,
        HV, K, K] where they are wanted, and [places, HV, K, V]; None for what is not there. The state after a chain's
        member is what `merge` makes of the state before it; before the first there is none. in_place: every member's
        place is its offset's row, and nobody else reads the offsets, so that they may be overwritten. apart: offsets of
        places from this one on are the third result, so that they need not be kept as long; else that is None."""

    def tell(self, maps: Tensor | None, arrived: Tensor, reached: Tensor, way: Passage[Tensor]) -> None:
        """States arrived [n, HV, K, V] put into those of segments, reached [r, HV, K, V]: as they are where they
        arrive, and merged behind joints, with maps [places, HV, K, K]."""


def join_pairs(M: Tensor, b: Tensor, seams: Seams, owners: int = 1) -> Tensor:
    """M [n_through, HV, K, K] and b [n_out, HV, K, V] as one row a head, [n_out HV, K (K + V)], by owners of heads,
    then fragments. A fragment that nothing enters has zeros in the place of a map, which nobody reads."""
    maps = M.flatten(2)
    if len(M) < len(b):
        maps = maps.new_zeros(len(b), *maps.shape[1:]).index_copy_(0, seams.own_through, maps)
    return by_owners(owners, maps, b.flatten(2))


def by_owners(owners: int, *tiles: Tensor) -> Tensor:
    """Tiles [n, HV, numbers], side by side if there are several, as rows [n HV, all numbers]: by owners of heads, then
    fragments, then heads. Each of them is copied once, or twice if not all own as many."""
    n, HV = tiles[0].shape[:2]
    rows = tiles[0].new_empty(n * HV, sum(x.shape[2] for x in tiles))
    for heads, alike in _alike(head_ranges(HV, owners)):
        by_owner = alike, len(heads) // alike
        block = rows[n * heads.start : n * heads.stop].view(alike, n, by_owner[1], rows.shape[1]).transpose(0, 1)
        places = block.split([x.shape[2] for x in tiles], -1)
        for x, place in zip(tiles, places, strict=True):
            place.copy_(x[:, heads.start : heads.stop].unflatten(1, by_owner))
    return rows


def _alike(owned: list[range]) -> Iterator[tuple[range, int]]:
    """Heads of owners one after another who have as many, if any, and how many such owners."""
    for each, group in groupby(owned, len):
        ranges = list(group)
        if each:
            yield range(ranges[0].start, ranges[-1].stop), len(ranges)


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
