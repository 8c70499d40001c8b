"""States by gathering: every rank gets every summary and composes all chains itself; one collective a direction."""

from torch import Tensor

from deltaspan.exchange.collectives import AllGather, Program
from deltaspan.exchange.compose import Affine, flat_sizes, join_flat, join_pairs, split_flat, split_pairs
from deltaspan.exchange.seams import Seams


def carry_states(seams: Seams, affine: Affine, M: Tensor, b: Tensor, about: str) -> Program[tuple[Tensor, Tensor]]:
    """As `all_to_all.carry_states`; what the adjoint needs are all pairs of the group, [N_out, HV, K (K + V)]."""
    pairs = join_pairs(M, b, seams).unflatten(0, b.shape[:2])
    pairs = yield AllGather("summaries", pairs, seams.n_out, about)
    _, entry, _ = affine.chain(*split_pairs(pairs, b), seams.forward, maps=False)
    return entry.split(seams.n_in)[seams.rank].clone(), pairs  # the whole is not kept


def carry_adjoints(
    seams: Seams, affine: Affine, kept: Tensor | None, M: Tensor | None, d: Tensor, about: str
) -> Program[Tensor]:
    """As `states.carry_adjoints` says."""
    if kept is None:
        HV = d.shape[1]
        numbers = tuple(HV * n for n in flat_sizes(seams, d))
        arrived = yield AllGather("adjoint_offsets", join_flat(d, M), numbers, about)
        offsets, maps = split_flat(arrived, seams, HV, d)
    else:
        offsets = yield AllGather("adjoint_offsets", d, seams.n_in, about)
        maps = split_pairs(kept, d)[0]
    _, leaving, _ = affine.chain(maps.mT, offsets, seams.backward, maps=False)
    return leaving.split(seams.n_out)[seams.rank]
