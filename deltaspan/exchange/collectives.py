"""The collectives a program may ask for. Each names itself, so that an error can say where a group broke apart."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

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


@dataclass(frozen=True, eq=False)
class Beside:
    """Asks for a program to be run beside what the asking one does next. Yielded, it gives an `Ongoing`.

    Every rank of a group asks alike, also one that has nothing to do meanwhile.
    """

    program: Callable[..., "Program"]
    operands: tuple[Any, ...]
    worth: bool  # whether there is something to do meanwhile


@dataclass(frozen=True, eq=False)
class Ongoing:
    """Yielded, it gives the result of what was asked for `Beside`, which is waited for."""

    result: Any
    operands: tuple[Any, ...] = ()  # which live as long as they may be read
    end: Any = None  # the mark of a device's stream behind which the result stands; None: it is there


Result = TypeVar("Result")
Program: TypeAlias = Generator[Collective | Beside | Ongoing, Any, Result]


def one_by_one(program: Program[Result]) -> Program[Result]:
    """The same program for a group that does nothing beside anything else: it yields collectives alone."""
    arrived = None
    while True:
        try:
            asked = program.send(arrived)
        except StopIteration as end:
            return end.value
        if isinstance(asked, Beside):
            arrived = Ongoing((yield from asked.program(*asked.operands)))
        elif isinstance(asked, Ongoing):
            arrived = asked.result
        else:
            arrived = yield asked
