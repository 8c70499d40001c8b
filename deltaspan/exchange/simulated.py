"""All ranks of a group in one process, in lockstep: a collective is carried out once every rank has asked for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltaspan.exchange.collectives import AllGather, AllToAll, Collective, Program, describe, one_by_one


class SimulatedGroup:
    """A group of `world_size` ranks that all live here, as the oracle of real groups and for work without any.

    With it the operands and results of every call are lists of `world_size` shards.
    """

    beside = True  # nothing is gained here, but work is divided as on real ranks

    def __init__(self, world_size: int) -> None:
        if not isinstance(world_size, int) or isinstance(world_size, bool):
            raise TypeError(f"world_size must be an int, got {type(world_size).__name__}")
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.ranks = tuple(range(world_size))

    def __repr__(self) -> str:
        return f"SimulatedGroup({self.world_size})"

    def default_device(self) -> torch.device:
        """Where its ranks' operands are expected: the current CUDA device where there is one, else the CPU."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def begin(self) -> None:
        """Nothing to count."""

    def announce(self, error: BaseException, device: torch.device) -> None:
        """Nobody waits: a rank that raises ends the call of all."""

    def run(self, programs: Sequence[Program]) -> list[Any]:
        """Runs one program a rank to its end.

        Raises:
            RuntimeError: ranks that ask for different collectives, or do not agree on what one sends another.
        """
        arrived: list[Tensor | None] = [None] * self.world_size
        programs = [*map(one_by_one, programs)]
        while True:
            asked, results = [], []
            for program, value in zip(programs, arrived, strict=True):
                try:
                    asked.append(program.send(value))
                except StopIteration as end:
                    results.append(end.value)
            if not asked:
                return results
            self._check(asked)
            arrived = _exchange(asked) if isinstance(asked[0], AllToAll) else _gather(asked)

    def _check(self, asked: Sequence[Collective]) -> None:
        if len(asked) != self.world_size:
            raise RuntimeError(
                f"{asked[0].name}: {self.world_size - len(asked)} of {self.world_size} ranks take no part"
            )
        for rank, other in enumerate(map(describe, asked)):
            if other != describe(asked[0]):
                raise RuntimeError(f"rank {rank} asks for {other}, rank 0 for {describe(asked[0])}")


def _exchange(asked: Sequence[AllToAll]) -> list[Tensor]:
    blocks = [c.send.split(c.send_counts) for c in asked]
    for i, sender in enumerate(asked):
        for j, receiver in enumerate(asked):
            if sender.send_counts[j] != receiver.recv_counts[i]:
                raise RuntimeError(
                    f"{sender.name}: rank {i} sends {sender.send_counts[j]} rows to rank {j}, "
                    f"which expects {receiver.recv_counts[i]}"
                )
    return [torch.cat([blocks[i][j] for i in range(len(asked))]) for j in range(len(asked))]


def _gather(asked: Sequence[AllGather]) -> list[Tensor]:
    for rank, c in enumerate(asked):
        if c.counts != asked[0].counts or len(c.send) != c.counts[rank]:
            raise RuntimeError(
                f"{c.name}: rank {rank} sends {len(c.send)} rows and expects {c.counts}, rank 0 {asked[0].counts}"
            )
    return [torch.cat([c.send for c in asked]) for _ in asked]
