"""On a CUDA device: the same exactness, no host synchronisation, ranks that share it, and the oracle at full size."""

from typing import Any

import pytest
import torch
from torch import Tensor

import deltaspan as ds
from deltaspan import reference
from tests.helpers import gloo, same_bits
from tests.op.support import (
    LAYOUTS,
    Pack,
    assert_exact,
    draw,
    join,
    relative_error,
    run_convolution,
    run_rule,
    split,
    true_convolution,
    true_rule,
)

pytestmark = pytest.mark.gpu
LENGTHS = [37, 150, 0, 1, 64, 5, 2, 300]
GIB = 1 << 30


def on_gpu(pack: Pack) -> Pack:
    return pack._replace(**{n: getattr(pack, n).cuda() for n in pack._fields[1:]})


def on_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.cpu() for name, x in tensors.items()}


def run_all(pack: Pack, ctx: ds.Context) -> list[dict[str, Tensor]]:
    ranks = zip(run_rule(on_gpu(pack), ctx), run_convolution(on_gpu(pack), ctx), strict=True)
    return [on_cpu(rule | convolution) for rule, convolution in ranks]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 4])
def test_exact_in_fp64(rng, layout, world_size):
    pack = draw(rng, LENGTHS, HV=6, K=64, V=32)
    part = split(pack.cu_seqlens, world_size, layout, rng)
    ctx = ds.build_context(part, ds.SimulatedGroup(world_size))
    assert ctx.device.type == "cuda"
    assert_exact(join(part, run_all(pack, ctx)), true_rule(pack) | true_convolution(pack))


def test_fp32_products_keep_their_precision(rng):
    """Whatever the process allows for its own products: TF32 has 10 bits and would be off by 1e-4 at the least."""
    pack = draw(rng, LENGTHS, K=64, V=64, decay="slow").to(torch.float32)
    part = split(pack.cu_seqlens, 4, "zigzag")
    truth, found = true_rule(pack) | true_convolution(pack), []
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            found.append(join(part, run_all(pack, ds.build_context(part, ds.SimulatedGroup(4)))))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert [n for n in truth if not same_bits(found[0][n], found[1][n])] == []
    # sums of some hundred FP32 terms, along chains of 300 tokens that forget nothing
    assert {n: e for n in truth if (e := relative_error(found[0][n], truth[n])[0]) > 5e-6} == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_waits_for_the_device(rng, dtype):
    """Once the context is built, neither direction asks the host to wait."""
    pack = on_gpu(draw(rng, LENGTHS, K=64, V=64).to(dtype))
    ctx = ds.build_context(split(pack.cu_seqlens, 4, "zigzag_per_document"), ds.SimulatedGroup(4))
    run_rule(pack, ctx), run_convolution(pack, ctx)  # tables that are made on first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_rule(pack, ctx), run_convolution(pack, ctx)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def shared_device(seed: int) -> dict[str, Tensor]:
    pack = draw(torch.Generator().manual_seed(seed), LENGTHS, K=64, V=32)
    part = split(pack.cu_seqlens, 2, "zigzag")
    (found,) = run_all(pack, ds.build_context(part, torch.distributed.group.WORLD, device="cuda:0"))
    return found


def test_gloo_ranks_share_the_device(rng):
    seed = rng.initial_seed()
    pack = draw(torch.Generator().manual_seed(seed), LENGTHS, K=64, V=32)
    part = split(pack.cu_seqlens, 2, "zigzag")
    simulated = run_all(pack, ds.build_context(part, ds.SimulatedGroup(2)))
    for real, expected in zip(gloo(2).run(shared_device, seed), simulated, strict=True):
        assert [n for n in expected if not same_bits(real[n], expected[n])] == []


def nccl_alone(seed: int) -> dict[str, Tensor]:
    group = torch.distributed.new_group([0], backend="nccl")
    return run_all(*_one_rank(seed, group))[0]


def _one_rank(seed: int, group: Any) -> tuple[Pack, ds.Context]:
    pack = draw(torch.Generator().manual_seed(seed), LENGTHS, K=64, V=32)
    return pack, ds.build_context(split(pack.cu_seqlens, 1, "zigzag"), group, device="cuda:0")


def test_nccl_gives_the_simulated_bits(rng):
    """One rank, whose zigzag fragments cross all the same, so that every collective is carried out by NCCL."""
    seed = rng.initial_seed()
    (real,) = gloo(1).run(nccl_alone, seed)
    (expected,) = run_all(*_one_rank(seed, None))
    assert [n for n in expected if not same_bits(real[n], expected[n])] == []


@pytest.mark.slow
def test_the_oracle_takes_a_whole_pack():
    """One document of 254,976 tokens with 16 key and 48 value heads of 128, forward and backward, within 40 GiB."""
    T, H, HV, D = 254_976, 16, 48, 128
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    unit = torch.nn.functional.normalize
    q, k = (unit(torch.randn(T, H, D, device="cuda", dtype=torch.bfloat16), dim=-1) for _ in range(2))
    v, do = (torch.randn(T, HV, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    g, beta = -0.1 * torch.rand(T, HV, device="cuda"), torch.rand(T, HV, device="cuda")
    seen = 0
    for slab in reference.head_slabs(q, k, v, g, beta, [0, T], do):
        assert all(x.isfinite().all() for x in (slab.o, slab.dq, slab.dk, slab.dv, slab.dg, slab.dbeta))
        seen += slab.o.shape[1]
    peak = torch.cuda.max_memory_allocated() / GIB
    print(f"peak {peak:.1f} GiB")
    assert seen == HV and peak < 40
