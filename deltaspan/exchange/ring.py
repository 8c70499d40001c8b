"""States hand over hand: each fragment's exit state goes to the next one's rank, link by link along every chain.

The maps M stay at home. Chains advance side by side, one link a hop, any number of hops; a neighbour on the same rank
is a hop like any other.
"""

from torch import Tensor

from deltaspan.exchange.collectives import PeerToPeer, Program
from deltaspan.exchange.compose import Affine
from deltaspan.exchange.seams import Seams


def carry_states(seams: Seams, affine: Affine, M: Tensor, b: Tensor, about: str) -> Program[tuple[Tensor, Tensor]]:
    """As `all_to_all.carry_states`; what the adjoint needs are this rank's own maps M [n_through, HV, K, K]."""
    entry = b.new_empty(seams.n_in[seams.rank], *b.shape[1:])
    for number, hop in enumerate(seams.hops[0]):
        out = hop.source
        exit = b[out] if hop.first else affine.merge(M[hop.through], entry[hop.source_in], b[out])
        entry[hop.target] = yield PeerToPeer(
            f"entry_states, hop {number}", exit, hop.send_counts, hop.recv_counts, about
        )
    kept = M if M.nbytes == M.untyped_storage().nbytes() else M.clone()  # not with what else lies beside it
    return entry, kept


def carry_adjoints(
    seams: Seams, affine: Affine, kept: Tensor | None, M: Tensor | None, d: Tensor, about: str
) -> Program[Tensor]:
    """As `all_to_all.carry_adjoints`, but that maps are at home, kept or not."""
    maps = M if kept is None else kept
    leaving = d.new_empty(seams.n_out[seams.rank], *d.shape[1:])
    for number, hop in enumerate(seams.hops[1]):
        entered, out = hop.source, hop.source_in
        back = d[entered] if hop.first else affine.merge(maps[hop.through].mT, leaving[out], d[entered])
        leaving[hop.target] = yield PeerToPeer(
            f"exit_adjoints, hop {number}", back, hop.send_counts, hop.recv_counts, about
        )
    return leaving
