"""Calls that are made again: launched from a recording, with the bits of a run, and with nothing of an earlier call."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from deltaspan.kernels import select
from deltaspan.op import again
from tests.helpers import same_bits

DOCUMENTS = [0, 66, 70]
T, H, HV, N = 70, 1, 2, 2
RAW = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")


def drawn(
    rng: torch.Generator, device: str, raw: bool = False, initial: bool = False, H: int = H, T: int = T
) -> list[Tensor]:
    """Operands, and the output's gradient behind them."""
    shapes = [(T, H, 128), (T, H, 128), (T, HV, 128), (T, HV), (T, HV), (N, HV, 128, 128), (HV,), (HV,), (T, HV, 128)]
    q, k, v, g, beta, states, A_log, bias, do = (torch.randn(shape, generator=rng).to(device) for shape in shapes)
    q, k = (x if raw else torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    x = [q.bfloat16(), k.bfloat16(), v.bfloat16(), g if raw else -g.abs() / 4, beta if raw else beta.sigmoid()]
    return [*(t.requires_grad_() for t in (*x, *([states] * initial), *([A_log, bias] * raw))), do]


def step(ctx: ds.Context, given: list[Tensor], wrap: bool = False, **options: Any) -> list[Tensor]:
    """Outputs and gradients."""
    *x, do = given
    raw, initial = options.get(RAW[0], False), len(x) % 2 == 0
    names = ["initial_state"] * initial + ["A_log", "dt_bias"] * raw

    def region(*x: Tensor) -> tuple[Tensor, Tensor | None]:
        named = dict(zip(names, x[5:], strict=True))
        return ds.chunk_gated_delta_rule(*x[:5], ctx, **named, backend="hopper", **options)

    o, final = checkpoint(region, *x, use_reentrant=False) if wrap else region(*x)
    total = (o * do).sum() + (0 if final is None else final.sum())
    return [o.detach(), *([] if final is None else [final.detach()]), *torch.autograd.grad(total, x)]


def run(monkeypatch: pytest.MonkeyPatch, ctx: ds.Context, given: list[Tensor], **how: Any) -> list[Tensor]:
    """The same step, of which nothing is recorded."""
    with monkeypatch.context() as patch:
        patch.setattr(again, "may_repeat", lambda *args: False)
        return step(ctx, given, **how)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, hopper: str) -> Iterator[list]:
    """The recordings that are played."""
    recording = select.tier("hopper").Recorder.recording.__globals__["Recording"]
    seen, real = [], recording.play
    monkeypatch.setattr(recording, "play", lambda self, operands: [seen.append(self), real(self, operands)][1])
    yield seen


@pytest.mark.parametrize(
    ("how", "plays"),
    [
        ({"wrap": True, "segments": 2}, 3),
        ({"segments": 2, "save_mode": "full", "save_transfer": False}, 2),
        ({"wrap": True, "segments": 2, "boundary_mode": "replay", "initial": True, "output_final_state": True}, 3),
        ({"initial": True} | dict.fromkeys(RAW, True), 2),
        ({"tokens": T + 5, "wrap": True}, 3),  # a buffer longer than the pack
    ],
)
def test_the_bits_of_a_run(
    hopper: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, played: list, how: dict, plays: int
) -> None:
    """Other operands every time: the first call runs, the second is recorded, and the others are played."""
    initial, tokens = how.pop("initial", False), how.pop("tokens", T)
    ctx = ds.build_context(ds.partition(DOCUMENTS, 1), device=hopper)
    for i in range(4):
        given = drawn(rng, hopper, how.get(RAW[0], False), initial, T=tokens)
        found = step(ctx, given, **how)
        assert len(played) == (0 if i < 2 else plays)
        played.clear()
        if i in (1, 3):
            expected = run(monkeypatch, ctx, given, **how)
            assert len(found) == len(expected) and all(map(same_bits, found, expected)) and not played


def test_operands_of_other_kinds_are_recorded_by_themselves(
    hopper: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, played: list
) -> None:
    """By strides, alignment and types; and those of which two are the same are not told apart, so not at all."""
    ctx = ds.build_context(ds.partition(DOCUMENTS, 1), device=hopper)
    for _ in range(3):
        step(ctx, drawn(rng, hopper))
    assert len(played) == 2
    q, k, v, g, beta, do = drawn(rng, hopper)
    packed = torch.cat([q.detach(), k.detach(), v.detach()], 1)
    apart = [t.requires_grad_() for t in packed.split([H, H, HV], 1)]
    turned = [t.requires_grad_() for t in packed.detach().clone().split([HV, H, H], 1)][::-1]
    one = q.detach().clone().requires_grad_()
    narrow = beta.detach().bfloat16().requires_grad_()
    # as rows in another order the same kinds are read forwards, and gradients come back in another way
    ways = (
        ([*turned, g, beta, do], (0, 0, 2)),
        ([*apart, g, beta, do], (1, 1, 2)),
        ([q, k, v, g, narrow, do], (0, 0, 2)),
    )
    for given, counts in ways:
        for count in counts:
            played.clear()
            found = step(ctx, given)
            assert len(played) == count
        expected = run(monkeypatch, ctx, given)
        assert all(map(same_bits, found, expected))
        assert [t.stride() for t in found] == [t.stride() for t in expected]
    for _ in range(3):
        o, _ = ds.chunk_gated_delta_rule(one, one.detach(), v.detach(), g, beta, ctx, backend="hopper")
        played.clear()
        same, _ = ds.chunk_gated_delta_rule(one, one, v.detach(), g, beta, ctx, backend="hopper")
        assert same_bits(o.detach(), same.detach()) and not played


