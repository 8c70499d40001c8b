"""Which tier serves a call, and in what words one that cannot be served is refused; no tier is run."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import deltaspan as ds
from deltaspan.kernels import select

PART = ds.partition([0, 9], 1)


@pytest.mark.parametrize("backend", ["auto", *select.TIERS])
def test_what_no_call_has_is_named(backend: str) -> None:
    with pytest.raises(TypeError, match=r"call has no 'nonsense'; it may have K, V, .*unit_keys"):
        ds.chosen_backend(backend, nonsense=3)


@pytest.mark.parametrize(
    ("device", "error", "says"),
    [
        ([1], TypeError, r"device must be a torch\.device or the name of one, got \[1\]"),
        (1.5, TypeError, r"device must be a torch\.device or the name of one, got 1\.5"),
        ("abacus", ValueError, "device must be one that a tier runs on, cpu or cuda, got 'abacus'"),
        ("meta", ValueError, "device must be one that a tier runs on, cpu or cuda, got 'meta'"),
        (torch.device("meta"), ValueError, "device must be one that a tier runs on, cpu or cuda, got 'meta'"),
    ],
)
def test_devices_that_no_tier_runs_on(device: Any, error: type[Exception], says: str) -> None:
    assert not ds.is_supported(device)
    for backend in ("auto", *select.TIERS):
        with pytest.raises(error, match=says):
            ds.chosen_backend(backend, device=device)
    with pytest.raises(error, match=says):
        select.chosen_for_convolution("auto", device=device, dtype=torch.float32, taps=4)
    with pytest.raises(error, match=says):
        ds.build_context(PART, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
@pytest.mark.parametrize(("built", "why"), [(True, "finds no CUDA device"), (False, "is built without CUDA")])
def test_a_gpu_that_is_not_there(built: bool, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    assert not ds.is_supported("cuda")
    for call in (
        lambda: ds.build_context(PART, device="cuda"),
        lambda: ds.chosen_backend(device="cuda"),
        lambda: ds.chosen_backend("hopper", device=torch.device("cuda", 0)),
    ):
        with pytest.raises(ValueError, match=rf"device must be cpu where torch {why}, got 'cuda"):
            call()


@pytest.fixture
def a_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a device that has the Hopper tier."""
    caches = select._chosen, select._chosen_for_convolution, select._tell_once
    monkeypatch.setattr(select, "_not_on", lambda device: None)
    monkeypatch.setattr(select, "_without_triton", lambda: None)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("a_hopper")
def test_auto_is_the_hopper_tier_where_it_serves() -> None:
    assert ds.chosen_backend() == ds.chosen_backend(dtype=torch.bfloat16, K=128, V=128, group=3) == "hopper"
    assert select.chosen_for_convolution("auto", device="cpu", dtype=torch.float32, taps=4) == "hopper"
    assert ds.chosen_backend("torch", dtype=torch.float32) == "torch"


@pytest.mark.usefixtures("a_hopper")
def test_auto_says_once_why_it_is_not() -> None:
    for call, reason in (
        (lambda: ds.chosen_backend(dtype=torch.float32), "'hopper' serves bf16 operands"),
        (lambda: ds.chosen_backend(unit_keys=False), "'hopper' serves unit_keys=True alone"),
        (
            lambda: select.chosen_for_convolution("auto", device="cpu", dtype=torch.float64, taps=4),
            "'hopper' serves bf16, fp16 and fp32 rows",
        ),
    ):
        with pytest.warns(UserWarning, match=f"'auto' takes the slow torch tier: {reason}"):
            assert call() == "torch"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert call() == "torch"


@pytest.mark.usefixtures("a_hopper")
def test_a_hopper_without_triton_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_without_triton", lambda: "needs Triton 3.6 or newer")
    with pytest.warns(UserWarning, match="slow torch tier: 'hopper' needs Triton"):
        assert ds.chosen_backend() == "torch"


def test_auto_is_silent_where_there_is_no_hopper_tier() -> None:
    assert ds.chosen_backend(device="cpu", dtype=torch.float32) == "torch"
