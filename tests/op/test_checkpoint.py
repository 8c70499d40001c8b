"""Checkpoints of every kind around the operation: the same bits, the stages run as often as said, nothing retained."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from deltaspan.kernels import torch as tier
from deltaspan.op import function, recompute
from deltaspan.op.workspace import Watch
from tests.helpers import same_bits
from tests.op.checkpoints import (
    PLAN,
    REGIONS,
    WRAPS,
    convolution_and_rule,
    copied,
    drawn,
    once,
    rule_last,
    rule_then_more,
    same,
    step,
    uncheckpointed,
    without_early_stop,
)
from tests.op.support import alone, leaf, simulate, split

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of reentrant in reentrant


@pytest.mark.parametrize("kind", REGIONS)
@pytest.mark.parametrize("how", WRAPS)
def test_the_bits_without_a_checkpoint(rng: torch.Generator, how: str, kind: str) -> None:
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"), **PLAN)
    wrap = WRAPS[how]
    region = REGIONS[kind](pack, ctx)
    expected = step(uncheckpointed(region, how), pack)
    assert same(step(wrap(region), pack), expected)


@pytest.mark.parametrize("reuse", ["auto", True])
@pytest.mark.parametrize("mode", [{}, {"save_mode": "full"}, {"boundary_mode": "replay"}, {"save_transfer": False}])
def test_every_mode_in_a_checkpoint(rng: torch.Generator, mode: dict[str, Any], reuse: str | bool) -> None:
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "ragged", rng), **PLAN)
    for kind, reentrant in product((rule_last, rule_then_more), (False, True)):
        expected = step(kind(pack, ctx), pack)
        region = kind(pack, ctx, reuse_recompute_tapes=reuse, **mode)
        assert same(step(once(use_reentrant=reentrant)(region), pack), expected)


@pytest.mark.parametrize("kind", [rule_last, rule_then_more])
@pytest.mark.parametrize("how", ["checkpoint", "no early stop", "nested, reentrant False False"])
def test_gradients_of_a_part_and_twice(rng: torch.Generator, how: str, kind: Callable) -> None:
    """Of a retained graph: each backward runs a recompute of its own."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    leaves = [leaf(x) for x in (*pack[1:6], pack.x)]
    plain, found = (f(*leaves) for f in (uncheckpointed(kind(pack, ctx), how), WRAPS[how](kind(pack, ctx))))
    dout = torch.randn(plain.shape, generator=rng)
    expected = torch.autograd.grad(plain, leaves, dout)
    for wanted in ([0], [2, 4], [5], range(6), range(6)):
        part = torch.autograd.grad(found, [leaves[i] for i in wanted], dout, retain_graph=True)
        assert same(list(part), [expected[i] for i in wanted])


@pytest.mark.parametrize("frozen", [slice(0, 1), slice(2, 5), slice(5, 6)])
def test_operands_that_want_no_gradient(rng: torch.Generator, frozen: slice) -> None:
    pack = drawn(rng)
    ctx = ds.build_context(ds.partition(pack.cu_seqlens, 1), ds.SimulatedGroup(1), device="cpu")
    for kind in (rule_last, rule_then_more):
        expected = step(kind(pack, ctx), pack, frozen)
        assert same(step(once(use_reentrant=False)(kind(pack, ctx)), pack, frozen), expected)


