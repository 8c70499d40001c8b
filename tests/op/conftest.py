"""Where the Hopper tier runs in tests: on a GPU, and on the CPU by the emulator of its kernels."""

from collections.abc import Iterator
from typing import Any

import pytest

from deltaspan.kernels import select
from tests.emulator import Kernel, load


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device that backend="hopper" serves."""
    if request.param == "cuda":
        yield "cuda"
        return
    served, tier = select.tier, load("deltaspan.kernels.hopper.tier")
    monkeypatch.setattr(select, "_beyond_hopper", lambda *args, **call: None)
    monkeypatch.setattr(select, "_convolution_beyond_hopper", lambda *args: None)
    monkeypatch.setattr(select, "tier", lambda name: tier if name == "hopper" else served(name))
    caches = select._chosen, select._chosen_for_convolution
    for cache in caches:
        cache.cache_clear()
    yield "cpu"
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def dry(monkeypatch: pytest.MonkeyPatch, hopper: str) -> Any:
    """The tier, on the CPU without its kernels: everything is asked for and nothing computed."""
    monkeypatch.setattr(Kernel, "__getitem__", lambda kernel, grid: lambda *args, **constants: None)
    return select.tier("hopper")
