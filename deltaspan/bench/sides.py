"""Who is timed: a side computes outputs and gradients of a shard, and deltaspan is one, on one rank or on all."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from deltaspan.bench.operands import Operands, Results
from deltaspan.bench.timing import Phases, Stopwatch
from deltaspan.exchange import Program, SimulatedGroup, one_by_one


class Side(Protocol):
    """What is timed and judged. It keeps nothing between calls but what does not depend on the operands' values."""

    name: str
    phases: Sequence[str]  # which of "forward" and "step" it has

    def forward(self, x: Operands) -> Tensor:
        """o, with nothing kept for a backward."""

    def step(self, x: Operands) -> Results:
        """A checkpointed training step: forward without saving, forward again, backward."""


class TimedGroup(SimulatedGroup):
    """A simulated group that marks when each rank computes. What moves between ranks falls between the marks."""

    beside = False  # ranks run one after another, so that nothing does anything meanwhile

    def __init__(self, world_size: int, stopwatch: Stopwatch) -> None:
        super().__init__(world_size)
        self._stopwatch = stopwatch
        self._phases: list[list[tuple[Any, Any]]] = []

    def run(self, programs: Sequence[Program]) -> list[Any]:
        first = len(self._phases)
        return super().run([self._timed(one_by_one(program), first) for program in programs])

    def _timed(self, program: Program, phase: int) -> Generator:
        """The same program; ranks run one after another, so that each phase's marks are in the order of ranks."""
        arrived = None
        while True:
            if phase == len(self._phases):
                self._phases.append([])
            start, end = self._stopwatch.mark(), None
            try:
                asked = program.send(arrived)
            except StopIteration as finished:
                end = finished
            self._phases[phase].append((start, self._stopwatch.mark()))
            if end is not None:
                return end.value
            arrived = yield asked
            phase += 1

    def during(self, call: Callable[[], object]) -> Phases:
        """The phases of one call."""
        self._phases = []
        call()
        return self._phases


class Deltaspan:
    """This package on a context: its operands and results are tensors, or lists of shards where ranks are simulated.

    exchange: by which states cross. handle: whether a step's recompute asks for nothing, by a `RecomputeHandle`.
    """

    name, phases = "deltaspan", ("forward", "step")

    def __init__(
        self, ctx: ds.Context, backend: str = "auto", exchange: str = "all_to_all", handle: bool = False
    ) -> None:
        self.ctx, self.handle = ctx, handle
        self.options = {"backend": backend, "exchange": exchange}

    def forward(self, x: Operands) -> Tensor:
        with torch.no_grad():
            return self._rule(*x[:5])

    def step(self, x: Operands) -> Results:
        leaves = [_leaf(t) for t in x[:5]]
        rule = partial(self._rule, recompute_handle=ds.RecomputeHandle() if self.handle else None)
        o = checkpoint(rule, *leaves, use_reentrant=False, preserve_rng_state=False)  # nothing here is random
        if self.ctx.rank is not None:
            return Results(o.detach(), *torch.autograd.grad(o, leaves, x.do))
        flat = iter(torch.autograd.grad(o, [shard for shards in leaves for shard in shards], x.do))
        return Results([shard.detach() for shard in o], *([next(flat) for _ in shards] for shards in leaves))

    def _rule(self, *operands: Tensor, recompute_handle: ds.RecomputeHandle | None = None) -> Tensor:
        o, _ = ds.chunk_gated_delta_rule(*operands, self.ctx, recompute_handle=recompute_handle, **self.options)
        return o

    def sharded(self, x: Operands) -> Operands:
        """As the context's ranks hold a pack's operands."""
        return x if self.ctx.part.world_size == 1 else Operands(*map(self.ctx.shard, x))

    def whole(self, x: Tensor | list[Tensor]) -> Tensor:
        """A result in the pack's order."""
        if not isinstance(x, list):
            return x
        ids = [torch.from_numpy(self.ctx.part.token_ids(rank).copy()) for rank in range(len(x))]
        return torch.cat(x, dim=1)[:, torch.cat(ids).argsort().to(x[0].device)]


def _leaf(x: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    """The same numbers in the same place, wanting a gradient."""
    return [_leaf(shard) for shard in x] if isinstance(x, list) else x.detach().requires_grad_()