@pytest.mark.parametrize("teacher", [False, True])
def test_a_call_without_a_gradient_is_never_taken_for_the_last(rng: torch.Generator, teacher: bool) -> None:
    """It saves nothing, also if as many tensors are saved after it as it would have saved."""
    pack = drawn(rng)
    ctx = alone(pack)
    weight = leaf(torch.randn(5, 5, generator=rng))

    def region(weight: Tensor, after: int) -> Tensor:
        with torch.no_grad() if teacher else nullcontext():
            q = leaf(pack.q) if teacher else pack.q
            o, _ = ds.chunk_gated_delta_rule(q, *pack[2:6], ctx)
        y = o @ weight  # saves one
        for _ in range(after - 1):
            y = y.sin()
        return y.sum()

    of_rule = 5 + tier.kept_tensors(False) + 1  # operands, places and a mark; nothing came from elsewhere
    for after in range(of_rule - 1, of_rule + 2):
        counted = []
        with saved_tensors_hooks(lambda x, counted=counted: (counted.append(x), x)[1], lambda x: x):
            (expected,) = torch.autograd.grad(region(weight, after), weight)
        assert len(counted) == after
        (found,) = torch.autograd.grad(checkpoint(region, weight, after, use_reentrant=False), weight)
        assert same_bits(found, expected)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """How often stages are run, walks with and without the output apart."""
    runs: Counter = Counter()

    def spied(stage: str) -> Callable:
        real = getattr(tier, stage)

        def run(*args: Any, **kwargs: Any) -> Any:
            runs[stage + (" with output" if kwargs.get("output") else "")] += 1
            return real(*args, **kwargs)

        return run

    with monkeypatch.context() as patched:
        for stage in ("prep", "walk"):
            patched.setattr(tier, stage, spied(stage))
        yield runs


CHOICES = list(product(("auto", True, False), ("auto", "always"), (True, False), (True, False)))


@pytest.mark.parametrize(("reuse", "output", "early", "last"), CHOICES)
def test_stages_are_run_as_often_as_said(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, reuse: str | bool, output: str, early: bool, last: bool
) -> None:
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"), **PLAN)
    kind = rule_last if last else rule_then_more
    expected = step(kind(pack, ctx), pack)
    region = kind(pack, ctx, reuse_recompute_tapes=reuse, recompute_output=output)
    wrap = once(use_reentrant=False) if early else without_early_stop
    with counted(monkeypatch) as runs:
        assert same(step(wrap(region), pack), expected)
    proven = last and early  # that nothing is saved after it, nor its output read
    handed_on = reuse is True or (reuse == "auto" and proven)
    with_output = 2 if proven and output == "auto" else 4  # both ranks' first run, and the second unless left out
    assert runs["prep"] == runs["walk"] + runs["walk with output"] == (4 if handed_on else 6)
    assert runs["walk with output"] == with_output


