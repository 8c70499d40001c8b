"""Holds TMA copies to their boxes, their barriers and the waits around them."""

from typing import Any

import pytest
import torch
from torch import Generator

from tests.emulator import DeviceFault, TensorDescriptor, launch
from tests.emulator.barriers import fence_async_shared, mbarrier
from tests.emulator.language import gl
from tests.emulator.tma import tma
from tests.helpers import same_bits

bf16 = torch.bfloat16


def device(code: Any, *args: Any, **options: Any) -> None:
    launch(code, (1,), *args, **options)


def made(count: int = 1) -> Any:
    bar = gl.allocate_shared_memory(torch.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=count)
    return bar


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 8), (8, 24), (-2, -8), (9, 0), (10, 32), (-8, 0), (100, 800)])
@pytest.mark.parametrize("seed", range(2))
def test_a_load_fills_with_zeros_beyond_the_tensor(row: int, column: int, seed: int, rng: Generator) -> None:
    x = torch.randn(10, 32, generator=rng).bfloat16()
    padded = torch.zeros(400, 2000, dtype=bf16)
    padded[100:110, 100:132] = x
    seen = []

    def code(descriptor: Any) -> None:
        tile = gl.allocate_shared_memory(bf16, [8, 16], descriptor.layout)
        bar = made()
        mbarrier.expect(bar, 8 * 16 * 2)
        tma.async_load(descriptor, [row, column], bar, tile)
        mbarrier.wait(bar, 0)
        seen.append(tile.load(None).memory())

    device(code, TensorDescriptor.from_tensor(x, [8, 16]), seed=seed)
    assert same_bits(seen[0], padded[100 + row : 108 + row, 100 + column : 116 + column])


@pytest.mark.parametrize("seed", range(2))
def test_a_store_leaves_out_what_lies_beyond_the_tensor(seed: int, rng: Generator) -> None:
    x, y = torch.randn(8, 16, generator=rng).bfloat16(), torch.full((12, 64), 7.0, dtype=bf16)

    def code(source: Any, target: Any) -> None:
        tile = gl.allocate_shared_memory(bf16, [8, 16], target.layout)
        tile.store(gl.load(source + gl.arange(0, 8)[:, None] * 16 + gl.arange(0, 16)[None, :]))
        fence_async_shared()
        tma.async_store(target, [7, 24], tile)
        tma.store_wait(0)

    view = y[:10, :32]  # what lies around it is spared
    device(code, x, TensorDescriptor.from_tensor(view, [8, 16]), seed=seed)
    expected = torch.full((12, 64), 7.0, dtype=bf16)
    expected[7:10, 24:32] = x[:3, :8]
    assert same_bits(y, expected)


def test_loads_land_late_and_in_any_order(rng: Generator) -> None:
    x = torch.randn(64, 64, generator=rng).bfloat16()
    orders = set()

    def code(descriptor: Any) -> None:
        tiles, bars = gl.allocate_shared_memory(bf16, [4, 8, 64], None), [made() for _ in range(4)]
        for i, bar in enumerate(bars):
            mbarrier.expect(bar, 8 * 64 * 2)
            tma.async_load(descriptor, [8 * i, 0], bar, tiles.index(i))
        mbarrier.wait(bars[0], 0)
        orders.add(tuple(bar.completed for bar in bars))
        for bar in bars[1:]:
            mbarrier.wait(bar, 0)

    for seed in range(12):
        device(code, TensorDescriptor.from_tensor(x, [8, 64]), seed=seed)
    assert len(orders) > 2


def test_store_wait_leaves_the_last_ones_under_way() -> None:
    def code(target: Any, wait_for: int) -> None:
        tiles = gl.allocate_shared_memory(bf16, [2, 8, 16], target.layout)
        tiles.store(gl.full([2, 8, 16], 1.0, bf16))
        fence_async_shared()
        tma.async_store(target, [0, 0], tiles.index(0))
        tma.async_store(target, [8, 0], tiles.index(1))
        tma.store_wait(wait_for)
        tiles.index(0).store(gl.full([8, 16], 2.0, bf16))
        with pytest.raises(DeviceFault, match=r"the program writes tiles\[1\], read by a TMA store of the program"):
            tiles.index(1).store(gl.full([8, 16], 2.0, bf16))
        tma.store_wait(0)
        tiles.index(1).store(gl.full([8, 16], 2.0, bf16))

    for seed in range(4):
        y = torch.zeros(16, 16, dtype=bf16)
        device(lambda y: code(y, 1), TensorDescriptor.from_tensor(y, [8, 16]), seed=seed)
        assert bool((y == 1).all())
    with pytest.raises(DeviceFault, match=r"writes tiles\[0\]"):
        device(lambda y: code(y, 2), TensorDescriptor.from_tensor(y, [8, 16]))


def test_a_tile_is_not_read_before_its_wait_however_long_ago_it_landed() -> None:
    def code(descriptor: Any) -> None:
        tile = gl.allocate_shared_memory(bf16, [8, 16], descriptor.layout)
        bar = made()
        mbarrier.expect(bar, 256)
        tma.async_load(descriptor, [0, 0], bar, tile)
        for _ in range(50):
            gl.thread_barrier()
        tile.load(None)

    for seed in range(4):
        with pytest.raises(DeviceFault, match="the program reads tile, written by a TMA load on bar"):
            device(code, TensorDescriptor.from_tensor(torch.zeros(8, 16, dtype=bf16), [8, 16]), seed=seed)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_load_over_stored_data_needs_a_fence(fenced: bool) -> None:
    def code(descriptor: Any) -> None:
        tile = gl.allocate_shared_memory(bf16, [8, 16], descriptor.layout)
        bar = made()
        tile.store(gl.full([8, 16], 1.0, bf16))
        if fenced:
            fence_async_shared()
        mbarrier.expect(bar, 256)
        tma.async_load(descriptor, [0, 0], bar, tile)
        mbarrier.wait(bar, 0)

    descriptor = TensorDescriptor.from_tensor(torch.zeros(8, 16, dtype=bf16), [8, 16])
    if fenced:
        device(code, descriptor)
    else:
        with pytest.raises(DeviceFault, match="no fence_async_shared"):
            device(code, descriptor)


def test_wrong_boxes_and_places_are_refused() -> None:
    def code(descriptor: Any) -> None:
        tiles, bar = gl.allocate_shared_memory(bf16, [2, 8, 16], descriptor.layout), made()
        tile = tiles.index(0)
        with pytest.raises(TypeError, match="the descriptor has boxes of"):
            tma.async_load(descriptor, [0, 0], bar, tiles)
        with pytest.raises(TypeError, match="int32 scalar"):
            tma.async_load(descriptor, [gl.program_id(0).to(torch.int64), 0], bar, tile)
        with pytest.raises(DeviceFault, match="not 16-byte aligned"):
            tma.async_load(descriptor, [0, 4], bar, tile)
        with pytest.raises(DeviceFault, match="no dense, 128-byte aligned"):
            tma.async_store(descriptor, [0, 0], gl.allocate_shared_memory(bf16, [16, 8], None).permute((1, 0)))

    x = torch.zeros(8, 32, dtype=bf16)
    device(code, TensorDescriptor.from_tensor(x, [8, 16]))
    for tensor, block in ((x, [8]), (x, [8, 512]), (x.mT, [8, 8]), (x[:, :0], [8, 8]), (x[:, 1:], [8, 8]), (x, [8, 4])):
        with pytest.raises(ValueError, match=r"block_shape|tensor"):
            TensorDescriptor.from_tensor(tensor, block)
