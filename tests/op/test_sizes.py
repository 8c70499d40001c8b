"""The bytes that are foretold: those recorded of another implementation, those handed to torch, those kept."""

import itertools
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
FORWARD, BACKWARD = ("summaries", "entry_states", "halo"), ("adjoint_offsets", "exit_adjoints", "halo_gradient")
EXCHANGES = ("all_to_all", "ring", "all_gather")
RESEND, REPLAY = {"save_transfer": False}, {"boundary_mode": "replay"}


@pytest.mark.parametrize("recorded", CONTEXTS, ids=lambda r: f"{r['layout']}{r['W']}-{len(r['cu']) - 1}")
def test_recorded_bytes(recorded: dict[str, Any]) -> None:
    ctx = simulate(ds.partition(recorded["cu"], recorded["W"], LAYOUT_OF[recorded["layout"]]))
    heads = {"H": recorded["H"], "HV": recorded["HV"]}
    kept, resent, replayed = (
        [{name: list(both) for name, both in rank.items()} for rank in ds.comm_bytes(ctx, **heads, **mode)]
        for mode in ({}, {"save_transfer": False}, {"boundary_mode": "replay"})
    )
    ranks = recorded["ranks"]
    assert kept == [rank["bytes"] for rank in ranks]
    assert resent == [rank["bytes"] | {"adjoint_offsets": rank["resend"]["adjoint_offsets"]} for rank in ranks]
    for rank, mine, again, twice in zip(ranks, kept, resent, replayed, strict=True):
        sums = rank["sums"]
        assert total(mine, FORWARD) == sums["forward"]
        assert total(mine, BACKWARD) == sums["backward"]
        assert total(again, BACKWARD) == sums["resend_backward"]
        # recorded with the convolution run once more in a backward that replays; ours keeps its rows
        whole = zip(sums["forward"], sums["replay_backward"], mine["halo"], strict=True)
        assert total(twice, FORWARD + BACKWARD) == [forward + backward - halo for forward, backward, halo in whole]

    assert ds.saved_bytes(ctx, **heads) == [rank["saved"] for rank in ranks]
    assert ds.saved_bytes(ctx, **heads, save_transfer=False) == [rank["resend"]["saved"] for rank in ranks]
    assert ds.saved_bytes(ctx, **heads, boundary_mode="replay") == [0] * len(ranks)


def total(by_collective: dict[str, list[int]], names: tuple[str, ...]) -> list[int]:
    return [sum(by_collective[name][way] for name in names) for way in (0, 1)]


def handed_over(
    seed: int,
    part: ds.Partition,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    taps: int = 4,
    **mode: Any,
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
        o, _ = ds.chunk_gated_delta_rule(*leaves[:5], ctx, **mode)
        torch.autograd.grad(o, leaves[:5], ctx.shard(pack.do))
        torch.autograd.grad(y, leaves[5], ctx.shard(pack.dy).split(channels, dim=2))
    foretold = ds.comm_bytes(ctx, H=H, HV=HV, K=K, V=V, dtype=dtype, **mode)
    return handed, foretold


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_handed_over(rng: torch.Generator, world_size: int, layout: str, dtype: torch.dtype) -> None:
    shape = (1, 5, 8, 12) if layout in ("contiguous", "ragged") else (2, 4, 8, 4)
    part = split(offsets(LENGTHS), world_size, layout, rng)
    for handed, foretold in gloo(world_size).run(handed_over, rng.initial_seed(), part, dtype, shape):
        assert handed == foretold and len(handed) == 6


def by_modes(modes: list[dict[str, Any]], *call: Any) -> list[tuple[dict, dict]]:
    return [handed_over(*call, **mode) for mode in modes]


@pytest.mark.parametrize(
    ("layout", "exchange"),
    [
        ("contiguous", "all_to_all"),
        ("ragged", "all_to_all"),
        ("zigzag", "ring"),
        ("ragged", "ring"),
        ("zigzag_per_document", "all_gather"),
        ("ragged", "all_gather"),
    ],
)
def test_bytes_of_every_mode(rng: torch.Generator, layout: str, exchange: str) -> None:
    """A ring and a gathering each ask for two collectives, beside the convolution's two, the owners for four."""
    part = split(offsets(LENGTHS), 4, layout, rng)
    modes = [{"exchange": exchange, **mode} for mode in ({}, RESEND, REPLAY, RESEND | REPLAY)]
    call = rng.initial_seed(), part, torch.bfloat16, (1, 5, 8, 12)
    for rank in gloo(4).run(by_modes, modes, *call):
        assert [handed for handed, _ in rank] == [foretold for _, foretold in rank]
        assert {len(handed) for handed, _ in rank} == {6 if exchange == "all_to_all" else 4}
        (kept, resent, replayed, both) = (foretold for _, foretold in rank)
        assert both == replayed  # nothing is kept that could be left out
        assert (kept == resent) if exchange == "ring" else (kept.keys() == resent.keys())


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


@pytest.mark.parametrize(
    ("layout", "dtype"), [*zip(LAYOUTS, (torch.bfloat16, torch.float64, torch.float32, torch.float16), strict=True)]
)
def test_saved_bytes(rng: torch.Generator, layout: str, dtype: torch.dtype) -> None:
    """Of every mode, whole and cut, by storages: what shows a part of something larger keeps all of it."""
    heads = {"H": 1, "HV": 5, "K": 8, "V": 6}
    pack = draw(rng, [*LENGTHS, 900], **heads).to(dtype)
    ctx = simulate(split(pack.cu_seqlens, 2, layout, rng), p_rule="one")
    operands = [ctx.shard(x) for x in pack[1:6]]
    found = {}
    for exchange, save_mode, rest, segments in itertools.product(EXCHANGES, ("light", "full"), ({}, RESEND), (None, 2)):
        mode = {"exchange": exchange, "save_mode": save_mode, **rest, "segments": segments}
        *_, saved = ds.forward(*operands, ctx, **mode)
        kept = [{t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in s.tensors} for s in saved]
        found[tuple(mode.values())] = [sum(of_rank.values()) for of_rank in kept]
        assert found[tuple(mode.values())] == ds.saved_bytes(ctx, **heads, dtype=dtype, **mode), mode
        assert ds.saved_bytes(ctx, **heads, dtype=dtype, **mode, **REPLAY) == [0, 0]
    assert len(set(map(tuple, found.values()))) >= 8  # most differ: without maps all exchanges keep alike


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"K": -3}, "K must be at least 1"),
        ({"H": 1.5}, "H must be an integer"),
        ({"HV": 3}, "HV=3 and H=2"),
        ({"dtype": torch.int8}, "dtype must be that of operands"),
        ({"dtype": "bf16"}, "dtype must be that of operands"),
        ({"ctx": None}, "ctx must be a Context"),
    ],
)
def test_what_no_call_accepts_has_no_bytes(changed: dict[str, Any], says: str) -> None:
    given = {"ctx": simulate(ds.partition([0, 20], 2)), "H": 2, "HV": 4} | changed
    for query in (ds.comm_bytes, ds.saved_bytes, ds.workspace_bytes):
        with pytest.raises((ValueError, TypeError), match=says):
            query(**given)
    with pytest.raises(ValueError, match="channels must be at least 0"):
        ds.comm_bytes(simulate(ds.partition([0, 20], 2)), H=2, HV=4, channels=-5)
