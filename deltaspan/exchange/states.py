"""The exchanges by name: three ways to hand the same states across ranks, with the same bits."""

from torch import Tensor

from deltaspan.exchange import all_gather, all_to_all, ring
from deltaspan.exchange.collectives import Program
from deltaspan.exchange.compose import Affine
from deltaspan.exchange.seams import Seams

EXCHANGES = {"all_to_all": all_to_all, "ring": ring, "all_gather": all_gather}


def carry_states(
    exchange: str, seams: Seams, affine: Affine, M: Tensor, b: Tensor, about: str
) -> Program[tuple[Tensor, Tensor]]:
    """From this rank's summaries to its entry states [n_in, HV, K, V], and what `carry_adjoints` needs of them.

    M [n_through, HV, K, K]: maps of fragments that state enters and leaves. b [n_out, HV, K, V]: of all that it leaves.
    about: what else the ranks must have in common, in words.
    """
    return (yield from EXCHANGES[exchange].carry_states(seams, affine, M, b, about))


def carry_adjoints(
    exchange: str, seams: Seams, affine: Affine, kept: Tensor | None, M: Tensor | None, d: Tensor, about: str
) -> Program[Tensor]:
    """From the adjoints d [n_in, HV, K, V] of this rank's entered fragments, taken with no adjoint from beyond their
    ends, to the adjoints [n_out, HV, K, V] of its exit states.

    kept: the second result of `carry_states`; None if it was not kept. Then M are its maps again, sent where others
    compose them.
    """
    return (yield from EXCHANGES[exchange].carry_adjoints(seams, affine, kept, M, d, about))
