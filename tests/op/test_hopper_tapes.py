"""What the Hopper tier keeps, hands on and makes again: stages run as often as said, any slabs of heads give the same
bits, and a step's memory is what docs/memory.md says."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from deltaspan.kernels import select
from tests.helpers import same_bits
from tests.op.hopper import drawn
from tests.op.memory import requested
from tests.op.support import leaf, offsets, split

LAUNCHERS = ("prepared", "forward", "transferred", "walked_back", "of_chunks")


def operands(rng: torch.Generator, T: int, H: int, HV: int, device: str) -> list[Tensor]:
    q, k, v = (torch.randn(1, T, heads, 128, generator=rng).to(device, torch.bfloat16) for heads in (H, H, HV))
    g, beta = (torch.rand(1, T, HV, generator=rng).to(device) for _ in range(2))
    return [leaf(x) for x in (q / 12, k / 12, v, -g, beta)]


def rule(ctx: ds.Context, after: bool = False, **options: Any) -> Callable[..., Tensor]:
    def region(*x: Tensor) -> Tensor:
        o, _ = ds.chunk_gated_delta_rule(*x, ctx, backend="hopper", **options)
        return o.cos() if after else o

    return region


def counted(monkeypatch: pytest.MonkeyPatch, tier: Any) -> Counter:
    """How often kernels are launched: prep, and walks by what they write."""
    runs: Counter = Counter()

    def spied(name: str) -> Callable:
        real = getattr(tier, name)

        def run(*args: Any, **what: Any) -> Any:
            written = [w for w in ("output", "states") if what.get(w, name == "forward" and w == "output")]
            runs[" ".join([name, *written])] += 1
            runs["on halves"] += what.get("whole") == 0
            return real(*args, **what)

        return run

    for name in LAUNCHERS:
        monkeypatch.setattr(tier, name, spied(name))
    return runs


PLAIN = {"prepared": 2, "forward output": 1}
BACK = {"forward states": 2, "walked_back states": 2, "of_chunks": 2}
AROUND = {"forward": 1, "transferred": 1, "walked_back": 1}  # summaries, which leave three segments
HOW: dict[str, tuple[Callable[..., Any] | None, dict[str, Any], dict[str, int]]] = {
    "plain": (None, {}, PLAIN),
    "full": (None, {"save_mode": "full"}, PLAIN | {"prepared": 1}),
    "checkpoint": (checkpoint, {}, PLAIN | {"forward": 2, "transferred": 2}),
    "never handed on": (
        checkpoint, {"reuse_recompute_tapes": False}, PLAIN | {"prepared": 3, "forward": 2, "transferred": 2},
    ),
    "output all the same": (
        checkpoint, {"recompute_output": "always"},
        PLAIN | {"forward output": 2, "forward": 2, "transferred": 2},
    ),
    "handle": (checkpoint, {"recompute_handle": True}, PLAIN),
    "full in a checkpoint": (checkpoint, {"save_mode": "full"}, PLAIN | {"forward": 2, "transferred": 2}),
    "replay": (None, {"boundary_mode": "replay"}, PLAIN | {"forward": 2, "transferred": 2}),
    "maps again": (None, {"save_transfer": False}, PLAIN | {"transferred": 2}),
}  # fmt: skip


@pytest.mark.parametrize("how", HOW)
def test_stages_are_run_as_often_as_said(
    dry: Any, hopper: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """By two slabs; a recompute whose output nobody reads walks for its summaries alone."""
    wrap, options, expected = HOW[how]
    options = options | ({"recompute_handle": ds.RecomputeHandle()} if "recompute_handle" in options else {})
    ctx = ds.build_context(ds.partition([0, 250], 1), device=hopper)
    monkeypatch.setattr(dry, "_multiprocessors", lambda device: 1)
    runs = counted(monkeypatch, dry)
    x = operands(rng, 250, 2, 4, hopper)
    region = rule(ctx, segments=3, **options)
    o = region(*x) if wrap is None else wrap(region, *x, use_reentrant=False)
    torch.autograd.grad(o, x, torch.randn_like(o))
    del runs["on halves"]
    assert runs == AROUND | BACK | expected


def test_a_recompute_whose_output_is_read_hands_on_what_prep_left(
    dry: Any, hopper: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = ds.build_context(ds.partition([0, 250], 1), device=hopper)
    x = operands(rng, 250, 2, 4, hopper)
    for reuse, prepared in ((True, 2), ("auto", 3)):
        with monkeypatch.context() as patched:
            runs = counted(patched, dry)
            o = checkpoint(rule(ctx, after=True, reuse_recompute_tapes=reuse), *x, use_reentrant=False)
            torch.autograd.grad(o, x, torch.randn_like(o))
        assert (runs["prepared"], runs["forward output"], runs["forward states"]) == (prepared, 2, 2)


@pytest.mark.parametrize(("H", "most", "slabs", "multiprocessors"), [(2, 4, 2, 1000), (3, 2, 2, 1)])
def test_any_slabs_give_the_same_bits(
    hopper: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, H: int, most: int, slabs: int,
    multiprocessors: int,
) -> None:  # fmt: skip
    """Also where a slab's programs are so few that they walk on halves of V."""
    tier = select.tier("hopper")
    part = ds.partition([0, 30, 66], 1)
    x = [*operands(rng, 66, H, 2 * H, hopper), leaf(torch.randn(2, 2 * H, 128, 128, generator=rng).to(hopper))]
    do, found = torch.randn(x[2].shape, generator=rng).to(x[2]), []
    for most_slabs, there in ((1, 1), (most, multiprocessors)):
        monkeypatch.setattr(tier, "MOST_SLABS", most_slabs)
        monkeypatch.setattr(tier, "_multiprocessors", lambda device, there=there: there)
        with monkeypatch.context() as patched:
            ctx = ds.build_context(part, device=hopper, sm_count=there)
            o = ds.chunk_gated_delta_rule(*x[:5], ctx, initial_state=x[5], backend="hopper")[0]
            runs = counted(patched, tier)
            found.append(torch.autograd.grad(o, x, do))
        assert runs["of_chunks"] == runs["walked_back states"] == (1 if most_slabs == 1 else slabs)
        assert runs["on halves"] == (2 * slabs if there == 1000 else 0)
    assert all(map(same_bits, *found))


