"""Between a rank's tokens and the whole pack."""

import torch
from torch import Tensor

from deltaspan.exchange.collectives import AllGather, AllToAll, Program


def gather_tokens(x: Tensor, counts: tuple[int, ...], place: Tensor) -> Program[Tensor]:
    """x [counts[rank], ...] of every rank -> [total, ...]; place [total] int64: where each token stands among all
    ranks' rows."""
    return (yield AllGather("unshard", x, counts))[place]


def scatter_gradient(whole: Tensor, rank: int, counts: tuple[int, ...], order: Tensor) -> Program[Tensor]:
    """The gradient of `gather_tokens`: every rank's gradient of the whole [total, ...] -> the sum over ranks, in their
    order, of this rank's tokens [counts[rank], ...]; order [total] int64: the token in each place of all ranks'
    rows."""
    mine = counts[rank]
    arrived = yield AllToAll("unshard_gradient", whole[order], counts, (mine,) * len(counts))
    wide = torch.promote_types(whole.dtype, torch.float32)
    first, *others = arrived.split(mine) if mine else [arrived]
    total = first.to(wide)
    for share in others:
        total = total + share
    return total.to(whole.dtype)
