"""Regions around the operation, and ways to put checkpoints around them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import deltaspan as ds
from tests.helpers import same_bits
from tests.op.support import Pack, draw, leaf

LENGTHS = [200, 1, 0, 70]
SHAPE = {"H": 1, "HV": 3, "K": 6, "V": 5, "D": 15}
PLAN = {"p_rule": "occ", "sm_count": 40}

Region = Callable[..., Tensor]  # of q, k, v, g, beta and x, the convolution's rows, which are also added to v
Wrap = Callable[[Region], Region]


def drawn(rng: torch.Generator) -> Pack:
    return draw(rng, LENGTHS, **SHAPE).to(torch.float32)


def cat(shards: list[Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in shards])


def rule_last(pack: Pack, ctx: ds.Context, **options: Any) -> Region:
    """The operation's is the last tensor that the region saves."""

    def region(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, x: Tensor) -> Tensor:
        v = ctx.shard((v.flatten(2) + x.sin()).unflatten(2, v.shape[2:]))
        o, _ = ds.chunk_gated_delta_rule(*map(ctx.shard, (q, k)), v, *map(ctx.shard, (g, beta)), ctx, **options)
        return cat(o)

    return region


def rule_then_more(pack: Pack, ctx: ds.Context, **options: Any) -> Region:
    rule = rule_last(pack, ctx, **options)
    return lambda *leaves: rule(*leaves).sin()


def convolution_and_rule(pack: Pack, ctx: ds.Context, **options: Any) -> Region:
    rule, weight = rule_last(pack, ctx, **options), leaf(pack.weight)

    def region(*leaves: Tensor) -> Tensor:
        y = ds.causal_conv1d(ctx.shard(leaves[5]), weight, ctx)
        return torch.cat([rule(*leaves[:5], leaves[5] * cat(y).sum() / 1000), cat(y).sin()])

    return region


def two_rules(pack: Pack, ctx: ds.Context, **options: Any) -> Region:
    rule = rule_then_more(pack, ctx, **options)
    return lambda *leaves: rule(*leaves[:5], leaves[5] * rule(*leaves).sum() / 1000)


REGIONS = {f.__name__: f for f in (rule_last, rule_then_more, convolution_and_rule, two_rules)}


def once(**options: Any) -> Wrap:
    return lambda region: lambda *x: checkpoint(region, *x, **options)


def without_early_stop(region: Region) -> Region:
    def wrapped(*leaves: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            return checkpoint(region, *leaves, use_reentrant=False)

    return wrapped


def nested(outer: bool, inner: bool) -> Wrap:
    """Whether each is reentrant. Between the two something more is saved."""

    def wrap(region: Region) -> Region:
        def around(*leaves: Tensor) -> Tensor:
            return checkpoint(region, *leaves[:5], leaves[5].cos(), use_reentrant=inner).cos()

        return lambda *leaves: checkpoint(around, *leaves, use_reentrant=outer)

    return wrap


Hooks = Callable[[], AbstractContextManager]


def within(hooks: Hooks) -> Wrap:
    """Everything that the region saves goes through the hooks."""

    def wrap(region: Region) -> Region:
        def wrapped(*leaves: Tensor) -> Tensor:
            with hooks():
                return region(*leaves)

        return wrapped

    return wrap


def outside(hooks: Hooks) -> Wrap:
    """Hooks around a checkpoint and something more."""
    return lambda region: within(hooks)(lambda *leaves: checkpoint(region, *leaves, use_reentrant=False).cos())


def inside(hooks: Hooks) -> Wrap:
    return lambda region: once(use_reentrant=False)(within(hooks)(region))


def copied() -> saved_tensors_hooks:
    """Through other memory: values are kept, strides are not."""
    return saved_tensors_hooks(lambda x: x.contiguous().clone(), lambda x: x.clone())


def sparing(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Of a selective checkpoint: products of matrices and sines are kept, also those that stages consist of."""
    aten = torch.ops.aten
    kept = operator in (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.sin.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = partial(create_selective_checkpoint_contexts, sparing)
WRAPS: dict[str, Wrap] = {
    "checkpoint": once(use_reentrant=False),
    "reentrant": once(use_reentrant=True),
    "no early stop": without_early_stop,
    "random state not kept": once(use_reentrant=False, preserve_rng_state=False),
    "no determinism check": once(use_reentrant=False, determinism_check="none"),
    "contexts": once(use_reentrant=False, context_fn=lambda: (nullcontext(), torch.autocast("cpu", enabled=False))),
    "selective": once(use_reentrant=False, context_fn=SELECTIVE),
    "saved on the CPU outside": outside(save_on_cpu),
    "saved on the CPU inside": inside(save_on_cpu),
    "copied outside": outside(copied),
    "copied inside": inside(copied),
    **{f"nested, reentrant {outer} {inner}": nested(outer, inner) for outer, inner in product((False, True), repeat=2)},
}


def step(region: Region, pack: Pack, wanted: slice = slice(None)) -> list[Tensor]:
    """The region's result and the gradients of its leaves, as a loss that is no sum of it has them."""
    leaves = [leaf(x) for x in (*pack[1:6], pack.x)]
    for x in set(leaves) - set(leaves[wanted]):
        x.requires_grad_(False)
    y = region(*leaves)
    y.square().sum().backward()
    return [y.detach(), *(x.grad for x in leaves[wanted])]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(same_bits, found, expected))


def uncheckpointed(region: Region, how: str) -> Region:
    """The same computation, with what a wrap adds to the region."""
    if how == "copied inside":
        return within(copied)(region)  # torch's products may differ for other strides
    if how.startswith("nested"):
        return lambda *leaves: region(*leaves[:5], leaves[5].cos()).cos()
    return (lambda *leaves: region(*leaves).cos()) if how.endswith("outside") else region
