"""The collectives a program may ask for. Each names itself, so that an error can say where a group broke apart."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch import Tensor


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Rank i's rows for rank j go there; what arrives stands in the order of its senders.

    send [sum(send_counts), ...] -> [sum(recv_counts), ...]; counts are rows by peer, W of each.
    """

    name: str
    send: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    about: str = ""  # what else the ranks must have in common

    @property
    def arriving(self) -> int:
        """Rows that this rank receives."""
        return sum(self.recv_counts)


class PeerToPeer(AllToAll):
    """The same between few: only ranks with rows for each other exchange any."""


@dataclass(frozen=True, eq=False)
class AllGather:
    """Every rank's rows go to all: send [counts[rank], ...] -> [sum(counts), ...], in the order of ranks."""

    name: str
    send: Tensor
    counts: tuple[int, ...]
    about: str = ""  # what else the ranks must have in common

    @property
    def arriving(self) -> int:
        """Rows that every rank receives."""
        return sum(self.counts)


Collective: TypeAlias = AllToAll | PeerToPeer | AllGather


def describe(asked: Collective) -> str:
    """What all ranks that take part must ask for alike."""
    rows = f"{asked.send.dtype} rows {list(asked.send.shape[1:])}".removeprefix("torch.")
    return f"{type(asked).__name__} {asked.name!r} of {rows}{asked.about and ', ' + asked.about}"


Result = TypeVar("Result")
Program: TypeAlias = Generator[Collective, Tensor, Result]
