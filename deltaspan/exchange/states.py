"""How states cross ranks: summaries to the owners of the heads, entry states back; the same backwards for adjoints.

The value heads are divided over the ranks. A head's owner receives that head's summary of every crossing fragment of
the group, composes them along the documents' chains, and answers every fragment with the state that enters it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from deltaspan.exchange.collectives import AllToAll, Program
from deltaspan.exchange.compose import Merge, compose_adjoints, compose_states


@dataclass(frozen=True, eq=False)
class Crossings:
    """One rank's view of all seams of the group.

    Seams are counted once as left (out numbers) and once as entered (in numbers), rank by rank.
    """

    rank: int
    n_out: tuple[int, ...]  # by rank, fragments that state leaves
    n_in: tuple[int, ...]  # by rank, fragments that state enters
    forward: tuple[tuple[Tensor, Tensor], ...]  # by step: out numbers, in numbers (plan.Links, int64)
    backward: tuple[
        tuple[Tensor, Tensor, Tensor], ...
    ]  # by step: out numbers, in numbers, out numbers of those entered

    @property
    def none(self) -> bool:
        """True if no state crosses anywhere in the group: then no rank asks for a collective."""
        return not self.forward


def carry_states(
    seams: Crossings, heads: list[range], merge: Merge, M: Tensor, b: Tensor
) -> Program[tuple[Tensor, Tensor]]:
    """From this rank's summaries M [n_out, HV, K, K], b [n_out, HV, K, V] to its entry states [n_in, HV, K, V].

    Also returns what this rank received as the owner of its heads, for the backward: [N_out, own heads, K (K + V)] flat
    pairs.
    """
    if seams.none:
        return b.new_empty(0, *b.shape[1:]), b.new_empty(0)
    pairs = torch.cat([M.flatten(2), b.flatten(2)], dim=-1)
    received = yield from _to_owners("summaries", seams, heads, seams.n_out, pairs)
    entry = compose_states(merge, *_split_pairs(received, b), seams.forward)
    return (yield from _to_homes("entry_states", seams, heads, seams.n_in, entry)), received


def carry_adjoints(seams: Crossings, heads: list[range], merge: Merge, received: Tensor, d: Tensor) -> Program[Tensor]:
    """From the adjoints d [n_in, HV, K, V] of this rank's entered fragments, taken with no adjoint from beyond their
    ends, to the adjoints [n_out, HV, K, V] of its exit states. `received` is what `carry_states` kept."""
    if seams.none:
        return d.new_empty(0, *d.shape[1:])
    offsets = yield from _to_owners("adjoint_offsets", seams, heads, seams.n_in, d)
    leaving = compose_adjoints(merge, _split_pairs(received, d)[0], offsets, seams.backward)
    return (yield from _to_homes("exit_adjoints", seams, heads, seams.n_out, leaving))


def _split_pairs(pairs: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    K, V = like.shape[-2:]
    return pairs[..., : K * K].unflatten(-1, (K, K)), pairs[..., K * K :].unflatten(-1, (K, V))


def _to_owners(
    name: str, seams: Crossings, heads: list[range], counts: tuple[int, ...], tiles: Tensor
) -> Program[Tensor]:
    """[own fragments, HV, ...] here -> [all fragments, own heads, ...] at the owners."""
    own = len(heads[seams.rank])
    blocks = [tiles[:, h.start : h.stop].flatten(0, 1) for h in heads]
    arrived = yield AllToAll(name, torch.cat(blocks), tuple(map(len, blocks)), tuple(n * own for n in counts))
    return arrived.unflatten(0, (sum(counts), own))


def _to_homes(
    name: str, seams: Crossings, heads: list[range], counts: tuple[int, ...], tiles: Tensor
) -> Program[Tensor]:
    """[all fragments, own heads, ...] at the owners -> [own fragments, HV, ...] here."""
    here, own = counts[seams.rank], len(heads[seams.rank])
    arrived = yield AllToAll(
        name, tiles.flatten(0, 1), tuple(n * own for n in counts), tuple(here * len(h) for h in heads)
    )
    blocks = arrived.split([here * len(h) for h in heads])
    return torch.cat([x.unflatten(0, (here, len(h))) for x, h in zip(blocks, heads, strict=True)], dim=1)
