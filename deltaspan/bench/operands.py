"""What the sides compute with: seeded random operands of a training step, in two regimes of decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

DECAYS = ("moderate", "slow")  # in which times are taken
REGIMES = (*DECAYS, "zero", "strong", "mixed")
HEAD_DIM = 128  # of keys and of values
A_LOW, A_HIGH = 1.0, 16.0
SHIFT = 4.0
SLOW, STRONG = 1e-4, 20.0


class Operands(NamedTuple):
    """A pack's operands, and the gradient that comes back; with simulated ranks a list of shards in each place.

    q and k are L2-normalised in FP32 and then rounded.
    """

    q: Tensor  # [1, T, H, K] bf16
    k: Tensor  # [1, T, H, K] bf16
    v: Tensor  # [1, T, HV, V] bf16
    g: Tensor  # [1, T, HV] fp32
    beta: Tensor  # [1, T, HV] fp32
    do: Tensor  # [1, T, HV, V] bf16


class Results(NamedTuple):
    """What a training step gives, in the shapes of the operands."""

    o: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor


def draw(tokens: int, heads: Sequence[int], decay: str, *, device: str, seed: int) -> Operands:
    """Operands of a pack.

    Args:
        tokens: T.
        heads: H and HV.
        decay: "moderate", g = -A softplus(x - 4) with x normal and A uniform in [1, 16] for each head; "slow",
            g = -1e-4 u with u uniform in [0, 1], so that nothing of the past fades; "zero", g = 0; "strong", 20 times
            moderate; "mixed", one of these four after another from head to head.
        device, seed: the same numbers on the same kind of device.
    """
    H, HV = heads
    numbers = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=numbers, device=device, dtype=dtype)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=numbers, device=device)

    q, k = (normalize(normal(H, HEAD_DIM), dim=-1).bfloat16() for _ in range(2))
    v, do = (normal(HV, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2))

    def decays(regime: str) -> Tensor:
        match regime:
            case "moderate" | "strong":
                g = -(A_LOW + (A_HIGH - A_LOW) * uniform(HV)) * softplus(normal(HV) - SHIFT)
                return STRONG * g if regime == "strong" else g
            case "slow":
                return -SLOW * uniform(1, tokens, HV)
            case _:
                return torch.zeros(1, tokens, HV, device=device)

    g = decays(decay)
    if decay == "mixed":
        for i, regime in enumerate(REGIMES[:4]):
            g[..., i::4] = decays(regime)[..., i::4]
    return Operands(q, k, v, g, normal(HV).sigmoid(), do)