@pytest.mark.parametrize(("sm_count", "in_its_place"), [(1, True), (1000, False)])
def test_what_nobody_leads_back_is_recorded_by_itself(
    hopper: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, played: list, sm_count: int, in_its_place: bool
) -> None:
    ctx = ds.build_context(ds.partition(DOCUMENTS, 1), device=hopper, sm_count=sm_count)
    given = drawn(rng, hopper)
    tier, lies = select.tier("hopper"), []
    prepared = tier.prepared
    monkeypatch.setattr(tier, "prepared", lambda *a, o, **b: lies.append(o is not None) or prepared(*a, o=o, **b))
    for plays in (0, 0, 1):
        with torch.no_grad():
            o, _ = ds.chunk_gated_delta_rule(*given[:5], ctx, backend="hopper")
        assert len(played) == plays
    assert lies == [in_its_place] * 2  # running sums, if walks are one program each
    assert same_bits(o, run(monkeypatch, ctx, given)[0])
    found = step(ctx, given, wrap=True)
    assert len(played) == 1 and all(map(same_bits, found, run(monkeypatch, ctx, given, wrap=True)))


def test_nobody_is_passed_by(hopper: str, rng: torch.Generator, played: list) -> None:
    """Who watches what torch is asked for sees all of it; and autocast reaches nothing that is played."""
    ctx, raw = ds.build_context(ds.partition(DOCUMENTS, 1), device=hopper), dict.fromkeys(RAW, True)
    given = drawn(rng, hopper, raw=True)
    expected = [step(ctx, given, **raw) for _ in range(3)][-1]
    assert len(played) == 2
    with Watching() as seen:
        assert all(map(same_bits, step(ctx, given, **raw), expected))
    assert len(played) == 2 and seen.asked > 0
    with torch.autocast(hopper, torch.bfloat16):
        found = ds.chunk_gated_delta_rule(*given[:5], ctx, A_log=given[5], dt_bias=given[6], backend="hopper", **raw)[0]
        grads = torch.autograd.grad(found, given[:-1], given[-1].to(found))
    assert len(played) == 4 and same_bits(found.detach(), expected[0])
    assert all(map(same_bits, grads, expected[1:]))


class Watching(TorchDispatchMode):
    """Counts what torch is asked for."""

    asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.asked += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", [{"exchange": "all_to_all", "handle": True}, {"exchange": "ring", "segments": 2}])
def test_ranks_of_a_group(
    hopper: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, played: list, how: dict
) -> None:
    """Each plays its own, and they tell each other as ever."""
    tokens, layout = (140, "contiguous") if "segments" in how else (T, "zigzag")
    part = ds.partition([0, tokens], 2, layout)
    ctx, with_handle = ds.build_context(part, ds.SimulatedGroup(2), device=hopper), how.pop("handle", False)

    def steps(given: list[Tensor]) -> list[Tensor]:
        handle = ds.RecomputeHandle() if with_handle else None
        *x, do = ([t.detach().requires_grad_() for t in ctx.shard(whole, dim=0)] for whole in given)

        def region(*flat: Tensor) -> list[Tensor]:
            shards = [[*flat[i : i + 2]] for i in range(0, 10, 2)]
            return ds.chunk_gated_delta_rule(*shards, ctx, backend="hopper", recompute_handle=handle, **how)[0]

        flat = [t for shards in x for t in shards]
        o = checkpoint(region, *flat, use_reentrant=False)
        return [*o, *torch.autograd.grad(sum((a * b).sum() for a, b in zip(o, do, strict=True)), flat)]

    for i in range(4):
        given = drawn(rng, hopper, T=tokens)
        found = steps(given)
        assert len(played) == (0 if i < 2 else 6)  # a forward, a recompute and a backward of each
        played.clear()
        if i in (1, 3):
            with monkeypatch.context() as patch:
                patch.setattr(again, "may_repeat", lambda *args: False)
                assert all(map(same_bits, found, steps(given))) and not played
