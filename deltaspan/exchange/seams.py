"""Where state crosses between fragments, as one rank of the group sees it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from deltaspan.plan import Chains


class Hop(NamedTuple):
    """One step of the ring: the fragments here whose neighbour is one link away, and how many rows each peer gets."""

    first: bool  # the first step: no state has come from an earlier one
    source: Tensor  # [sent] int64, local numbers of the fragments whose state goes out, in the order sent
    source_in: Tensor  # [sent] int64, the same fragments' numbers among those that the hop before reached
    through: Tensor  # [sent] int64, and among those that state enters and leaves; both mean nothing in the first step
    target: Tensor  # [received] int64, local numbers of the fragments that are reached, in the order of arrival
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Seams:
    """One rank's view of all seams of the group.

    A seam is left by one fragment and enters the next. Seams are counted over the group once by the fragments that
    state leaves (out numbers) and once by those that it enters (in numbers), rank by rank.
    """

    rank: int
    n_out: tuple[int, ...]  # by rank, fragments that state leaves
    n_in: tuple[int, ...]  # by rank, fragments that state enters
    n_through: tuple[int, ...]  # by rank, fragments that it enters and leaves
    through: Tensor  # int64, the out numbers of those of all ranks, rank by rank
    own_through: Tensor  # int64, this rank's, counted among its own left fragments
    forward: Chains[Tensor]  # of plan.Links
    backward: Chains[Tensor]
    make_hops: Callable[[], tuple[tuple[Hop, ...], tuple[Hop, ...]]]  # only a ring asks for them

    @property
    def none(self) -> bool:
        """True if no state crosses anywhere in the group: then no rank asks for a collective."""
        return not self.forward.steps

    @cached_property
    def hops(self) -> tuple[tuple[Hop, ...], tuple[Hop, ...]]:
        """The ring's steps here, forward and backward."""
        return self.make_hops()
