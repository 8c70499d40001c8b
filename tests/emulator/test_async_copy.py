"""Holds asynchronous copies to their waits."""

from typing import Any

import pytest
import torch
from torch import Generator

from tests.emulator import DeviceFault, launch
from tests.emulator.async_copy import async_copy
from tests.emulator.language import gl
from tests.helpers import same_bits


def both(x: Any) -> tuple[Any, Any]:
    """Two halves on their way, each a group."""
    tile = gl.allocate_shared_memory(torch.float32, [2, 8, 16], None)
    at = x + gl.arange(0, 8)[:, None] * 16 + gl.arange(0, 16)[None, :]
    for half in range(2):
        async_copy.async_load(tile.index(half), at + 128 * half)
        async_copy.commit_group()
    return tile.index(0), tile.index(1)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_waited_for_is_there(seed: int, rng: Generator) -> None:
    x, seen = torch.randn(16, 16, generator=rng), []

    def code(x: Any) -> None:
        first, second = both(x)
        for left, half in ((1, first), (0, second)):
            async_copy.wait_group(left)
            seen.append(half.load(None).memory())

    launch(code, (1,), x, seed=seed)
    assert same_bits(torch.cat(seen), x)


def test_what_is_not_waited_for_is_not_read(rng: Generator) -> None:
    def code(x: Any) -> None:
        _, second = both(x)
        async_copy.wait_group(1)
        second.load(None)

    with pytest.raises(DeviceFault, match=r"reads .*, written by an asynchronous copy"):
        launch(code, (1,), torch.randn(16, 16, generator=rng))


@pytest.mark.parametrize("begun", [False, True])
def test_a_program_does_not_end_before_its_copies(begun: bool, rng: Generator) -> None:
    def code(x: Any) -> None:
        tile = gl.allocate_shared_memory(torch.float32, [16], None)
        async_copy.async_load(tile, x + gl.arange(0, 16))
        if begun:
            async_copy.commit_group()

    with pytest.raises(DeviceFault, match="without waiting for its asynchronous copies"):
        launch(code, (1,), torch.randn(16, generator=rng))


def test_copies_stay_within_the_tensor() -> None:
    def code(x: Any) -> None:
        async_copy.async_load(gl.allocate_shared_memory(torch.float32, [16], None), x + 1 + gl.arange(0, 16))

    with pytest.raises(DeviceFault, match="copy from"):
        launch(code, (1,), torch.zeros(16))
