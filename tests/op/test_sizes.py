"""The bytes that are foretold: those recorded of another implementation, those handed to torch, those kept."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deltaspan as ds
from deltaspan.exchange import AllToAll
from deltaspan.exchange.mail import Mail
from tests.helpers import gloo
from tests.op.support import LAYOUTS, draw, leaf, offsets, simulate, split

CONTEXTS = json.loads((Path(__file__).parents[1] / "data" / "context_vectors.json").read_text())["contexts"]
LAYOUT_OF = dict(zip("CZD", LAYOUTS, strict=False))
LENGTHS = [37, 60, 0, 1, 30, 5, 2, 40]


@pytest.mark.parametrize("recorded", CONTEXTS, ids=lambda r: f"{r['layout']}{r['W']}-{len(r['cu']) - 1}")
def test_recorded_bytes(recorded: dict[str, Any]) -> None:
    ctx = simulate(ds.partition(recorded["cu"], recorded["W"], LAYOUT_OF[recorded["layout"]]))
    heads = {"H": recorded["H"], "HV": recorded["HV"]}
    found = [{name: list(both) for name, both in rank.items()} for rank in ds.comm_bytes(ctx, **heads)]
    assert found == [rank["bytes"] for rank in recorded["ranks"]]
    assert ds.saved_bytes(ctx, **heads) == [rank["saved"] for rank in recorded["ranks"]]


def handed_over(
    seed: int,
    part: ds.Partition,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    taps: int = 4,
    exchange: str = "all_to_all",
) -> tuple[dict, dict]:
    """Bytes that a layer's step gives to each collective and gets from it, and what was foretold."""
    H, HV, K, V = shape
    channels = [2 * H * K, HV * V]
    rng = torch.Generator().manual_seed(seed)
    pack = draw(rng, [part.total_tokens], H=H, HV=HV, K=K, V=V, D=sum(channels), taps=taps).to(dtype)
    ctx = ds.build_context(part, dist.group.WORLD, device="cpu", conv_kernel_size=taps)
    handed, real = {}, Mail.exchange

    def counted(mail: Mail, asked: AllToAll, send: torch.Tensor, size: int) -> torch.Tensor:
        received = real(mail, asked, send, size)
        so_far = handed.get(name := asked.name.split(",")[0], (0, 0))  # a ring's hops are counted together
        handed[name] = so_far[0] + len(send), so_far[1] + len(received)
        return received

    leaves = [leaf(ctx.shard(x)) for x in (*pack[1:6], pack.x)]
    with mock.patch.object(Mail, "exchange", counted):
        y = ds.causal_conv1d(leaves[5].split(channels, dim=2), pack.weight.split(channels), ctx)
        o, _ = ds.chunk_gated_delta_rule(*leaves[:5], ctx, exchange=exchange)
        torch.autograd.grad(o, leaves[:5], ctx.shard(pack.do))
        torch.autograd.grad(y, leaves[5], ctx.shard(pack.dy).split(channels, dim=2))
    foretold = ds.comm_bytes(ctx, H=H, HV=HV, K=K, V=V, dtype=dtype, exchange=exchange)
    return handed, foretold


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_handed_over(rng: torch.Generator, world_size: int, layout: str, dtype: torch.dtype) -> None:
    shape = (1, 5, 8, 12) if layout in ("contiguous", "ragged") else (2, 4, 8, 4)
    part = split(offsets(LENGTHS), world_size, layout, rng)
    for handed, foretold in gloo(world_size).run(handed_over, rng.initial_seed(), part, dtype, shape):
        assert handed == foretold and len(handed) == 6


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_of_other_exchanges(rng: torch.Generator, layout: str, exchange: str) -> None:
    part = split(offsets(LENGTHS), 4, layout, rng)
    call = rng.initial_seed(), part, torch.bfloat16, (1, 5, 8, 12), 4, exchange
    for handed, foretold in gloo(4).run(handed_over, *call):
        assert handed == foretold and len(handed) == 4


def test_nothing_is_handed_over_where_nothing_crosses(rng: torch.Generator) -> None:
    """A convolution of one tap asks for no collective; with whole documents on every rank nobody asks for any."""
    rest = rng.initial_seed(), torch.bfloat16, (1, 2, 4, 4)
    part = split(offsets(LENGTHS), 2, "zigzag")
    for handed, foretold in gloo(2).run(handed_over, rest[0], part, *rest[1:], 1):
        assert foretold.pop("halo") == foretold.pop("halo_gradient") == (0, 0)
        assert handed == foretold
    part = ds.partition([0, 97, 175], 2, fragments=[[(0, 0, 97)], [(1, 0, 78)]])
    for handed, foretold in gloo(2).run(handed_over, rest[0], part, *rest[1:]):
        assert handed == {} and set(foretold.values()) == {(0, 0)}


def test_channels_of_the_convolution() -> None:
    ctx = simulate(ds.partition([0, 20], 2))
    default = ds.comm_bytes(ctx, H=1, HV=2, K=4, V=8)[0]["halo"]
    assert default == ds.comm_bytes(ctx, H=1, HV=2, K=4, V=8, channels=24)[0]["halo"] == (3 * 24 * 2, 0)
    assert ds.comm_bytes(ctx, H=1, HV=2, channels=5)[0]["halo"] == (3 * 5 * 2, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_bytes(rng: torch.Generator, layout: str, dtype: torch.dtype) -> None:
    pack = draw(rng, LENGTHS, H=1, HV=5, V=6).to(dtype)
    ctx = simulate(split(pack.cu_seqlens, 3, layout, rng))
    _, _, saved = ds.forward(*(ctx.shard(x) for x in pack[1:6]), ctx)
    tensors = [[x for x in vars(s).values() if isinstance(x, torch.Tensor)] for s in saved]
    kept = [sum(x.numel() * x.element_size() for x in of_rank) for of_rank in tensors]
    assert kept == ds.saved_bytes(ctx, H=1, HV=5, K=8, V=6, dtype=dtype)


@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
def test_saved_bytes_of_other_exchanges(rng: torch.Generator, exchange: str) -> None:
    pack = draw(rng, LENGTHS, H=1, HV=5, V=6).to(torch.bfloat16)
    ctx = simulate(split(pack.cu_seqlens, 3, "zigzag"))
    _, _, saved = ds.forward(*(ctx.shard(x) for x in pack[1:6]), ctx, exchange=exchange)
    tensors = [[x for x in vars(s).values() if isinstance(x, torch.Tensor)] for s in saved]
    kept = [sum(x.numel() * x.element_size() for x in of_rank) for of_rank in tensors]
    assert kept == ds.saved_bytes(ctx, H=1, HV=5, K=8, V=6, exchange=exchange)
