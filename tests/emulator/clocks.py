"""Who knows what has happened: vector clocks, which find accesses that nothing orders, whatever order a run had.

An agent does things one after another and counts them: a partition, its warpgroup_mma, its TMA stores, or the TMA loads
of one barrier. Knowledge says up to which count of each agent everything has happened before. It spreads by mbarriers
(what who arrives knows, who waits learns) and by waiting for one's own asynchronous work. An access is in order if what
it conflicts with is known; if not, some timing breaks it, though perhaps not this run's.

Generic accesses (loads and stores of a partition) reach the asynchronous units only through fence_async_shared.
`fenced` holds what is known and was followed by such a fence.
"""

from collections import Counter
from typing import NamedTuple


class Agent(NamedTuple):
    """Who reads and writes shared memory."""

    name: str
    generic: bool = False  # by loads and stores, which asynchronous units see only after a fence


class Knowledge:
    """Counts of each agent, up to which everything has happened (`known`) and is visible to asynchronous units."""

    def __init__(self) -> None:
        self.known: Counter[Agent] = Counter()
        self.fenced: Counter[Agent] = Counter()

    def copy(self) -> "Knowledge":
        other = Knowledge()
        other.learn(self)
        return other

    def learn(self, other: "Knowledge") -> None:
        self.known |= other.known
        self.fenced |= other.fenced

    def fence(self) -> None:
        self.fenced |= self.known

    def seen(self, agent: Agent, asynchronously: bool) -> int:
        """Up to which count of that agent's doing may be relied on."""
        return (self.fenced if asynchronously and agent.generic else self.known)[agent]
