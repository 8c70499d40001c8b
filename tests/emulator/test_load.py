"""Holds `load` to running a module's own text with the emulator in Triton's place, and to device semantics of loops."""

import sys
from types import ModuleType

import pytest
import torch

from tests.emulator import DeviceFault, Kernel, launch, load, path_of, seeded

HEAD = """
import math
from deltaspan.kernels.hopper.gluon import COMPILED_WITH, barrier, gl, gluon, launch, tiles
from deltaspan.kernels.hopper.instructions import exp2
SIZE = gl.constexpr(8)
"""


def module(body: str) -> ModuleType:
    return load("deltaspan.kernels.hopper.planted", HEAD + body)


def test_the_tier_loads_without_triton_and_leaves_no_trace() -> None:
    before = set(sys.modules)
    made = load("deltaspan.kernels.hopper.prep")
    assert isinstance(made.prep_kernel, Kernel) and made.__file__ == str(path_of("deltaspan.kernels.hopper.prep"))
    assert not [name for name in set(sys.modules) - before if "hopper" in name or "triton" in name]


def test_the_host_launches_with_options_and_constants() -> None:
    made = module("""
@gluon.jit
def double(x, y, n, SCALE: gl.constexpr):
    at = gl.program_id(0) * SIZE + gl.arange(0, SIZE)
    gl.store(y + at, gl.load(x + at, mask=at < n, other=0.0) * SCALE, mask=at < n)

def run(x, y, z):
    assert [i for i in range(3)] == [0, 1, 2] and math.pi > 3
    double[(len(x) // 8 + 1,)](x, y, len(x), SCALE=2, num_warps=4, **COMPILED_WITH)
    launch(double, (len(x) // 8 + 1,), y, z, len(x), SCALE=3, num_warps=4)
    tiles(x, 20, 1, 8)
""")
    x, y, z = torch.arange(20.0), torch.full((20,), float("nan")), torch.full((20,), float("nan"))
    with seeded(3):
        made.run(x, y, z)
    assert torch.equal(y, x * 2) and torch.equal(z, x * 6)


def test_what_a_loop_carries_has_a_width() -> None:
    made = module("""
@gluon.jit
def walk(y, n):
    place = 0
    for i in range(n):
        place = place + 1000 * 1000 * 1000
    gl.store(y, place)
""")
    y = torch.zeros(1, dtype=torch.int64)
    launch(made.walk, (1,), y, 2)
    assert y.item() == 2 * 10**9
    with pytest.raises(DeviceFault, match="3000000000 does not fit"):
        launch(made.walk, (1,), y, 3)


def test_loop_counters_are_scalars_and_static_ones_constants() -> None:
    made = module("""
@gluon.jit
def inner(x, WHICH: gl.constexpr):
    return x + WHICH

@gluon.jit
def static(y):
    for i in gl.static_range(3):
        gl.store(y + i, inner(i, i))

@gluon.jit
def dynamic(y):
    for i in range(3):
        gl.store(y + i, inner(i, i))
""")
    y = torch.zeros(3, dtype=torch.int32)
    launch(made.static, (1,), y)
    assert y.tolist() == [0, 2, 4]
    with pytest.raises(TypeError, match="WHICH is a constexpr"):
        launch(made.dynamic, (1,), y)


def test_exp2_is_that_of_the_tier() -> None:
    made = module("""
@gluon.jit
def power(x):
    gl.store(x + gl.arange(0, SIZE), exp2(gl.load(x + gl.arange(0, SIZE))))
    barrier()
""")
    x = torch.tensor([0.0, 1.0, -1.0, 5.0, -130.0, -149.0, 10.0, 0.5])
    expected = torch.where(x < -126, 0.0, torch.exp2(x))
    launch(made.power, (1,), x)
    assert torch.equal(x, expected)


def test_an_error_shows_the_kernels_own_line() -> None:
    made = module("""
@gluon.jit
def wrong(x):
    gl.store(x + 100, 1.0)
""")
    with pytest.raises(DeviceFault, match="store to x at element 100") as caught:
        launch(made.wrong, (1,), torch.zeros(3))
    assert "gl.store(x + 100, 1.0)" in str(caught.getrepr())
