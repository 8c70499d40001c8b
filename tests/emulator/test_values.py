"""Holds values to Triton's rules: how types meet, where they are rounded, and what does not fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from tests.emulator import DeviceFault, launch
from tests.emulator.language import gl
from tests.emulator.values import Value, constant, value_of
from tests.helpers import same_bits

bf16, f16, f32, f64, i32, i64 = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64,
)  # fmt: skip


def device(code: Callable[[], Any]) -> Any:
    """What the code gives when it runs as a program."""
    results = []
    launch(lambda: results.append(code()), (1,))
    return results[0]


def tile(x: Tensor) -> Value:
    return value_of(x)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (bf16, bf16, bf16), (bf16, f32, f32), (bf16, f16, f16), (f16, f16, f16), (f16, f32, f32), (f32, f64, f64),
        (i32, i32, i32), (i32, i64, i64), (i32, f32, f32), (i64, bf16, f32), (torch.bool, i32, i32),
        (bf16, 2, bf16), (bf16, 2.5, bf16), (i32, 2, i32), (i32, 2.5, f32), (i64, 7, i64), (f16, True, f16),
    ],
)  # fmt: skip
def test_types_meet_as_in_triton(a: torch.dtype, b: Any, expected: torch.dtype) -> None:
    x = tile(torch.ones(4).to(a))
    y = tile(torch.ones(4).to(b)) if isinstance(b, torch.dtype) else b
    assert (x + y).dtype == expected
    assert (y + x).dtype == expected


def test_a_loaded_scalar_widens_a_tile_where_a_constant_does_not() -> None:
    x = tile(torch.ones(4, dtype=bf16))
    assert (x * tile(torch.tensor(0.3))).dtype == f32  # torch itself would say bf16
    assert (x * 0.3).dtype == bf16


def test_operators_round_where_the_device_rounds(rng: Generator) -> None:
    x, y = torch.randn(256, generator=rng), torch.randn(256, generator=rng)
    low = (tile(x.bfloat16()) * tile(y.bfloat16())).memory()
    assert same_bits(low, (x.bfloat16().double() * y.bfloat16().double()).to(bf16))
    wide = (tile(x.bfloat16()).to(f32) * tile(y.bfloat16()).to(f32)).memory()
    assert same_bits(wide, x.bfloat16().float() * y.bfloat16().float())
    assert (tile(x.bfloat16()) / tile(y.bfloat16())).dtype == f32
    assert same_bits(tile(x).to(f16).memory(), x.half())


def test_integers_divide_towards_zero_as_in_c() -> None:
    a, b = tile(torch.tensor([-7, 7, -7, 7])), tile(torch.tensor([2, 2, -2, -2]))
    assert (a // b).held.tolist() == [-3, 3, 3, -3]
    assert (a % b).held.tolist() == [-1, 1, -1, 1]
    with pytest.raises(DeviceFault, match="zero"):
        a // tile(torch.tensor([1, 0, 1, 1]))


@pytest.mark.parametrize(
    "overflow",
    [
        lambda x: x * 16384,
        lambda x: x + (2**31 - 1 - 140_000) + 1,
        lambda x: x * -16384,
        lambda x: x << 20,
        lambda x: (x.to(i64) * 16384).to(i32),
    ],
)
def test_thirty_two_bits_that_overflow_raise(overflow: Callable[[Value], Value]) -> None:
    with pytest.raises(DeviceFault, match="does not fit"):
        overflow(tile(torch.tensor([0, 140_000], dtype=i32)))


def test_sixty_four_bits_hold_them() -> None:
    x = tile(torch.tensor([140_000], dtype=i32)).to(i64) * 16384
    assert x.dtype == i64 and x.held.tolist() == [140_000 * 16384]
    assert constant(2**31).dtype == i64 and constant(2**31 - 1).dtype == i32


def test_a_constant_below_the_normal_numbers_is_fp64_where_it_stands_alone() -> None:
    assert constant(1e-37).dtype == f32 and constant(1e-39).dtype == f64


def test_shapes_broadcast_only_in_one_rank() -> None:
    x = tile(torch.arange(4).float())
    assert (x[:, None] * x[None, :]).shape == [4, 4]
    assert (x[:, None] + 1).shape == [4, 1]
    with pytest.raises(TypeError, match="rank"):
        x[:, None] * x
    with pytest.raises(TypeError, match="takes only"):
        x[0]


def test_only_scalars_decide_branches() -> None:
    with pytest.raises(TypeError, match="branch"):
        device(lambda: bool(tile(torch.ones(2)) > 0))
    assert device(lambda: bool(constant(3) > 2)) is True


def test_select_and_extrema_treat_nan_as_the_device_does() -> None:
    nan = float("nan")
    x = tile(torch.tensor([nan, -1.0, 2.0]))
    assert gl.maximum(x, 0.0).held.tolist() == [0.0, 0.0, 2.0]
    assert gl.minimum(x, 0.0).held.tolist() == [0.0, -1.0, 0.0]
    assert gl.where(tile(torch.tensor([False, True, True])), x, 0.0).held.tolist() == [0.0, -1.0, 2.0]
    assert (x * 0.0).held.isnan().tolist() == [True, False, False]
    assert gl.maximum(tile(torch.ones(2, dtype=bf16)), 0.5).dtype == f32


def test_exp2_flushes_subnormals() -> None:
    y = gl.exp2(tile(torch.tensor([3.0, -126.0, -127.0, -200.0, 1e-40]))).held.tolist()
    assert y == [8.0, 2.0**-126, 0.0, 0.0, 1.0]
    with pytest.raises(TypeError, match="fp32"):
        gl.exp2(tile(torch.ones(2, dtype=bf16)))


def test_reciprocal_flushes_subnormals() -> None:
    def reciprocal(x: Value) -> Value:
        return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], f32, is_pure=True, pack=1)

    inf = float("inf")
    y = reciprocal(tile(torch.tensor([4.0, -inf, 2.0**127, 1e-40, -0.0, 2.0**-126]))).memory()
    assert same_bits(y, torch.tensor([0.25, -0.0, 0.0, inf, -inf, 2.0**126]))
    with pytest.raises(TypeError, match="fp32"):
        reciprocal(tile(torch.ones(2, dtype=bf16)))


def test_reductions_and_scans_combine_along_an_axis(rng: Generator) -> None:
    x = torch.randint(-50, 50, (4, 8, 16), generator=rng)
    v = tile(x.float())
    assert same_bits(gl.sum(v, 1).memory(), x.sum(1).float())
    assert same_bits(gl.max(v, axis=2).memory(), x.amax(2).float())
    assert same_bits(gl.min(tile(x), 0).memory(), x.amin(0))
    assert same_bits(gl.associative_scan(v, 1, lambda a, b: a + b).memory(), x.cumsum(1).float())
    backwards = gl.associative_scan(v, 2, lambda a, b: a + b, reverse=True).memory()
    assert same_bits(backwards, x.flip(2).cumsum(2).flip(2).float())
    matrix = tile(torch.randn(2, 16, generator=rng)), tile(torch.randn(2, 16, generator=rng))
    a, b = gl.associative_scan(matrix, 1, lambda a0, b0, a1, b1: (a0 * a1, b0 * a1 + b1))
    state = torch.zeros(2)
    for t in range(16):
        state = state * matrix[0].held[:, t] + matrix[1].held[:, t]
    torch.testing.assert_close(b.held[:, -1], state, rtol=1e-4, atol=1e-5)  # fp32 sums in another order
    torch.testing.assert_close(a.held[:, -1], matrix[0].held.prod(1), rtol=1e-4, atol=1e-7)


def test_a_sum_of_bf16_rounds_at_every_step() -> None:
    ones = tile(torch.tensor([256.0, 1.0, 0.0, 1.0], dtype=bf16))  # 256 + 1 is 256 in bf16
    assert gl.sum(ones, 0).held.item() == 256.0 + 2.0


def test_tensors_are_reshaped_joined_and_split(rng: Generator) -> None:
    x = torch.randn(4, 8, generator=rng)
    assert same_bits(gl.permute(gl.reshape(tile(x), (2, 2, 8)), (2, 0, 1)).memory(), x.view(2, 2, 8).permute(2, 0, 1))
    a, b = gl.split(gl.join(tile(x), tile(x + 1)))
    assert same_bits(a.memory(), x) and same_bits(b.memory(), x + 1)
    assert gl.arange(4, 12).held.tolist() == list(range(4, 12)) and gl.arange(0, 8).dtype == i32
    assert gl.full([2, 4], 1.5, bf16).memory().tolist() == [[1.5] * 4] * 2
    assert gl.cdiv(constant(129), 64).held.item() == 3
    with pytest.raises(ValueError, match="power of two"):
        gl.arange(0, 12)


def test_unknown_assembly_and_functions_say_so() -> None:
    with pytest.raises(NotImplementedError, match="lop3"):
        gl.inline_asm_elementwise("lop3.b32 $0, $1;", "=r,r", [constant(1)], i32, is_pure=True, pack=1)
    with pytest.raises(AttributeError, match="histogram"):
        gl.histogram  # noqa: B018


def test_dot_fma_rounds_each_sum_once_in_the_order_of_k(rng: Generator) -> None:
    a, b, acc = (torch.randn(shape, generator=rng) for shape in ((4, 16), (16, 8), (4, 8)))
    expected = acc.clone()
    for k in range(16):  # the product is exact in fp64
        expected = (a[:, k, None].double() * b[k].double() + expected.double()).float()
    assert same_bits(device(lambda: gl.dot_fma(tile(a), tile(b), tile(acc))).memory(), expected)
    small = torch.full((1, 16), 2.0**-25)  # each of them lost on 1, though together they are not
    assert device(lambda: gl.dot_fma(tile(small), tile(torch.ones(16, 1)), tile(torch.ones(1, 1)))).memory() == 1
    for wrong, refusal in ((a.bfloat16(), TypeError), (a[:, :8], ValueError)):
        with pytest.raises(refusal, match="dot_fma"):
            device(lambda wrong=wrong: gl.dot_fma(tile(wrong), tile(b), tile(acc)))
