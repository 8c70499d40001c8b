"""States by head owners: summaries to the owners of the heads, entry states back; the same backwards for adjoints.

The value heads are divided over the ranks. A head's owner receives that head's summary of every crossing fragment of
the group, composes them along the documents' chains, and answers every fragment with the state that enters it.
"""

import torch
from torch import Tensor

from deltaspan.exchange.collectives import AllToAll, Program
from deltaspan.exchange.compose import (
    Affine,
    by_owners,
    flat_sizes,
    join_flat,
    join_pairs,
    split_flat,
    split_pairs,
)
from deltaspan.exchange.seams import Seams
from deltaspan.plan import head_ranges


def carry_states(seams: Seams, affine: Affine, M: Tensor, b: Tensor, about: str) -> Program[tuple[Tensor, Tensor]]:
    """From this rank's summaries M [n_through, HV, K, K], b [n_out, HV, K, V] to its entry states [n_in, HV, K, V].

    Also returns what the adjoint needs, the pairs that this rank received as an owner: [N_out, own heads, K (K + V)].
    about: what else the ranks must have in common, compared over gloo.
    """
    pairs = join_pairs(M, b, seams, len(seams.n_out))
    pairs = yield from _to_owners("summaries", seams, seams.n_out, pairs, b.shape[1], about)
    _, entry, _ = affine.chain(*split_pairs(pairs, b), seams.forward, maps=False)
    return (yield from _to_homes("entry_states", seams, seams.n_in, entry, b.shape[1], about)), pairs


def carry_adjoints(
    seams: Seams, affine: Affine, kept: Tensor | None, M: Tensor | None, d: Tensor, about: str
) -> Program[Tensor]:
    """As `states.carry_adjoints` says."""
    if kept is None:
        offsets, maps = yield from _with_maps(seams, M, d, about)
    else:
        offsets = by_owners(len(seams.n_in), d.flatten(2))
        offsets = yield from _to_owners("adjoint_offsets", seams, seams.n_in, offsets, d.shape[1], about)
        offsets = offsets.unflatten(2, d.shape[2:])
        maps = split_pairs(kept, d)[0]
    _, leaving, _ = affine.chain(maps.mT, offsets, seams.backward, maps=False)
    return (yield from _to_homes("exit_adjoints", seams, seams.n_out, leaving, d.shape[1], about))


def _to_owners(name: str, seams: Seams, counts: tuple[int, ...], rows: Tensor, HV: int, about: str) -> Program[Tensor]:
    """Rows by owners, then own fragments and heads, [n HV, numbers] -> [all fragments, own heads, numbers] at them."""
    heads = list(map(len, head_ranges(HV, len(counts))))
    here, own = counts[seams.rank], heads[seams.rank]
    arrived = yield AllToAll(name, rows, tuple(here * n for n in heads), tuple(n * own for n in counts), about)
    return arrived.unflatten(0, (sum(counts), own))


def _with_maps(seams: Seams, M: Tensor, d: Tensor, about: str) -> Program[tuple[Tensor, Tensor]]:
    """d to the owners, beside the maps of the fragments that state enters and leaves: as single numbers, since the two
    have rows of different lengths. Returns d [N_in, own heads, K, V] and, by out number, M [N_out, own heads, K, K]."""
    heads = head_ranges(d.shape[1], len(seams.n_in))
    own = len(heads[seams.rank])
    blocks = [join_flat(d[:, h.start : h.stop], M[:, h.start : h.stop]) for h in heads]
    numbers = [own * n for n in flat_sizes(seams, d)]
    arrived = yield AllToAll("adjoint_offsets", torch.cat(blocks), tuple(map(len, blocks)), tuple(numbers), about)
    return split_flat(arrived, seams, own, d)


def _to_homes(name: str, seams: Seams, counts: tuple[int, ...], tiles: Tensor, HV: int, about: str) -> Program[Tensor]:
    """[all fragments, own heads, ...] at the owners -> [own fragments, HV, ...] here."""
    here, heads = counts[seams.rank], head_ranges(HV, len(counts))
    own, rows = len(heads[seams.rank]), tuple(here * len(h) for h in heads)
    arrived = yield AllToAll(name, tiles.flatten(0, 1), tuple(n * own for n in counts), rows, about)
    blocks = [x.unflatten(0, (here, len(h))) for x, h in zip(arrived.split(rows), heads, strict=True)]
    return torch.cat(blocks, dim=1)
