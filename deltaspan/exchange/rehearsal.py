"""One rank of a group without the others: for tensors of the meta device, which have shapes and no memory."""

from torch import Tensor

from deltaspan.exchange.collectives import Beside, Collective, Ongoing
from deltaspan.exchange.process_group import ProcessGroup


class Rehearsal(ProcessGroup):
    """Goes through a rank's program as a `ProcessGroup` does, and asks torch for the same memory, but sends nothing:
    what arrives has its shape."""

    def __init__(self, rank: int, world_size: int, *, beside: bool) -> None:
        """beside: whether the group works while states cross, as over NCCL; else rows travel as gloo's mail."""
        self.world_size, self.ranks, self.beside = world_size, (rank,), beside
        self._backends = "" if beside else "meta:gloo"

    def begin(self) -> None:
        """Nobody waits."""

    def announce(self, *failure: object) -> None:
        """Nobody hears."""

    def _start(self, asked: Beside) -> Ongoing:
        result = self._to_its_end(asked.program(*asked.operands))
        return Ongoing(result, asked.operands if asked.worth else ())

    def _by_mail(self, asked: Collective, send: Tensor, size: int) -> Tensor:
        return send.new_empty(asked.arriving * size)

    def _all_to_all(self, *rows: object) -> None:
        """NCCL writes to where it is told."""

    def _peer_to_peer(self, *rows: object) -> None:
        """The same."""

    def _to_all(self, rows: list[Tensor], mine: Tensor) -> None:
        mine.new_empty(len(rows), len(mine))  # torch has NCCL gather into one tensor, of which rows are copies
