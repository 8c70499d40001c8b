"""Holds global and shared memory to their bounds, types and poison, and finds accesses that nothing orders."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator

from tests.emulator import DeviceFault, launch
from tests.emulator.barriers import fence_async_shared, mbarrier
from tests.emulator.language import gl
from tests.helpers import same_bits


def device(code: Callable[..., None], *args: Any, **options: Any) -> None:
    launch(code, (1,), *args, **options)


def shared(shape: list[int], dtype: torch.dtype = torch.float32) -> Any:
    tile = gl.allocate_shared_memory(dtype, shape, None)  # reports call it by this name
    return tile


def test_masked_loads_and_stores_touch_what_the_mask_lets_them(rng: Generator) -> None:
    x, y = torch.randn(13, generator=rng), torch.full((13,), float("nan"))

    def copy(x: Any, y: Any) -> None:
        at = gl.arange(0, 16)
        gl.store(y + at, gl.load(x + at, mask=at < 13, other=0.0) * 2.0, mask=at < 11)

    device(copy, x, y)
    assert same_bits(y[:11], x[:11] * 2) and bool(y[11:].isnan().all())


def test_what_is_masked_off_without_other_is_poison() -> None:
    seen = []
    device(lambda x: seen.append(gl.load(x + gl.arange(0, 4), mask=gl.arange(0, 4) < 2)), torch.ones(4))
    assert seen[0].held.isnan().tolist() == [False, False, True, True]


@pytest.mark.parametrize("offset", [-1, 13])
def test_global_accesses_out_of_bounds_raise(offset: int) -> None:
    with pytest.raises(DeviceFault, match=f"load from argument 0 at element {offset}, beyond its 13"):
        device(lambda x: gl.load(x + offset), torch.ones(13))
    with pytest.raises(DeviceFault, match="store to"):
        device(lambda x: gl.store(x + offset, 1.0), torch.ones(13))


def test_pointers_reach_the_rows_of_a_strided_view(rng: Generator) -> None:
    whole = torch.randn(6, 8, generator=rng)
    seen = []
    device(lambda x: seen.append(gl.load(x + gl.arange(0, 4) * 8 + 2)), whole[1:5, 2:5])
    assert same_bits(seen[0].memory(), whole[1:5, 4])


def test_a_store_converts_to_the_type_of_the_memory(rng: Generator) -> None:
    x, y = torch.randn(8, generator=rng), torch.empty(8, dtype=torch.bfloat16)
    device(lambda x, y: gl.store(y + gl.arange(0, 8), gl.load(x + gl.arange(0, 8))), x, y)
    assert same_bits(y, x.bfloat16())


def test_scalars_of_a_launch_have_the_width_that_they_need() -> None:
    def code(small: Any, large: Any, real: Any, flag: Any) -> None:
        types = [v.dtype for v in (small, large, real, flag)]
        assert types == [torch.int32, torch.int64, torch.float32, torch.bool]

    device(code, 5, 2**31, 0.5, True)


def test_shared_memory_begins_as_poison_and_keeps_its_type(rng: Generator) -> None:
    x = torch.randn(4, 8, generator=rng)

    def code(x: Any) -> None:
        tile = shared([2, 4, 8], torch.bfloat16)
        assert bool(tile.load(None).held.isnan().all())
        assert int(shared([4], torch.int32).load(None).held.max()) < -(2**28)
        value = gl.load(x + gl.arange(0, 4)[:, None] * 8 + gl.arange(0, 8)[None, :])
        with pytest.raises(TypeError, match="must match"):
            tile.index(1).store(value)
        with pytest.raises(TypeError, match="must match"):
            tile.store(value.to(torch.bfloat16))
        tile.index(1).store(value.to(torch.bfloat16))
        assert bool(tile.index(0).load(None).held.isnan().all())

        def same(view: Any, expected: Any) -> bool:
            return same_bits(view.load(None).memory(), expected.bfloat16())

        given = value.memory()
        assert same(tile.index(1).permute((1, 0)), given.mT) and same(tile.index(1).reshape([32]), given.reshape(32))
        assert same(tile.index(1).slice(2, 4, 1).slice(1, 2), given[1:3, 2:6])

    device(code, x)


def test_shared_memory_has_bounds() -> None:
    def code() -> None:
        tile = shared([2, 4, 8])
        for wrong in (2, -1):
            with pytest.raises(DeviceFault, match=f"index {wrong} of tile, which has 2"):
                tile.index(wrong)
        with pytest.raises(DeviceFault, match=r"slice \[6, 10\)"):
            tile.index(0).slice(6, 4, 1)
        with pytest.raises(TypeError, match="compiled"):
            tile.index(0).slice(gl.program_id(0), 4, 1)
        with pytest.raises(TypeError, match="int32"):
            tile.index(gl.program_id(0).to(torch.int64))
        shared([227 * 1024], torch.int8)

    with pytest.raises(DeviceFault, match="there are 232448"):
        device(code)


def two_partitions(first: Callable[[Any, Any], None], second: Callable[[Any, Any], None]) -> Callable[[], None]:
    """A program whose two partitions share a tile and two mbarriers of one arrival each."""

    def code() -> None:
        tile = shared([4, 8])
        tile.store(gl.zeros([4, 8], torch.float32))
        bars = gl.allocate_shared_memory(torch.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in range(2):
            mbarrier.init(bars.index(i), count=1)
        fence_async_shared()
        gl.warp_specialize([(first, (tile, bars)), (second, (tile, bars))], [1], [24])

    return code


def writes(tile: Any, bars: Any) -> None:
    tile.slice(0, 2).store(gl.full([2, 8], 1.0, torch.float32))
    mbarrier.arrive(bars.index(0))


def writes_on(tile: Any, bars: Any) -> None:
    writes(tile, bars)
    tile.slice(0, 2).store(gl.full([2, 8], 2.0, torch.float32))


def reads(tile: Any, bars: Any) -> None:
    mbarrier.wait(bars.index(0), 0)
    assert bool((tile.slice(0, 2).load(None).held == 1).all())


def reads_at_once(tile: Any, bars: Any) -> None:
    tile.slice(1, 2).load(None)


def reads_the_rest(tile: Any, bars: Any) -> None:
    tile.slice(2, 2).load(None)


@pytest.mark.parametrize("seed", range(5))
def test_who_waits_learns_of_complete_phases_only(seed: int) -> None:
    def writes_again(tile: Any, bar: Any) -> None:
        mbarrier.arrive(bar, count=2)
        tile.store(gl.full([8], 1.0, torch.float32))
        mbarrier.arrive(bar)

    def reads_early(tile: Any, bar: Any) -> None:
        while bar.missing != 1:  # the second phase lacks one arrival
            gl.thread_barrier()
        mbarrier.wait(bar, 0)
        tile.load(None)

    def code() -> None:
        tile = shared([8])
        bar = gl.allocate_shared_memory(torch.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(bar, count=2)
        gl.warp_specialize([(writes_again, (tile, bar)), (reads_early, (tile, bar))], [1], [24])

    with pytest.raises(DeviceFault, match="reads_early reads tile, written by writes_again: nothing orders"):
        device(code, seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_unordered_accesses_of_two_partitions_are_found_in_any_run(seed: int) -> None:
    device(two_partitions(writes, reads), seed=seed)
    device(two_partitions(writes, reads_the_rest), seed=seed)  # other elements
    for first, second in ((writes, reads_at_once), (writes_on, reads), (writes, writes)):
        with pytest.raises(DeviceFault, match=r"nothing orders|lacks 0"):
            device(two_partitions(first, second), seed=seed)
