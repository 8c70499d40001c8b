"""Checkpoints of real ranks and around layers: every rank recomputes what the others wait for, with the same bits."""

from collections.abc import Callable
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from deltaspan.exchange.mail import Mail
from tests.helpers import gloo
from tests.op.checkpoints import LENGTHS, PLAN, REGIONS, WRAPS, Region, drawn, same, step, uncheckpointed
from tests.op.support import leaf, offsets, ragged, split

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of reentrant in reentrant


def told(mail: Mail, error: Exception) -> None:
    raise AssertionError(f"other ranks were told of {error!r}, by which torch ends a recompute")


silent = mock.patch.object(Mail, "announce", told)


def partition_of(layout: str, world_size: int, rng: torch.Generator) -> ds.Partition:
    """`idle_rank`: rank 1 holds nothing. `own_documents`: nothing crosses into or out of ranks 0 and 1."""
    cu_seqlens = offsets(LENGTHS)
    if layout == "idle_rank":
        table = [(d, at, n, rank if rank != 1 else 0) for d, at, n, rank in ragged(cu_seqlens, world_size, rng)]
        return ds.partition(cu_seqlens, world_size, fragments=table)
    if layout == "own_documents":
        table = [[(3, 0, 70)], [(1, 0, 1)], [(0, 0, 130)], [(0, 130, 70)]]
        return ds.partition(cu_seqlens, world_size, fragments=table)
    return split(cu_seqlens, world_size, layout, rng)


@silent
def on_rank(seed: int, part: ds.Partition, kinds: list[str], hows: list[str], frozen: int | None = None) -> list[str]:
    """What differs there from the step without a checkpoint. The operands of rank `frozen` want no gradient."""
    ctx = ds.build_context(part, dist.group.WORLD, device="cpu", **PLAN)
    pack = drawn(torch.Generator().manual_seed(seed))
    wanted = slice(0, 0) if ctx.rank == frozen else slice(None)
    return [
        f"{kind}, {how}"
        for kind, how in product(kinds, hows)
        for region in [REGIONS[kind](pack, ctx)]
        if not same(step(WRAPS[how](region), pack, wanted), step(uncheckpointed(region, how), pack, wanted))
    ]


HOWS = ("checkpoint", "reentrant", "no early stop", "selective", "copied inside")
NESTED = tuple(how for how in WRAPS if how.startswith("nested"))
ROWS = [
    ("contiguous", 4, "rule_last", HOWS),
    ("zigzag", 2, "two_rules", tuple(WRAPS)),
    ("zigzag_per_document", 2, "convolution_and_rule", tuple(WRAPS)),
    ("ragged", 4, "convolution_and_rule", NESTED),
    ("ragged", 2, "rule_then_more", HOWS),
    ("idle_rank", 4, "convolution_and_rule", HOWS),
    ("own_documents", 4, "two_rules", NESTED),
]


@pytest.mark.parametrize(("layout", "world_size", "kind", "hows"), ROWS, ids=[f"{row[0]}-{row[2]}" for row in ROWS])
def test_real_ranks(rng: torch.Generator, layout: str, world_size: int, kind: str, hows: tuple[str, ...]) -> None:
    part = partition_of(layout, world_size, rng)
    assert gloo(world_size).run(on_rank, rng.initial_seed(), part, [kind], hows) == [[]] * world_size


@pytest.mark.parametrize("kind", REGIONS)
def test_a_real_rank_that_wants_no_gradient(rng: torch.Generator, kind: str) -> None:
    """It has a backward all the same, with the recompute that the others wait for. Reentrant checkpoints give none."""
    part = partition_of("zigzag", 2, rng)
    hows = ("checkpoint", "no early stop", "selective", "nested, reentrant False False")
    assert gloo(2).run(on_rank, rng.initial_seed(), part, [kind], hows, 1) == [[], []]


class Block(nn.Module):
    """Two layers of deltaspan and what a model has around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ds.nn.GatedDeltaNet(8, 1, 2, head_dim=6, head_v_dim=5) for _ in range(2))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, ctx: ds.Context) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, ctx)
        return x + self.down(nn.functional.gelu(self.up(x)))


def model_step(call: Callable, block: Block, x: Tensor, wanted: bool = True) -> list[Tensor]:
    block.zero_grad()
    x = leaf(x).requires_grad_(wanted)
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in (x, *block.parameters()) if wanted)]


@pytest.mark.parametrize("how", WRAPS)
def test_around_two_layers_and_more(rng: torch.Generator, how: str) -> None:
    torch.manual_seed(rng.initial_seed() % 2**63)
    ctx = ds.build_context(ds.partition([0, 150, 170], 1), device="cpu", **PLAN)
    block, x = Block(), torch.randn(1, 170, 8, generator=rng)

    def region(*leaves: Tensor) -> Tensor:
        return block(leaves[5], ctx)

    def call(region: Region, x: Tensor) -> Tensor:
        return region(*[torch.zeros(())] * 5, x)

    expected = model_step(partial(call, uncheckpointed(region, how)), block, x)
    assert same(model_step(partial(call, WRAPS[how](region)), block, x), expected)


@silent
def model_on_rank(seed: int, part: ds.Partition, frozen: int | None) -> list[str]:
    """What differs of a model of two layers, each in a checkpoint of its own, and all in one."""
    torch.manual_seed(seed)
    ctx = ds.build_context(part, dist.group.WORLD, device="cpu", **PLAN)
    block = Block().requires_grad_(ctx.rank != frozen)
    x = ctx.shard(torch.randn(1, part.total_tokens, 8))

    def layers(x: Tensor) -> Tensor:
        for layer in block.layers:
            x = x + checkpoint(layer, x, ctx, use_reentrant=False)
        return x + block.down(nn.functional.gelu(block.up(x)))

    calls = {
        "layers": layers,
        "block": lambda x: checkpoint(block, x, ctx, use_reentrant=False),
        "both": lambda x: checkpoint(layers, x, use_reentrant=False),
    }
    expected = model_step(lambda x: block(x, ctx), block, x, ctx.rank != frozen)
    return [name for name, call in calls.items() if not same(model_step(call, block, x, ctx.rank != frozen), expected)]


@pytest.mark.parametrize(("layout", "frozen"), [("zigzag", None), ("idle_rank", None), ("ragged", 1)])
def test_models_of_real_ranks(rng: torch.Generator, layout: str, frozen: int | None) -> None:
    seed = rng.initial_seed() % 2**63
    assert gloo(2).run(model_on_rank, seed, partition_of(layout, 2, rng), frozen) == [[], []]
