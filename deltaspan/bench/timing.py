"""How long calls take: sides interleaved, each sample a sum of phases in which the slowest rank counts.

The L2 cache is not flushed between samples: the sides' operands do not fit in it, and training does not flush it
either. On a CUDA device nothing waits between samples, so that what the host does is hidden where the device is busy.

Every side's backward runs on the thread that asks for it. By default torch hands it to a thread of the device's, on
another core, where what Python reads is in no cache: on an H200's host a short step then took it up to 1.5 times as
long, more in some processes than in others.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import torch

WARM_UP = 2
FEWEST_SAMPLES = 8
STEADY = (0.99, 1.01)

Mark = Any  # of a stopwatch
Phases = Sequence[Sequence[tuple[Mark, Mark]]]
"""Of one call: for each phase, up to a collective at which ranks wait for each other, every rank's start and stop."""


class Stopwatch:
    """Marks on a device's time line: events of a CUDA device, the host's clock on a CPU."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def mark(self) -> Mark:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Until all marks have been passed."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def ms(self, start: Mark, stop: Mark) -> float:
        return start.elapsed_time(stop) if self.on_gpu else 1e3 * (stop - start)

    def around(self, call: Callable[[], object]) -> Phases:
        """One phase of one rank."""
        start = self.mark()
        call()
        return [[(start, self.mark())]]


@dataclass
class Samples:
    """One side's samples, in milliseconds."""

    ms: list[float] = field(default_factory=list)
    rank_ms: list[list[float]] = field(default_factory=list)  # by sample and rank

    @property
    def median(self) -> float:
        return median(self.ms)

    def spread(self) -> dict[str, float]:
        low, _, high = quantiles(self.ms, n=4, method="inclusive")
        return {"min": min(self.ms), "quartile_1": low, "quartile_3": high, "max": max(self.ms)}

    def slowest_rank(self) -> int:
        by_rank = [median(times) for times in zip(*self.rank_ms, strict=True)]
        return by_rank.index(max(by_rank))


def orders(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """The sides' order in each round: every rotation, then every rotation of the reverse, and again.

    In as many rounds as there are rotations of both, or a multiple, each side is first, second and so on equally often,
    and directly follows its neighbour on the left as often as that on the right.
    """
    for i in range(rounds if names else 0):
        turn, shift = divmod(i, len(names))
        circle = names[::-1] if turn % 2 else names
        yield [*circle[shift:], *circle[:shift]]


def interleave(sides: Mapping[str, Callable[[], Phases]], stopwatch: Stopwatch, samples: int) -> dict[str, Samples]:
    """Times all sides, by name, in one loop: `WARM_UP` rounds that do not count, then at least `samples` that do.

    They are as many as let every side have every turn equally often: a multiple of twice the number of sides.
    """
    counted: list[tuple[str, Phases]] = []
    turns = 2 * len(sides) or 1
    rounds = -(-samples // turns) * turns
    with torch.autograd.set_multithreading_enabled(False):
        for i, order in enumerate(orders(list(sides), WARM_UP + rounds)):
            for name in order:
                phases = sides[name]()
                if i >= WARM_UP:
                    counted.append((name, phases))
    stopwatch.wait()
    taken = {name: Samples() for name in sides}
    for name, phases in counted:
        times = [[stopwatch.ms(*interval) for interval in ranks] for ranks in phases]
        taken[name].ms.append(sum(map(max, times)))
        taken[name].rank_ms.append([sum(of_rank) for of_rank in zip(*times, strict=True)])
    return taken


def is_steady(ratio: float) -> bool:
    """Whether a side and its control, the same calls, took the same time."""
    return STEADY[0] <= ratio <= STEADY[1]


def peak_mib(call: Callable[[], object], device: str) -> float | None:
    """MiB that a call allocates at its peak, its results included, above what is there before; None on a CPU."""
    if device != "cuda":
        return None
    gc.collect()  # what an earlier call left in reference cycles would be freed during this one
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / (1 << 20)
