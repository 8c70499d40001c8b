"""Rows that a causal convolution reads across a fragment's edges: history before it, gradients after it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaspan.exchange.collectives import AllToAll, Program


@dataclass(frozen=True, eq=False)
class HaloRoute:
    """Which local rows go to which rank, and how many come back, in one direction."""

    send_index: Tensor  # [sum(send_counts)] int64, local tokens
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    none: bool  # no row crosses anywhere in the group: then no rank asks for a collective


def fetch_rows(name: str, route: HaloRoute, tensors: Sequence[Tensor]) -> Program[list[Tensor]]:
    """Rows that this rank's fragments need of others, of several tensors [T, D_i] side by side in one collective.

    `halo`: the rows before its fragments, forward; `halo_gradient`: the gradients before the activation of the tokens
    after them, backward. Returns [received, D_i] for each tensor.
    """
    if route.none:
        return [x[:0] for x in tensors]
    rows = torch.cat([x[route.send_index] for x in tensors], dim=1)
    arrived = yield AllToAll(name, rows, route.send_counts, route.recv_counts)
    return list(arrived.split([x.shape[1] for x in tensors], dim=1))
