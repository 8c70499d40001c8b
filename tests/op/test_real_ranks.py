"""Real gloo ranks give the bits of simulated ones, in both directions, and sums over them give those of one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deltaspan as ds
from tests.helpers import gloo, same_bits
from tests.op.support import (
    LAYOUTS,
    Pack,
    assert_exact,
    draw,
    join,
    leaf,
    listed,
    ragged,
    run_convolution,
    run_rule,
    simulate,
    split,
    true_convolution,
    true_rule,
    unlisted,
)

LENGTHS = [37, 150, 0, 1, 64, 5, 2, 90]


def drawn(seed: int, world_size: int, layout: str, dtype: torch.dtype) -> tuple[Pack, ds.Partition]:
    """The same pack and partition on every rank and here. `idle_rank`: rank 1 holds nothing."""
    rng = torch.Generator().manual_seed(seed)
    pack = draw(rng, LENGTHS, HV=6, K=16, V=12).to(dtype)
    if layout != "idle_rank":
        return pack, split(pack.cu_seqlens, world_size, layout, rng)
    table = [(d, at, n, rank if rank != 1 else 0) for d, at, n, rank in ragged(pack.cu_seqlens, world_size, rng)]
    return pack, ds.partition(pack.cu_seqlens, world_size, fragments=table)


def steps(group: Any, pack: Pack, part: ds.Partition) -> list[dict[str, Tensor]]:
    """By rank that runs here: all that the operation, the convolution and resharding give."""
    ctx = ds.build_context(part, group, device="cpu")
    whole = leaf(pack.x)
    shards = [leaf(x) for x in listed(ctx, ctx.shard(pack.x))]
    gathered = listed(ctx, ctx.unshard(unlisted(ctx, shards), total=part.total_tokens + 3))
    ranks = range(part.world_size) if ctx.rank is None else [ctx.rank]
    douts = [torch.cat([pack.dy * (r + 1), pack.dy[:, :3]], dim=1) for r in ranks]
    dshards = torch.autograd.grad(gathered, shards, douts)
    dwhole = [
        torch.autograd.grad(x, whole, g, retain_graph=True)[0]
        for x, g in zip(listed(ctx, ctx.shard(whole)), listed(ctx, ctx.shard(pack.dy)), strict=True)
    ]
    resharded = [
        {"unshard": u.detach(), "dunshard": du, "dshard": s} for u, du, s in zip(gathered, dshards, dwhole, strict=True)
    ]
    parts = zip(run_rule(pack, ctx), run_convolution(pack, ctx), resharded, strict=True)
    return [rule | convolution | shards for rule, convolution, shards in parts]


def real_steps(*drawn_from: Any) -> dict[str, Tensor]:
    return steps(dist.group.WORLD, *drawn(*drawn_from))[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
@pytest.mark.parametrize("layout", [*LAYOUTS, "idle_rank"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_bits_of_simulated_ranks(rng: torch.Generator, world_size: int, layout: str, dtype: torch.dtype) -> None:
    drawn_from = (rng.initial_seed(), world_size, layout, dtype)
    real = gloo(world_size).run(real_steps, *drawn_from)
    pack, part = drawn(*drawn_from)
    simulated = steps(ds.SimulatedGroup(world_size), pack, part)
    assert len(real) == len(simulated) == world_size
    different = [(r, n) for r in range(world_size) for n in simulated[r] if not same_bits(real[r][n], simulated[r][n])]
    assert different == []
    assert real[0].keys() == simulated[0].keys() >= {"o", "dinitial_state", "y", "dweight", "unshard", "dshard"}

    # and what they are the same bits of is right
    if layout == "idle_rank":
        assert real[1]["o"].shape[1] == real[1]["dx"].shape[1] == 0
        assert not real[1]["dweight"].any() and not real[1]["final_state"].any()
    for rank in range(world_size):
        mine = torch.from_numpy(part.token_ids(rank))
        assert same_bits(real[rank]["unshard"], torch.cat([pack.x, torch.zeros_like(pack.x[:, :3])], dim=1))
        wide = torch.promote_types(dtype, torch.float32)  # the ranks' gradients are summed there and rounded once
        ranks_sum = sum((pack.dy[:, mine] * (r + 1)).to(wide) for r in range(world_size))
        assert same_bits(real[rank]["dunshard"], ranks_sum.to(dtype))
        assert same_bits(real[rank]["dshard"], torch.zeros_like(pack.dy).index_copy(1, mine, pack.dy[:, mine]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_over_ranks_are_those_of_one_rank(rng: torch.Generator, layout: str) -> None:
    drawn_from = (rng.initial_seed(), 4, layout, torch.float64)
    pack, part = drawn(*drawn_from)
    (one,) = steps(None, pack, ds.partition(pack.cu_seqlens, 1))
    real = gloo(4).run(real_steps, *drawn_from)
    names = one.keys() - {"unshard", "dunshard", "dshard"}
    found = join(part, [{n: r[n] for n in names} for r in real])
    assert_exact(found, {n: one[n] for n in names}, 1e-12)  # a few hundred FP64 roundings of terms around 1


def in_halves(*drawn_from: Any) -> dict[str, Tensor]:
    """A step in one of two groups of two ranks, the second of which counts its ranks from 0 too."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return steps(halves[dist.get_rank() // 2], *drawn(*drawn_from))[0]


