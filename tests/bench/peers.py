"""Peers for the tests, by the protocol of real ones: one that is right, one that is wrong, one that raises."""

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

import deltaspan as ds
from deltaspan.bench.operands import Operands, Results
from deltaspan.bench.sides import Deltaspan


class Right:
    """By deltaspan's own operation."""

    name, phases = "right", ("forward", "step")

    def __init__(self, lengths: Sequence[int], device: str) -> None:
        part = ds.partition([0, *accumulate(lengths)], 1)
        self.side = Deltaspan(ds.build_context(part, device=device))

    @classmethod
    def refusal(cls, device: str) -> str | None:
        return None

    @classmethod
    def version(cls) -> str:
        return "1.2.3"

    def forward(self, x: Operands) -> Tensor:
        return self.side.forward(x)

    def step(self, x: Operands) -> Results:
        return self.side.step(x)


class Wrong(Right):
    """Its o is right, and its dk of the last key head is 2 % too long."""

    name = "wrong"

    def step(self, x: Operands) -> Results:
        found = super().step(x)
        dk = found.dk.float()
        dk[:, :, -1] *= 1.02
        return found._replace(dk=dk)


class Hasty(Right):
    """Right where gradients are recorded, wrong in a forward by itself."""

    name = "hasty"

    def forward(self, x: Operands) -> Tensor:
        return super().forward(x).roll(1, dims=1)


class ForwardOnly(Right):
    name, phases = "forward_only", ("forward",)

    def step(self, x: Operands) -> Results:
        raise AssertionError("it said that it has none")


class Raising(Right):
    name = "raising"

    def step(self, x: Operands) -> Results:
        raise RuntimeError("no such shape\nand more that nobody reads")


class Missing(Right):
    name = "missing"

    @classmethod
    def refusal(cls, device: str) -> str | None:
        return "it was never written"
