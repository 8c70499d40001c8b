"""Rows brought to length 1 and the gradient of raw ones, by the Hopper tier, against FP64: emulated and on a GPU."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from deltaspan.kernels.torch.inputs import EPSILON
from tests.emulator import load
from tests.helpers import same_bits

MODULE = "deltaspan.kernels.hopper.unit"
ROUNDED = 2**-8 * 1.01  # to bf16, and what fp32 adds to that
IN_FP32 = 2**-18  # a sum of 128 products and a root, of what is subtracted


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def tier(request: pytest.FixtureRequest) -> tuple[ModuleType, str]:
    if request.param == "cpu":
        return load(MODULE), "cpu"
    return __import__(MODULE, fromlist=["unit"]), "cuda"


def rows(rng: torch.Generator, T: int, H: int, pitch: int, device: str) -> Tensor:
    """[T, H, 128] as columns of longer rows, of all sizes, and one of zeros; behind them, NaN."""
    x = torch.full((T, pitch), torch.nan)
    x[:, 8 : 8 + H * 128] = torch.randn(T, H * 128, generator=rng) * torch.logspace(-4, 3, T)[:, None]
    x[T // 2 : T // 2 + 1, 8 : 8 + H * 128] = 0
    return x.to(device, torch.bfloat16)[:, 8 : 8 + H * 128].unflatten(1, (H, 128))


def ready(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


@pytest.mark.parametrize(("T", "H"), [(33, 1), (7, 3), (0, 2)])
def test_rows_and_their_gradients(tier: tuple[ModuleType, str], rng: torch.Generator, T: int, H: int) -> None:
    module, device = tier
    x = rows(rng, T, H, H * 128 + 24, device)
    exact = x.cpu().double().requires_grad_()
    y = ready(exact)
    found = module.unit(x)
    assert found.is_contiguous() and found.dtype == torch.bfloat16
    assert ((found.cpu() - y).abs() <= ROUNDED * y.abs()).all()

    dy = torch.randn(T, H, 128, generator=rng).to(device, torch.bfloat16)
    (dx,) = torch.autograd.grad(y, exact, dy.cpu().double())
    whole = dy.clone()
    module.to_raw_gradient(x, whole)
    inverse = (exact.detach().square().sum(-1, keepdim=True) + EPSILON).rsqrt()
    subtracted = inverse * dy.cpu().double().norm(dim=-1, keepdim=True)
    assert ((whole.cpu() - dx).abs() <= ROUNDED * dx.abs() + IN_FP32 * subtracted).all()
    part = dy[: T // 2].clone()  # bits do not depend on the rows behind
    module.to_raw_gradient(x[: T // 2], part)
    assert same_bits(part, whole[: T // 2])
