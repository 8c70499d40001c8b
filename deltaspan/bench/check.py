"""Whether a side computes what it is timed for: its output and gradients against float64, on some of the heads.

The bound is that of the bf16 class. An operand, a product's factor or a result that is rounded to bf16 is off by up to
2^-8, 1.7e-3 of RMS; some five to ten such roundings lie between the operands and each result, and add as a random walk
to 4e-3 to 6e-3, which is what sound kernels show on long packs in both regimes of decay. 1e-2 leaves room for nothing
more: a decay left out, a lost state or a group summed wrongly is off by several times that.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from deltaspan.bench.operands import Operands
from deltaspan.reference import HeadSlab, chunked_gated_delta_rule, head_slabs

BOUND = 1e-2
TINY = sys.float_info.min  # dg is zero throughout if every document is one token


class Output(NamedTuple):
    """Of a `HeadSlab`, where nobody wants gradients."""

    o: Tensor  # [T, R, V]


@dataclass(frozen=True)
class Truth:
    """Results in float64 of some key heads and their value heads."""

    key_heads: list[int]
    slabs: list[HeadSlab] | list[Output]

    @classmethod
    def of(cls, x: Operands, cu_seqlens: Sequence[int], *, gradients: bool = True) -> Truth:
        """By the float64 oracle, on the operands' device, for the first and the last key head and their value heads.
        Without `gradients` the output alone.

        These two are where a wrong group or an offset that overflows would show; all heads would take some 25 s for
        128,000 tokens on an H200.
        """
        H, HV = x.q.shape[2], x.v.shape[2]
        heads, R = sorted({0, H - 1}), HV // H
        value_heads = [h * R + i for h in heads for i in range(R)]
        q, k = (t[:, :, heads] for t in (x.q, x.k))
        v, g, beta, do = (t[:, :, value_heads] for t in (x.v, x.g, x.beta, x.do))
        if not gradients:
            o = chunked_gated_delta_rule(*(t.double() for t in (q, k, v, g, beta)), cu_seqlens)[0][0]
            return cls(heads, [Output(group) for group in o.split(R, dim=1)])
        return cls(heads, list(head_slabs(q, k, v, g, beta, cu_seqlens, do)))

    def error(self, name: str, found: Tensor) -> float:
        """Relative RMS error of a result, pooled over the heads of the truth.

        name: of a `HeadSlab`'s field.
        found: [1, T, heads, ...], of all heads; infinitely far off if any of its elements is no finite number.
        """
        if not found.isfinite().all():
            return math.inf
        wrong, size = 0.0, 0.0
        for head, slab in zip(self.key_heads, self.slabs, strict=True):
            true = getattr(slab, name)
            heads = true.shape[1]  # one of a key, or all of its group
            error = found[0, :, head * heads : (head + 1) * heads].double() - true
            wrong += float(error.square().sum())
            size += float(true.square().sum())
        return math.sqrt(wrong / max(size, TINY))


def objection(errors: dict[str, float]) -> str | None:
    """What is beyond the bound, or None."""
    off = {name: error for name, error in errors.items() if not error <= BOUND}
    if not off:
        return None
    return f"off by {', '.join(f'{error:.1e} ({name})' for name, error in off.items())}, allowed {BOUND:.0e}"
