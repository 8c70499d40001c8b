"""The convolution against torch's, document by document, and the promises of its edges."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu

from deltaspan.reference import causal_conv1d

CU_SEQLENS = [0, 9, 9, 10, 12, 30]
T, D, TAIL = 33, 5, 3


@pytest.fixture
def normal(rng: torch.Generator) -> Callable[..., Tensor]:
    return lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64)


def torchs(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """torch's cross-correlation, one document at a time."""
    D, W = weight.shape
    y = [
        conv1d(pad(x[start:end].T[None], (W - 1, 0)), weight[:, None], bias, groups=D)[0].T if end > start else x[:0]
        for start, end in pairwise(CU_SEQLENS)
    ]
    y = torch.cat(y) if activation is None else silu(torch.cat(y))
    return torch.cat((y, torch.zeros(TAIL, D, dtype=y.dtype)))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("W", [1, 2, 4, 7, 40])
def test_is_torchs_convolution(normal: Callable, W: int, with_bias: bool, activation: str | None) -> None:
    leaves = [normal(T, D), normal(D, W), *([normal(D)] if with_bias else [])]
    leaves = [x.requires_grad_() for x in leaves]
    x, weight, bias = (*leaves, None)[:3]
    y = causal_conv1d(x, weight, CU_SEQLENS, bias=bias, activation=activation)
    expected = torchs(x, weight, bias, activation)
    dy = normal(T, D)
    # Sums of at most 40 products of order 1, and for the weight's gradient of 30, in another order: 1e-14.
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(y, expected, **close)
    grads, expected_grads = (torch.autograd.grad(out, leaves, dy) for out in (y, expected))
    torch.testing.assert_close(grads, expected_grads, **close)


def test_silu_is_the_default(normal: Callable) -> None:
    x, weight = normal(T, D), normal(D, 4)
    y = causal_conv1d(x, weight, CU_SEQLENS, activation=None)
    silu_of_y = y * torch.sigmoid(y)  # two roundings more or less than torch's: a few eps
    torch.testing.assert_close(causal_conv1d(x, weight, CU_SEQLENS), silu_of_y, rtol=1e-14, atol=0)


def test_the_tail_is_never_read(normal: Callable) -> None:
    x, weight = normal(T, D), normal(D, 4).requires_grad_()
    x[-TAIL:] = torch.nan
    x.requires_grad_()
    y = causal_conv1d(x, weight, CU_SEQLENS)
    dx, dweight = torch.autograd.grad(y, (x, weight), normal(T, D))
    assert not y[-TAIL:].any() and not dx[-TAIL:].any()
    assert y.isfinite().all() and dx.isfinite().all() and dweight.isfinite().all()


def test_nan_stays_in_its_document(normal: Callable) -> None:
    x, weight = normal(T, D), normal(D, 4)
    clean = causal_conv1d(x, weight, CU_SEQLENS)
    x[10:12] = torch.nan
    y = causal_conv1d(x, weight, CU_SEQLENS)
    assert y[10:12].isnan().all()
    assert torch.equal(y[:10], clean[:10]) and torch.equal(y[12:], clean[12:])


def test_no_documents(normal: Callable) -> None:
    x = normal(3, D).requires_grad_()
    y = causal_conv1d(x, normal(D, 4), [0])
    assert y.shape == (3, D) and not y.any()
    assert not torch.autograd.grad(y.sum(), x)[0].any()


def test_batch_axis_and_precision(normal: Callable) -> None:
    x, weight, bias = normal(T, D).bfloat16(), normal(D, 4).bfloat16(), normal(D).bfloat16()
    y = causal_conv1d(x, weight, CU_SEQLENS, bias=bias)
    assert torch.equal(y, causal_conv1d(x.double(), weight.double(), CU_SEQLENS, bias=bias.double()))
    assert torch.equal(causal_conv1d(x[None], weight, torch.tensor(CU_SEQLENS), bias=bias), y[None])


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": [1.0]}, TypeError, "x is of type list"),
        ({"x": torch.ones(2, 3, D)}, ValueError, "x has shape"),
        ({"weight": torch.ones(4, D)}, ValueError, "weight has shape"),
        ({"weight": torch.ones(D, 0)}, ValueError, "weight has shape"),
        ({"bias": torch.ones(D, 1)}, ValueError, "bias has shape"),
        ({"activation": "relu"}, ValueError, "activation is 'relu'"),
        ({"cu_seqlens": [0, 4]}, ValueError, "cu_seqlens"),
    ],
)
def test_bad_arguments_are_named(change: dict, error: type, words: str) -> None:
    arguments = {"x": torch.ones(3, D), "weight": torch.ones(D, 4), "cu_seqlens": [0, 3]} | change
    with pytest.raises(error, match=words):
        causal_conv1d(**arguments)
