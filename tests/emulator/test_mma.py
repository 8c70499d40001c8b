"""Holds products to their operands' types and places, and asynchronous ones to their waits."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from tests.emulator import DeviceFault, launch
from tests.emulator.barriers import fence_async_shared
from tests.emulator.language import gl
from tests.emulator.mma import mma_v2, warpgroup_mma, warpgroup_mma_wait
from tests.emulator.values import value_of
from tests.helpers import same_bits

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


def device(code: Any) -> None:
    launch(code, (1,))


def stored(x: Tensor, name: str = "tile") -> Any:
    tile = gl.allocate_shared_memory(x.dtype, list(x.shape), None)
    tile.store(value_of(x))
    fence_async_shared()
    return tile


def zero(m: int, n: int) -> Any:
    return gl.zeros([m, n], f32)


def cut(t: Tensor) -> Tensor:
    return (t.view(torch.int32) & ~0x1FFF).view(f32)


def summed(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """c + a b, a number at a time: 32 bytes of a row are summed with c, to 25 bits behind the first, and cut to 23."""
    out, at_once = c.clone(), 32 // a.dtype.itemsize
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            total = Fraction(c[i, j].item())
            for k in range(0, a.shape[1], at_once):
                pairs = zip(a[i, k : k + at_once].tolist(), b[k : k + at_once, j].tolist(), strict=True)
                total += sum(Fraction(x) * Fraction(y) for x, y in pairs)
                if total:
                    unit = Fraction(2) ** (math.frexp(float(abs(total)))[1] - 1 - 25)
                    total = Fraction(int(math.copysign(int(abs(total) / unit + Fraction(1, 2)) // 4, total))) * 4 * unit
            out[i, j] = float(total)
    return out


def test_products_are_exact_and_their_sums_cut(rng: Generator) -> None:
    x, y, c = (torch.randn(s, generator=rng) for s in ((64, 40), (40, 8), (64, 8)))

    def code() -> None:
        for dtype in (bf16, f16):
            a, b = x.to(dtype), y.to(dtype)
            expected = summed(a, b, c)
            assert not torch.equal(expected, a.float() @ b.float() + c)
            assert same_bits(mma_v2(value_of(a), value_of(b), value_of(c)).memory(), expected)
            for left in (value_of(a), stored(a)):
                assert same_bits(warpgroup_mma(left, stored(b), value_of(c)).memory(), expected)
            unused = warpgroup_mma(stored(a), stored(b), value_of(c * float("nan")), use_acc=False)
            assert same_bits(unused.memory(), summed(a, b, torch.zeros_like(c)))

    device(code)


def test_small_additions_are_lost_one_by_one() -> None:
    """Three quarters of a unit of the last place are one if rounded, and nothing here: towards zero, of either sign."""
    unit = 2.0**-23
    apart, together, acc = torch.zeros(64, 64), torch.full((64, 16), 0.75 * unit), torch.ones(64, 8)
    apart[:, ::16] = 0.75 * unit  # one in each 32 bytes

    def code() -> None:
        for sign in (1.0, -1.0):
            for terms, kept in ((apart, 0.0), (together, 12 * unit)):
                small = torch.full((terms.shape[1], 8), sign * 2.0**-10).half()
                found = mma_v2(value_of((terms * 2**10).half()), value_of(small), value_of(sign * acc)).memory()
                assert same_bits(found, sign * (acc + kept))
        for endless in (torch.inf, -torch.inf, torch.nan):
            found = mma_v2(value_of(together.half()), value_of(acc[:16].half()), value_of(acc * endless)).memory()
            assert same_bits(found, acc * endless)

    device(code)


def test_fp32_operands_are_cut_to_tf32(rng: Generator) -> None:
    x, y = torch.randn(64, 8, generator=rng), torch.randn(16, 8, generator=rng)

    def code() -> None:
        expected = summed(cut(x), cut(y).mT, torch.zeros(64, 16))
        assert not torch.equal(expected, x @ y.mT)
        right = stored(y).permute((1, 0))
        assert same_bits(warpgroup_mma(stored(x), right, zero(64, 16)).memory(), expected)
        assert same_bits(mma_v2(value_of(x), value_of(y.mT.contiguous()), zero(64, 16)).memory(), expected)
        with pytest.raises(TypeError, match="summed dimension"):
            warpgroup_mma(stored(x), stored(y.mT.contiguous()), zero(64, 16))
        with pytest.raises(NotImplementedError, match="ieee"):
            mma_v2(value_of(x), value_of(y.mT), zero(64, 16), input_precision="ieee")

    device(code)


def test_operands_of_wrong_types_shapes_and_places_are_refused(rng: Generator) -> None:
    a, b = torch.randn(64, 32, generator=rng).bfloat16(), torch.randn(32, 16, generator=rng).bfloat16()

    def code() -> None:
        for left, right, acc, message in (
            (a, b.half(), zero(64, 16), "two of one type"),
            (a.double(), b.double(), zero(64, 16), "two of one type"),
            (a, b, zero(64, 16).to(bf16), "two of one type"),
            (a, b.mT.contiguous(), zero(64, 32), r"a product of \[64, 32\] and \[16, 32\]"),
            (a, b, zero(64, 32), "into"),
        ):
            with pytest.raises(TypeError, match=message):
                mma_v2(value_of(left), value_of(right), acc)
            with pytest.raises(TypeError, match=message):
                warpgroup_mma(value_of(left), stored(right), acc)
        with pytest.raises(TypeError, match="must be in shared memory"):
            warpgroup_mma(stored(a), value_of(b), zero(64, 16))

    device(code)


def test_an_asynchronous_result_is_read_only_after_its_wait(rng: Generator) -> None:
    a, b = torch.randn(64, 32, generator=rng).bfloat16(), torch.randn(32, 16, generator=rng).bfloat16()

    def code() -> None:
        left, right = stored(a), stored(b)
        first = warpgroup_mma(left, right, zero(64, 16), is_async=True)
        second = warpgroup_mma(left, right, zero(64, 16), is_async=True)
        second = warpgroup_mma(left, right, second, is_async=True)  # adds to an accumulator under way
        for use in (lambda: first + 1.0, lambda: first.to(bf16), lambda: gl.sum(first, 0), lambda: left.store(first)):
            with pytest.raises(DeviceFault, match="is read before a wait"):
                use()
        first, second = warpgroup_mma_wait(2, deps=[first, second])
        assert same_bits(first.memory(), summed(a, b, torch.zeros(64, 16)))
        with pytest.raises(DeviceFault, match="number 3 of the program is read"):
            second + 1.0
        second = warpgroup_mma_wait(0, deps=[second])
        assert same_bits(second.memory(), summed(a, b, first.memory()))
        with pytest.raises(ValueError, match="deps"):
            warpgroup_mma_wait(0)

    device(code)


def test_shared_operands_stay_as_they_are_until_the_wait(rng: Generator) -> None:
    a, b = torch.randn(64, 32, generator=rng).bfloat16(), torch.randn(32, 16, generator=rng).bfloat16()

    def code() -> None:
        tiles = gl.allocate_shared_memory(bf16, [2, 32, 16], None)
        tiles.index(0).store(value_of(b))
        fence_async_shared()
        register = value_of(a)
        U = warpgroup_mma(register, tiles.index(0), zero(64, 16), is_async=True)
        tiles.index(1).store(value_of(b))  # another tile
        tiles.index(0).load(None)  # reading does no harm
        with pytest.raises(DeviceFault, match=r"writes tiles\[0\].*, read by a warpgroup_mma of the program"):
            tiles.index(0).slice(31, 1).store(value_of(b[:1]))  # with the same values or not
        U, register = warpgroup_mma_wait(0, deps=[U, register])
        tiles.index(0).store(value_of(b))

    device(code)


def test_a_wait_frees_the_operands_of_what_is_complete_only(rng: Generator) -> None:
    a, b = torch.randn(64, 32, generator=rng).bfloat16(), torch.randn(32, 16, generator=rng).bfloat16()

    def code() -> None:
        left, first, second = stored(a), stored(b), stored(b)
        U = warpgroup_mma(left, first, zero(64, 16), is_async=True)
        W = warpgroup_mma(left, second, zero(64, 16), is_async=True)
        U = warpgroup_mma_wait(1, deps=[U])
        first.store(value_of(b))
        for outstanding in (left, second):
            with pytest.raises(DeviceFault, match="read by a warpgroup_mma"):
                outstanding.store(outstanding.load(None))
        warpgroup_mma_wait(0, deps=[W])
        second.store(value_of(b))

    device(code)


@pytest.mark.parametrize("left", [True, False])
def test_an_operand_needs_a_fence_after_its_store(left: bool, rng: Generator) -> None:
    a, b = torch.randn(64, 64, generator=rng).bfloat16(), torch.randn(64, 64, generator=rng).bfloat16()

    def code() -> None:
        one, other = stored(a), stored(b)
        (one if left else other).store(value_of(a))
        with pytest.raises(DeviceFault, match=r"warpgroup_mma of the program reads tile.*no fence_async_shared"):
            warpgroup_mma(one, other, zero(64, 64))

    device(code)


def test_register_operands_are_named_by_a_wait(rng: Generator) -> None:
    a, b = torch.randn(64, 32, generator=rng).bfloat16(), torch.randn(32, 16, generator=rng).bfloat16()

    def code(*waits: tuple[int, bool]) -> None:
        register = value_of(a)
        U = warpgroup_mma(register, stored(b), zero(64, 16), is_async=True)
        for outstanding, named in waits:
            warpgroup_mma_wait(outstanding, deps=[U, register] if named else [U])

    for fine in ([(0, True)], [(0, False), (0, True)], [(1, False), (0, True)]):
        device(lambda fine=fine: code(*fine))
    for wrong in ([(0, False)], [(1, True), (0, False)]):
        with pytest.raises(DeviceFault, match="among the deps of no wait"):
            device(lambda wrong=wrong: code(*wrong))
    with pytest.raises(DeviceFault, match="ends without waiting for 1 warpgroup_mma"):
        device(code)