@pytest.mark.parametrize(
    ("how", "forwards"), [("reentrant", 2), ("selective", 2), ("copied inside", 1), ("saved on the CPU inside", 1)]
)
def test_nothing_is_left_out_by_other_checkpoints(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, how: str, forwards: int
) -> None:
    """Hooks inside of one keep what they are given, and it has nothing to recompute."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    region = rule_last(pack, ctx)
    with counted(monkeypatch) as runs:
        step(WRAPS[how](region), pack)
    assert runs == {"prep": 2 * forwards + 2, "walk": 2, "walk with output": 2 * forwards}


def test_in_nested_checkpoints_the_innermost_hands_on(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three forwards: the first, the outer recompute's, and the inner's, whose tapes the backward takes."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    with counted(monkeypatch) as runs:
        step(WRAPS["nested, reentrant False False"](rule_last(pack, ctx)), pack)
    assert runs == {"prep": 6, "walk": 2, "walk with output": 4}


def test_a_skipped_output_is_never_read(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is NaN, and the region is left right where it would be returned."""
    pack = drawn(rng)
    ctx = alone(pack)
    returned, skipped, real = [], [], function.unread

    def unread(like: Tensor) -> Tensor:
        skipped.append(real(like))
        return skipped[-1]

    def region(q: Tensor, k: Tensor) -> Tensor:
        o, _ = ds.chunk_gated_delta_rule(q, k, *pack[3:6], ctx)
        returned.append(o.detach().isfinite().all().item())
        return o

    leaves = [leaf(pack.q), leaf(pack.k)]
    y = checkpoint(region, *leaves, use_reentrant=False)
    monkeypatch.setattr(function, "unread", unread)
    y.square().sum().backward()
    assert returned == [True]  # of the first run; the second does not come so far
    (o,) = skipped
    assert o.shape == pack.v.shape and o.isnan().all() and o.untyped_storage().nbytes() == o.element_size()
    assert all(x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize("recomputing", [False, True])
@pytest.mark.parametrize("reuse", ["auto", True])
def test_places_are_never_taken_for_what_belongs_there(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, recomputing: bool, reuse: str | bool
) -> None:
    """A node whose tensors come back from elsewhere knows by the mark alone whether its places were filled."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    expected = step(rule_last(pack, ctx), pack)
    region = rule_last(pack, ctx, reuse_recompute_tapes=reuse)
    monkeypatch.setattr(function, "surrounding", lambda: recompute.Region(recomputing=recomputing))
    with counted(monkeypatch) as runs, copied():
        assert same(step(region, pack), expected)
    assert runs["prep"] == (2 if recomputing and reuse is True else 4)


def test_places_take_no_memory() -> None:
    tensors = torch.ones(3, 64, 5), torch.ones(2, 7, dtype=torch.bool), torch.ones(0, 4).double()
    for place, x in zip(recompute.places(tensors), tensors, strict=True):
        assert (place.shape, place.dtype, place.device) == (x.shape, x.dtype, x.device)
        assert place.untyped_storage().nbytes() == min(1, x.numel()) * x.element_size()


def foreign(x: Tensor) -> Tensor:
    return x


def changed(frame: object) -> Callable:
    """A hook like a recompute's, over another frame."""
    target_frame_ref, gid = (lambda: frame), 7

    def pack(x: Tensor) -> tuple:
        return x, target_frame_ref, gid

    pack.__module__ = "torch.utils.checkpoint"
    return pack


class Bare:
    early_stop = True


class Emptied(Bare):
    weak_holders = ()


@pytest.mark.parametrize("hook", [foreign, changed(None), changed(Bare()), changed(Emptied())])
def test_another_torch_replays(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, hook: Callable) -> None:
    """Where the checkpoint's frame is not as expected, nothing is left out, and nothing breaks."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    expected = step(rule_last(pack, ctx), pack)
    top = torch._C._autograd._top_saved_tensors_default_hooks
    monkeypatch.setattr(
        torch._C._autograd, "_top_saved_tensors_default_hooks", lambda *args: top(*args) and (hook, hook)
    )
    with counted(monkeypatch) as runs:
        assert same(step(once(use_reentrant=False)(rule_last(pack, ctx)), pack), expected)
    assert runs == {"prep": 6, "walk": 2, "walk with output": 4}


@pytest.mark.parametrize("plan", [{"p_rule": "one"}, PLAN], ids=["whole", "cut"])
@pytest.mark.parametrize("mode", [{}, {"save_mode": "full"}, {"reuse_recompute_tapes": True}], ids=str)
@pytest.mark.parametrize("kind", [rule_last, convolution_and_rule])
def test_a_checkpointed_forward_retains_nothing(
    rng: torch.Generator, kind: Callable, mode: dict[str, Any], plan: dict[str, Any]
) -> None:
    """Beyond its operands, which were there before, and its result."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"), **plan)
    leaves, region = [leaf(x) for x in (*pack[1:6], pack.x)], kind(pack, ctx, **mode)
    region(*leaves)  # what is made once, such as a context's cut, is there
    for wrap, bare in ((once(use_reentrant=False), False), (lambda region: region, True)):
        with Watch() as watch:
            y = wrap(region)(*leaves)
        own = y.untyped_storage().nbytes()
        kept = sum(ds.saved_bytes(ctx, H=1, HV=3, K=6, V=5, save_mode=mode.get("save_mode", "light")))
        gc.collect()
        retained = watch.alive() - own
        assert (retained >= kept > 0) if bare else (retained == 0)