def on_meshes(*drawn_from: Any) -> list[dict[str, Tensor]]:
    """A step on a mesh of one dimension, and on a slice of one with two."""
    flat = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    square = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    return [steps(group, *drawn(*drawn_from))[0] for group in (flat, square["cp"])]


def test_groups_within_a_world_and_meshes(rng: torch.Generator) -> None:
    drawn_from = (rng.initial_seed(), 2, "zigzag", torch.float64)
    simulated = steps(ds.SimulatedGroup(2), *drawn(*drawn_from))
    found = gloo(4).run(in_halves, *drawn_from)
    found += [step for both in zip(*gloo(2).run(on_meshes, *drawn_from), strict=True) for step in both]
    assert len(found) == 8
    for i, step in enumerate(found):
        assert [n for n in step if not same_bits(step[n], simulated[i % 2][n])] == []


def by_themselves(*drawn_from: Any) -> dict[str, Tensor]:
    """A step in a group of one real rank, whose fragments cross all the same."""
    group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    return steps(group, *drawn(*drawn_from))[0]


def test_a_group_of_one(rng: torch.Generator) -> None:
    drawn_from = (rng.initial_seed(), 1, "zigzag", torch.bfloat16)
    (alone,) = steps(None, *drawn(*drawn_from))
    for real in gloo(2).run(by_themselves, *drawn_from):
        assert [n for n in alone if not same_bits(real[n], alone[n])] == []


def by_every_exchange(*drawn_from: Any) -> list[dict[str, Tensor]]:
    pack, part = drawn(*drawn_from)
    ctx = ds.build_context(part, dist.group.WORLD, device="cpu")
    return [run_rule(pack, ctx, exchange=exchange)[0] for exchange in ("all_to_all", "ring", "all_gather")]


@pytest.mark.parametrize("layout", [*LAYOUTS, "idle_rank"])
def test_every_exchange(rng: torch.Generator, layout: str) -> None:
    drawn_from = (rng.initial_seed(), 4, layout, torch.bfloat16)
    pack, part = drawn(*drawn_from)
    expected = run_rule(pack, simulate(part))
    for rank, by_exchange in enumerate(gloo(4).run(by_every_exchange, *drawn_from)):
        for found in by_exchange:
            assert [n for n in found if not same_bits(found[n], expected[rank][n])] == []


def wanting(*drawn_from: Any) -> list[Tensor | None]:
    """A step in which only rank 0 wants gradients."""
    pack, part = drawn(*drawn_from)
    ctx = ds.build_context(part, dist.group.WORLD, device="cpu")
    v, x = (ctx.shard(x).requires_grad_(ctx.rank == 0) for x in (pack.v, pack.x))
    o, _ = ds.chunk_gated_delta_rule(*map(ctx.shard, (pack.q, pack.k)), v, *map(ctx.shard, (pack.g, pack.beta)), ctx)
    y = ds.causal_conv1d(x, pack.weight, ctx)
    whole = ctx.unshard(x)
    torch.autograd.backward((o, y, whole), (ctx.shard(pack.do), ctx.shard(pack.dy), pack.dy))
    return [v.grad, x.grad]


def test_a_rank_that_wants_no_gradient_takes_part(rng: torch.Generator) -> None:
    drawn_from = (rng.initial_seed(), 2, "zigzag", torch.float64)
    pack, part = drawn(*drawn_from)
    pack = pack._replace(initial_state=torch.zeros_like(pack.initial_state))
    pack = pack._replace(dfinal_state=torch.zeros_like(pack.dfinal_state))
    (dv, dx), nothing = gloo(2).run(wanting, *drawn_from)
    assert nothing == [None, None]
    true, mine = true_rule(pack) | true_convolution(pack, bias=False), torch.from_numpy(part.token_ids(0))
    assert_exact({"dv": dv, "dx": dx}, {"dv": true["dv"][:, mine], "dx": (true["dx"] + 2 * pack.dy)[:, mine]})