@pytest.mark.parametrize("raw", [False, True], ids=["ready", "raw"])
def test_save_mode_full(hopper: str, rng: torch.Generator, raw: bool) -> None:
    """The bits of light, from as many bytes as foretold; also with a handle, which keeps no more than light."""
    pack = drawn(rng, [66, 0, 3], hopper, H=1, HV=2)
    ctx = ds.build_context(split(pack.cu_seqlens, 2, "zigzag", rng), ds.SimulatedGroup(2), device=hopper)
    shards = [ctx.shard(x) for x in pack[1:6]]
    heads = {"H": 1, "HV": 2}
    given = {"use_qk_l2norm_in_kernel": raw, "save_transfer": not raw, "backend": "hopper"}  # maps again want lengths
    found = {}
    for mode in ("light", "full"):
        *_, saved = ds.forward(*shards, ctx, save_mode=mode, **given)
        kept = [{t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in s.tensors} for s in saved]
        assert [sum(of_rank.values()) for of_rank in kept] == ds.saved_bytes(ctx, **heads, save_mode=mode, **given)
        found[mode] = ds.backward(*shards, ctx, ctx.shard(pack.do), saved=saved, save_mode=mode, **given)
    chunks = sum(len(view.grid.start) for view in ctx._views)
    more = sum(
        sum(ds.saved_bytes(ctx, **heads, save_mode=m, **given)) * sign for m, sign in (("full", 1), ("light", -1))
    )
    assert more == chunks * (2 * (64 * 64 * 2 + 64 * 4 + 4) + 4 + raw * 2 * 64 * 4)
    for light, full in zip(found["light"], found["full"], strict=True):
        assert all(a is b is None or same_bits(a, b) for a, b in zip(light, full, strict=True))


def step_bytes(T: int, H: int, HV: int, chunks: int, segments: int, slabs: int) -> int:
    """docs/memory.md: the most that a step in a checkpoint holds at once, beyond its operands and do."""
    results = T * (2 * 256 * HV + 2 * 256 * H + 2 * 4 * HV)  # o, dq, dk, dv, dg, dbeta
    prepared = chunks * (HV * (64 * 64 * 2 + 64 * 4 + 4) + 4 * H)
    walked = chunks * HV * 2 * 128 * 128 * 2  # S, D
    passed = segments - 1  # states that pass between segments, and their adjoints; beside them those of all entries
    states = (2 * passed + segments) * 4 * HV * 128 * 128
    largest = -(-H // slabs)  # of a slab's heads
    return results + prepared + states + walked * largest // H


@pytest.mark.parametrize(
    ("H", "HV", "segments", "multiprocessors", "slabs", "raw"),
    [
        (4, 12, 3, 4, 4, False),
        (2, 4, 4, 100, 2, False),
        (1, 3, 2, 1, 1, False),
        (4, 8, 3, 4, 2, True),
        (3, 3, 4, 3, 2, False),
    ],
)
def test_peak_of_a_step(
    dry: Any, hopper: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, H: int, HV: int, segments: int,
    multiprocessors: int, slabs: int, raw: bool,
) -> None:  # fmt: skip
    T = 3000
    ctx = ds.build_context(ds.partition(offsets([T]), 1), device=hopper)
    monkeypatch.setattr(dry, "_multiprocessors", lambda device: multiprocessors)
    x, do = operands(rng, T, H, HV, hopper), torch.randn(1, T, HV, 128).to(hopper, torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        region = rule(ctx, segments=segments, use_qk_l2norm_in_kernel=raw)
        o = checkpoint(region, *x, use_reentrant=False, preserve_rng_state=False)
        return o.detach(), *torch.autograd.grad(o, x, do)

    step()  # tables are made
    peak = requested(step, hopper)
    foretold = step_bytes(T, H, HV, -(-T // 64), segments, slabs) + raw * T * 512 * H  # ready q and k
    assert abs(peak - foretold) < 0.002 * foretold  # an index here and there
    heads = {"H": H, "HV": HV, "use_qk_l2norm_in_kernel": raw}
    assert ds.workspace_bytes(ctx, **heads, checkpoint=True, segments=segments, backend="hopper") == peak
