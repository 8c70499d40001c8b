"""The same bits, however often a step is run and by whatever way, and nothing kept that was not announced."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from tests.helpers import same_bits
from tests.op.support import (
    GRADIENTS,
    LAYOUTS,
    Pack,
    alone,
    differing,
    draw,
    leaf,
    run_convolution,
    run_rule,
    simulate,
    split,
)

LENGTHS = [70, 0, 1, 45, 9]


def step(pack: Pack, ctx: ds.Context) -> list[dict[str, Tensor]]:
    """By rank: all results of the operation and of the convolution."""
    return [a | b for a, b in zip(run_rule(pack, ctx), run_convolution(pack, ctx), strict=True)]


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert [differing(a, b) for a, b in zip(found, expected, strict=True)] == [[]] * len(expected)


def test_thirty_runs(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS).to(torch.bfloat16)
    ctx = simulate(split(pack.cu_seqlens, 3, "zigzag"))
    first = step(pack, ctx)
    for _ in range(29):
        assert_same(step(pack, ctx), first)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_exchange(rng: torch.Generator, dtype: torch.dtype, layout: str) -> None:
    pack = draw(rng, LENGTHS, H=1, HV=5, K=8, V=6).to(dtype)
    ctx = simulate(split(pack.cu_seqlens, 3, layout, rng))
    expected = run_rule(pack, ctx, exchange="all_to_all")
    for exchange in ("ring", "all_gather"):
        assert_same(run_rule(pack, ctx, exchange=exchange), expected)
        options = {"exchange": exchange, "initial_state": pack.initial_state, "output_final_state": True}
        operands = [ctx.shard(x) for x in pack[1:6]]
        _, _, saved = ds.forward(*operands, ctx, **options)
        douts = {"do": ctx.shard(pack.do), "dfinal_state": pack.dfinal_state}
        for kept in (saved, None):
            for found, rank in zip(ds.backward(*operands, ctx, **douts, saved=kept, **options), expected, strict=True):
                assert [n for n in GRADIENTS if not same_bits(getattr(found, n), rank[n])] == []


def test_uninitialised_memory_is_never_read(rng: torch.Generator) -> None:
    """Torch fills it with NaN where it is asked for determinism."""
    pack = draw(rng, LENGTHS)
    ctx = simulate(split(pack.cu_seqlens, 3, "zigzag"))
    plain = step(pack, ctx)
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        filled = step(pack, ctx)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(filled, plain)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_defaults_of_the_process_do_not_matter(rng: torch.Generator, default: torch.dtype) -> None:
    pack = draw(rng, LENGTHS).to(torch.float32)
    part = split(pack.cu_seqlens, 2, "zigzag")
    plain, before = step(pack, simulate(part)), torch.get_default_dtype()
    torch.set_default_dtype(default)
    torch.set_default_device("meta")
    try:
        found = step(pack, simulate(part))
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    assert_same(found, plain)


def test_a_context_made_in_inference_mode_trains(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS)
    with torch.inference_mode():
        ctx = alone(pack)
        o, _ = ds.chunk_gated_delta_rule(*pack[1:6], ctx)
    (found,) = run_rule(pack, ctx)
    assert same_bits(found["dq"], run_rule(pack, alone(pack))[0]["dq"])
    assert same_bits(o, ds.chunk_gated_delta_rule(*pack[1:6], ctx)[0])


def test_backward_twice(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    leaves = [leaf(x) for x in (*pack[1:6], pack.x)]
    o, _ = ds.chunk_gated_delta_rule(*map(ctx.shard, leaves[:5]), ctx)
    y = ds.causal_conv1d(ctx.shard(leaves[5]), pack.weight, ctx)
    once, twice = (
        torch.autograd.grad([*o, *y], leaves, [*ctx.shard(pack.do), *ctx.shard(pack.dy)], retain_graph=True)
        for _ in range(2)
    )
    assert all(map(same_bits, once, twice))


def test_gradients_of_gradients_are_refused(rng: torch.Generator) -> None:
    pack = draw(rng, [9])
    q, x = leaf(pack.q), leaf(pack.x)
    ctx = alone(pack)
    for y, t in ((ds.chunk_gated_delta_rule(q, *pack[2:6], ctx)[0], q), (ds.causal_conv1d(x, pack.weight, ctx), x)):
        (grad,) = torch.autograd.grad(y.square().sum(), t, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_operands_changed_before_the_backward_are_noticed(rng: torch.Generator) -> None:
    pack = draw(rng, [9])
    ctx = alone(pack)
    for changed in range(5):
        operands = [leaf(x) * 1 for x in pack[1:6]]
        o, _ = ds.chunk_gated_delta_rule(*operands, ctx)
        operands[changed].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(rng: torch.Generator, reentrant: bool) -> None:
    pack = draw(rng, LENGTHS)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))

    def block(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, x: Tensor) -> Tensor:
        o, _ = ds.chunk_gated_delta_rule(*map(ctx.shard, (q, k, v, g, beta)), ctx)
        y = ds.causal_conv1d(ctx.shard(x), pack.weight, ctx)
        return torch.cat([*(t.flatten() for t in o), *(t.flatten() for t in y)])

    leaves = [leaf(x) for x in (*pack[1:6], pack.x)]
    plain = block(*leaves)
    recomputed = checkpoint(block, *leaves, use_reentrant=reentrant)
    assert same_bits(plain, recomputed)
    dout = torch.randn(plain.shape, generator=rng, dtype=plain.dtype)
    expected = torch.autograd.grad(plain, leaves, dout)
    recomputed.backward(dout)
    assert all(same_bits(t.grad, grad) for t, grad in zip(leaves, expected, strict=True))


def test_nothing_but_operands_and_the_saved_set_is_kept(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS).to(torch.bfloat16)
    ctx = simulate(split(pack.cu_seqlens, 3, "zigzag"))
    shards = [[leaf(x) for x in ctx.shard(x)] for x in pack[1:6]]
    ours = {x.untyped_storage().data_ptr() for column in shards for x in column}
    kept = []

    def pack_hook(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in ours:
            kept.append(x.numel() * x.element_size())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda x: x):
        ds.chunk_gated_delta_rule(*shards, ctx)
    assert sum(kept) == sum(ds.saved_bytes(ctx, H=2, HV=4, K=8, V=8)) > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_autocast_leaves_fp32_arithmetic_alone(rng: torch.Generator, world_size: int) -> None:
    """Operands that are narrow already give the same bits inside and outside of autocast, in both directions."""
    pack = draw(rng, LENGTHS).to(torch.bfloat16)
    ctx = simulate(split(pack.cu_seqlens, world_size, "zigzag"))
    plain = step(pack, ctx)
    with torch.autocast("cpu", torch.bfloat16):
        cast = step(pack, ctx)
    assert_same(cast, plain)


def test_autocast_casts_q_k_and_v_as_for_a_product(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS).to(torch.float32)
    ctx = alone(pack)
    expected, _ = ds.chunk_gated_delta_rule(*(x.bfloat16() for x in pack[1:4]), pack.g, pack.beta, ctx)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = ds.chunk_gated_delta_rule(*pack[1:6], ctx)
    assert found.dtype == torch.bfloat16 and same_bits(found, expected)
