"""Random packs for the reference: operands in float64, in the regimes that a layer can drive the rule into."""

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus


class Case(NamedTuple):
    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, HV, V]
    g: Tensor  # [T, HV]
    beta: Tensor  # [T, HV]
    initial_state: Tensor  # [N, HV, K, V]
    cu_seqlens: list[int]
    do: Tensor  # [T, HV, V]
    dfinal_state: Tensor  # [N, HV, K, V]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self[:6]

    def run(self, rule: Callable, **options: float) -> dict[str, Tensor]:
        """Outputs and all gradients of a rule, by name."""
        leaves = [x.detach().clone().requires_grad_() for x in self.inputs]
        o, final_state = rule(*leaves[:5], self.cu_seqlens, initial_state=leaves[5], **options)
        # materialize: a pack without tokens uses some inputs nowhere, and their gradient is zero
        grads = torch.autograd.grad(
            (o, final_state), leaves, (self.do, self.dfinal_state), allow_unused=True, materialize_grads=True
        )
        names = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
        return {"o": o.detach(), "final_state": final_state.detach(), **dict(zip(names, grads, strict=True))}


@pytest.fixture
def draw(rng: torch.Generator) -> Callable[..., Case]:
    """Draw a pack of documents of given lengths, and `tail` tokens behind the last one."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=rng, dtype=torch.float64)

    def draw(
        lengths: list[int],
        H: int = 2,
        HV: int = 4,
        K: int = 6,
        V: int = 5,
        *,
        decay: str = "moderate",
        beta: tuple[float, float] = (0.0, 1.0),
        key_length: tuple[float, float] = (1.0, 1.0),
        key_noise: float = torch.inf,
        tail: int = 0,
    ) -> Case:
        T, N = sum(lengths) + tail, len(lengths)
        g = {
            "none": lambda: torch.zeros(T, HV, dtype=torch.float64),
            "slow": lambda: -1e-4 * uniform(T, HV),
            "moderate": lambda: -(1 + 15 * uniform(HV)) * softplus(normal(T, HV) - 4),
            "strong": lambda: -16 * softplus(normal(T, HV)),
        }[decay]()
        k = normal(T, H, K) if key_noise == torch.inf else normal(1, H, K) + key_noise * normal(T, H, K)
        return Case(
            q=normalize(normal(T, H, K), dim=-1),
            k=normalize(k, dim=-1) * torch.lerp(*(torch.tensor(x).double() for x in key_length), uniform(T, H, 1)),
            v=normal(T, HV, V),
            g=g,
            beta=beta[0] + (beta[1] - beta[0]) * uniform(T, HV),
            initial_state=normal(N, HV, K, V),
            cu_seqlens=[0, *accumulate(lengths)],
            do=normal(T, HV, V),
            dfinal_state=normal(N, HV, K, V),
        )

    return draw
