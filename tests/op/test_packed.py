"""Packed rows q | k | v: read without a copy, and their gradient one row, made once."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import deltaspan as ds
from tests.helpers import gloo, same_bits
from tests.op.raw import ALL, RawPack, draw_raw, run_explicitly, run_raw
from tests.op.support import LAYOUTS, differing, listed, simulate, split, unlisted

LENGTHS = [70, 0, 1, 45]
D = 8
HEADS = [(2, 2), (2, 4), (2, 6), (1, 4)]


class Copies(TorchDispatchMode):
    """Notes every concatenation and copy, by the shape of its result."""

    MAKERS = (torch.ops.aten.cat, torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten.slice_backward)

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **kwargs or {})
        if func.overloadpacket in self.MAKERS:
            self.made.append(tuple(result.shape))
        return result


@contextmanager
def rows_made(*shape: int) -> Iterator[list[int]]:
    """How often a tensor of that shape, with or without a batch axis, was put together."""
    count: list[int] = []
    with Copies() as copies:
        yield count
    count.append(sum(made in (shape, (1, *shape)) for made in copies.made))


def drawn(
    rng: torch.Generator, H: int = 2, HV: int = 4, *, dtype: torch.dtype = torch.bfloat16, **way: bool
) -> RawPack:
    return draw_raw(rng, LENGTHS, way, H=H, HV=HV, K=D, V=D).to(dtype)


def packed(raw: RawPack) -> Tensor:
    """[1, T, (2 H + HV) D]"""
    return torch.cat([x.flatten(2) for x in (raw.pack.q, raw.pack.k, raw.pack.v)], dim=2)


def columns(rows: Tensor, H: int, HV: int) -> list[Tensor]:
    """Its q, k and v, by torch alone."""
    parts = rows.split([H * D, H * D, HV * D], dim=-1)
    return [x.unflatten(-1, (-1, D)) for x in parts]


def rule(raw: RawPack, ctx: ds.Context, views: Iterable, **options: Any) -> list[Tensor]:
    """o by rank, of the q, k and v of each."""
    own = dict(zip("qkv", zip(*views, strict=True), strict=True))
    own |= {n: listed(ctx, ctx.shard(getattr(raw.pack, n))) for n in ("g", "beta")}
    given = {n: unlisted(ctx, list(x)) for n, x in own.items()}
    return listed(ctx, ds.chunk_gated_delta_rule(**given, ctx=ctx, **raw.parameters, **raw.way, **options)[0])


def rule_of_rows(raw: RawPack, ctx: ds.Context, views: Callable, rows: list[Tensor], **options: Any) -> dict[str, Any]:
    """By rank: o, and the gradients of packed rows, whose three views `views` makes."""
    rows = [x.detach().requires_grad_() for x in rows]
    o = rule(raw, ctx, map(views, rows), **options)
    douts = [d.reshape(x.shape) for d, x in zip(listed(ctx, ctx.shard(raw.pack.do)), o, strict=True)]
    return {"o": o, "drow": torch.autograd.grad(o, rows, douts)}


# Operands in place


def strided(x: Tensor, how: str) -> Tensor:
    """The same values [1, T, h, d] as a view of something else."""
    _, T, h, d = x.shape
    if how == "columns of a wider pitch":
        return torch.cat([x.flatten(2) + 1, x.flatten(2)], dim=2)[..., h * d :].view(x.shape)
    if how == "every other token":
        return torch.stack([x, x + 1], dim=2).flatten(1, 2)[:, ::2]
    if how == "heads last":
        return x.mT.contiguous().mT
    return x[:, :1, :1].expand(1, T, h, d)  # one row for all tokens and heads


@pytest.mark.parametrize(
    "how", ["columns of a wider pitch", "every other token", "heads last", "expanded", "overlapping"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_views_give_the_bits_of_copies(rng: torch.Generator, dtype: torch.dtype, how: str) -> None:
    raw = drawn(rng, dtype=dtype, **ALL)
    if how == "overlapping":  # each token's row begins within the one before
        long = torch.randn(1, 4096, generator=rng, dtype=torch.float64).to(dtype)
        views = {n: long.as_strided(getattr(raw.pack, n).shape, (0, 5, D, 1), i) for i, n in enumerate("qkv")}
    else:
        views = {n: strided(getattr(raw.pack, n), how) for n in "qkv"}
    raw, copied = raw.replace(**views), raw.replace(**{n: x.clone().contiguous() for n, x in views.items()})
    ctx = ds.build_context(ds.partition(raw.pack.cu_seqlens, 1), device="cpu")

    def results(raw: RawPack) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in raw.pack[1:6]]
        o, _ = ds.chunk_gated_delta_rule(*leaves, ctx, **raw.way, **raw.parameters)
        grads = torch.autograd.grad(o, leaves, raw.pack.do)
        explicit = ds.backward(*(x.detach() for x in leaves), ctx, raw.pack.do, **raw.way, **raw.parameters)
        assert all(map(same_bits, explicit[:5], grads))
        return [o.detach(), *grads]

    assert all(map(same_bits, results(raw), results(copied)))


@pytest.mark.parametrize("batch", [True, False], ids=["batch axis", "bare"])
@pytest.mark.parametrize(("layout", "world_size"), [*((name, 3) for name in LAYOUTS), ("contiguous", 1)])
def test_packed_rows_give_the_bits_of_separate_operands(
    rng: torch.Generator, layout: str, world_size: int, batch: bool
) -> None:
    raw = drawn(rng, **ALL)
    ctx = simulate(split(raw.pack.cu_seqlens, world_size, layout, rng))
    expected = run_raw(raw, ctx)
    rows = [x if batch else x[0] for x in ctx.shard(packed(raw))]
    wider = [torch.cat([x, x + 1], dim=-1)[..., : x.shape[-1]] for x in rows]
    for given in (rows, wider):
        for views in (lambda x: ds.packed_qkv_views(x, H=2, HV=4), lambda x: columns(x, 2, 4)):
            options = {"initial_state": raw.pack.initial_state}
            found = rule_of_rows(raw, ctx, views, given, **options)
            plain = rule_of_rows(raw, ctx, lambda x: [t.clone() for t in columns(x, 2, 4)], given, **options)
            for rank in range(world_size):
                assert same_bits(found["o"][rank], expected[rank]["o"].reshape(found["o"][rank].shape))
                assert same_bits(found["drow"][rank], plain["drow"][rank])
                assert found["drow"][rank].shape == given[rank].shape


# The gradient of a row


@pytest.mark.parametrize("batch", [True, False], ids=["batch axis", "bare"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("H", "HV"), HEADS)
def test_the_row_that_the_operation_made_is_the_gradient(
    rng: torch.Generator, H: int, HV: int, world_size: int, batch: bool
) -> None:
    raw = drawn(rng, H, HV)
    ctx = simulate(split(raw.pack.cu_seqlens, world_size, "zigzag"))
    seen: list[list[Tensor]] = [[] for _ in range(world_size)]

    def views(row: Tensor) -> tuple[Tensor, ...]:
        own = ds.packed_qkv_views(row, H=H, HV=HV)
        assert [x.untyped_storage().data_ptr() for x in own] == [row.untyped_storage().data_ptr()] * 3
        assert all(map(same_bits, own, columns(row, H, HV)))
        mine = seen[len([s for s in seen if s])]
        mine += own
        for at, x in enumerate(own):
            x.register_hook(lambda grad, at=at: mine.__setitem__(at, grad))
        return own

    rows = [x if batch else x[0] for x in ctx.shard(packed(raw))]
    found = rule_of_rows(raw, ctx, views, rows)
    for drow, grads in zip(found["drow"], seen, strict=True):
        assert drow.is_contiguous()
        assert {g.untyped_storage().data_ptr() for g in grads} == {drow.untyped_storage().data_ptr()}
        assert all(map(same_bits, grads, columns(drow, H, HV)))
    for x in rows:  # once in the operation, whatever the caller does
        with rows_made(*x.shape[-2:]) as made:
            rule_of_rows(raw, ctx, lambda x: ds.packed_qkv_views(x, H=H, HV=HV), rows)
        assert made == [sum(y.shape == x.shape for y in rows)]


def test_splitting_by_torch_costs_another_row(rng: torch.Generator) -> None:
    """What the count of rows made sees, and the views spare."""
    raw = drawn(rng)
    ctx = ds.build_context(ds.partition(raw.pack.cu_seqlens, 1), device="cpu")
    rows = [packed(raw)]
    with rows_made(*rows[0].shape[1:]) as made:
        rule_of_rows(raw, ctx, lambda x: columns(x, 2, 4), rows)
    assert made[0] > 1


@pytest.mark.parametrize("used", ["q", "k", "v", "qk", "qv", "kv"])
def test_views_without_a_gradient(rng: torch.Generator, used: str) -> None:
    raw = drawn(rng)
    row = packed(raw).requires_grad_()
    views = dict(zip("qkv", ds.packed_qkv_views(row, H=2, HV=4), strict=True))
    douts = [torch.randn(views[n].shape, generator=rng).bfloat16() for n in used]
    (found,) = torch.autograd.grad([views[n] for n in used], row, douts)
    given = dict(zip(used, douts, strict=True))
    expected = [given.get(n, torch.zeros_like(views[n])).flatten(2) for n in "qkv"]
    assert same_bits(found, torch.cat(expected, dim=2))


def test_views_that_nobody_reads_have_no_gradient(rng: torch.Generator) -> None:
    row, other = packed(drawn(rng)).requires_grad_(), torch.ones((), requires_grad=True)
    q, _, _ = ds.packed_qkv_views(row, H=2, HV=4)
    found = torch.autograd.grad(other * 2 + 0 * q.detach().float().sum(), [row, other], allow_unused=True)
    assert found[0] is None and found[1] == 2


@pytest.mark.parametrize("elsewhere", ["q", "k", "v", "qkv"])
def test_gradients_from_elsewhere_too(rng: torch.Generator, elsewhere: str) -> None:
    """A view that something else reads as well has a gradient that is no column any more: they are put together."""
    raw = drawn(rng, dtype=torch.float64)
    ctx = ds.build_context(ds.partition(raw.pack.cu_seqlens, 1), device="cpu")
    found = []
    for split_rows in (lambda x: ds.packed_qkv_views(x, H=2, HV=4), lambda x: columns(x, 2, 4)):
        row = packed(raw).requires_grad_()
        views = dict(zip("qkv", split_rows(row), strict=True))
        o, _ = ds.chunk_gated_delta_rule(*views.values(), raw.pack.g, raw.pack.beta, ctx)
        loss = (o * raw.pack.do).sum() + sum((views[n] ** 3).sum() for n in elsewhere)
        found += torch.autograd.grad(loss, row)
    assert same_bits(*found)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 0, 2, 3)], ids=["neighbours exchanged", "not in order"])
def test_columns_of_a_row_in_another_order_are_not_the_row(rng: torch.Generator, order: tuple[int, ...]) -> None:
    """Gradients that share a storage, but not as q | k | v."""
    row = torch.randn(1, 5, 8 * D, generator=rng, requires_grad=True)
    other = torch.randn(1, 5, 4, 2 * D, generator=rng)[:, :, list(order)].flatten(2)
    pieces = [x.unflatten(-1, (-1, D)) for x in other.split([2 * D] * 4, dim=-1)]
    douts = [pieces[order[0]], pieces[order[1]], other.unflatten(-1, (-1, D))[:, :, 4:]]
    (found,) = torch.autograd.grad(ds.packed_qkv_views(row, H=2, HV=4), row, douts)
    assert same_bits(found, torch.cat([x.flatten(2) for x in douts], dim=2))


def test_gradients_that_overlap_or_are_transposed_are_not_the_row(rng: torch.Generator) -> None:
    """They share a storage and begin where the columns of a row do."""
    row = torch.randn(5, 8 * D, generator=rng, requires_grad=True)
    other = torch.randn(5, 8 * D, generator=rng)
    transposed = [x.flatten(1).unflatten(1, (D, -1)).mT for x in columns(other, 2, 4)]
    starts = (0, 2 * D, 4 * D)
    overlapping = [other.as_strided((5, h, D), (D, D, 1), at) for h, at in zip((2, 2, 4), starts, strict=True)]
    for douts in (transposed, overlapping):
        (found,) = torch.autograd.grad(ds.packed_qkv_views(row, H=2, HV=4), row, douts)
        assert same_bits(found, torch.cat([x.flatten(1) for x in douts], dim=1))
        assert found.stride(0) >= found.shape[1]  # whoever adds to it in place adds once


def test_gradients_of_a_wider_row(rng: torch.Generator) -> None:
    row = torch.randn(1, 5, 8 * D, generator=rng, requires_grad=True)
    wide = torch.randn(1, 5, 9 * D, generator=rng)[..., D // 2 : D // 2 + 8 * D]
    (found,) = torch.autograd.grad(ds.packed_qkv_views(row, H=2, HV=4), row, columns(wide, 2, 4))
    assert same_bits(found, wide)
    gap = [columns(torch.randn(1, 5, 8 * D, generator=rng), 2, 4)[i] for i in range(3)]
    (found,) = torch.autograd.grad(ds.packed_qkv_views(row, H=2, HV=4), row, gap)
    assert same_bits(found, torch.cat([x.flatten(2) for x in gap], dim=2))


@pytest.mark.parametrize("shape", [(), (5,), (1, 5), (2, 5), (2, 3, 5), (0,), (1, 0)])
def test_rows_with_any_axes_before_them(rng: torch.Generator, shape: tuple[int, ...]) -> None:
    row = torch.randn(*shape, 8 * D, generator=rng, requires_grad=True)
    views = ds.packed_qkv_views(row, H=2, HV=4)
    assert [x.shape for x in views] == [(*shape, h, D) for h in (2, 2, 4)]
    douts = columns(torch.randn(*shape, 8 * D, generator=rng), 2, 4)
    for given in (douts, [x.clone() for x in douts]):
        (found,) = torch.autograd.grad(views, row, given, retain_graph=True)
        assert same_bits(found, torch.cat([x.flatten(-2) for x in douts], dim=-1))


def test_ranks_without_tokens(rng: torch.Generator) -> None:
    raw = drawn(rng)
    table = [[(d, 0, n) for d, n in enumerate(LENGTHS)], [], []]
    ctx = simulate(ds.partition(raw.pack.cu_seqlens, 3, fragments=table))
    rows = ctx.shard(packed(raw))
    found = rule_of_rows(raw, ctx, lambda x: ds.packed_qkv_views(x, H=2, HV=4), rows)
    assert [x.shape for x in found["drow"]] == [(1, 116, 8 * D), (1, 0, 8 * D), (1, 0, 8 * D)]
    assert found["drow"][0].any()


def test_explicit_gradients_are_columns_of_one_row(rng: torch.Generator) -> None:
    raw = drawn(rng, **ALL)
    ctx = simulate(split(raw.pack.cu_seqlens, 2, "zigzag"))
    q, k, v = (list(x) for x in zip(*(columns(x, 2, 4) for x in ctx.shard(packed(raw))), strict=True))
    own = {"q": q, "k": k, "v": v, "g": ctx.shard(raw.pack.g), "beta": ctx.shard(raw.pack.beta)}
    given = own | raw.parameters | raw.way | {"initial_state": raw.pack.initial_state, "output_final_state": True}
    douts = {"do": ctx.shard(raw.pack.do), "dfinal_state": raw.pack.dfinal_state}
    for grad, expected in zip(ds.backward(**given, ctx=ctx, **douts), run_explicitly(raw, ctx), strict=True):
        row = torch.cat([x.flatten(2) for x in grad[:3]], dim=2)
        whole = grad.dq.as_strided(row.shape, (row.shape[1] * row.shape[2], row.shape[2], 1))
        assert same_bits(whole, row)
        assert len({x.untyped_storage().data_ptr() for x in grad[:3]}) == 1
        assert all(same_bits(getattr(grad, n), x) for n, x in expected.items() if n[0] == "d")
    apart = ds.backward(**given | {n: [x.clone() for x in own[n]] for n in "qkv"}, ctx=ctx, **douts)[0]
    assert len({x.untyped_storage().data_ptr() for x in apart[:3]}) == 3


def test_columns_of_unequal_width_are_one_row_too(rng: torch.Generator) -> None:
    """K and V may differ for the operation, though one row of equal columns cannot hold them."""
    raw = draw_raw(rng, LENGTHS, {}, H=2, HV=4, K=6, V=5)
    ctx = ds.build_context(ds.partition(raw.pack.cu_seqlens, 1), device="cpu")
    row = packed(raw)
    q, k, v = (x.unflatten(-1, s) for x, s in zip(row.split([12, 12, 20], -1), [(2, 6), (2, 6), (4, 5)], strict=True))
    grads = ds.backward(q, k, v, raw.pack.g, raw.pack.beta, ctx, raw.pack.do)
    plain = ds.backward(*raw.pack[1:6], ctx, raw.pack.do)
    assert all(map(same_bits, grads[:5], plain[:5]))
    assert len({x.untyped_storage().data_ptr() for x in grads[:3]}) == 1
    with pytest.raises(ValueError, match=r"multiple of 2 H \+ HV = 8 channels, got shape \(1, 116, 44\)"):
        ds.packed_qkv_views(row, H=2, HV=4)


# Beside the convolution


def convolved(seed: int, group: Any) -> list[dict[str, Tensor]]:
    """Rows, convolved as one tensor, then the rule on its views: by rank, what arrives at the rows and the taps."""
    rng = torch.Generator().manual_seed(seed)
    raw = drawn(rng, dtype=torch.float64, **ALL)
    weight = torch.randn(8 * D, 4, generator=rng, dtype=torch.float64)
    ctx = ds.build_context(split(raw.pack.cu_seqlens, 2, "zigzag"), group, device="cpu")
    rows = [x.detach().requires_grad_() for x in listed(ctx, ctx.shard(packed(raw)))]
    taps = [weight.clone().requires_grad_() for _ in rows]
    mixed = listed(ctx, ds.causal_conv1d(unlisted(ctx, rows), unlisted(ctx, taps), ctx))
    o = rule(raw, ctx, (ds.packed_qkv_views(x, H=2, HV=4) for x in mixed))
    grads = torch.autograd.grad(o, [*rows, *taps], listed(ctx, ctx.shard(raw.pack.do)))
    return [{"o": o[r].detach(), "drow": grads[r], "dweight": grads[len(rows) + r]} for r in range(len(rows))]


def convolved_on_a_real_rank(seed: int) -> dict[str, Tensor]:
    return convolved(seed, dist.group.WORLD)[0]


def test_rows_through_the_convolution(rng: torch.Generator) -> None:
    seed = rng.initial_seed()
    simulated, real = convolved(seed, ds.SimulatedGroup(2)), gloo(2).run(convolved_on_a_real_rank, seed)
    assert [differing(a, b) for a, b in zip(simulated, real, strict=True)] == [[], []]

    rng = torch.Generator().manual_seed(seed)
    raw = drawn(rng, dtype=torch.float64, **ALL)
    weight = torch.randn(8 * D, 4, generator=rng, dtype=torch.float64).split([2 * D, 2 * D, 4 * D])
    ctx = simulate(split(raw.pack.cu_seqlens, 2, "zigzag"))
    rows = [x.detach().requires_grad_() for x in ctx.shard(packed(raw))]
    parts = [tuple(x.flatten(-2).contiguous() for x in columns(row, 2, 4)) for row in rows]
    mixed = ds.causal_conv1d(parts, [weight] * 2, ctx)
    o = rule(raw, ctx, ([x.unflatten(-1, (-1, D)) for x in row] for row in mixed))
    for rank, drow in enumerate(torch.autograd.grad(o, rows, ctx.shard(raw.pack.do))):
        assert same_bits(o[rank], simulated[rank]["o"]) and same_bits(drow, simulated[rank]["drow"])


# Refusals


@pytest.mark.parametrize(
    ("row", "heads", "error", "says"),
    [
        (torch.ones(5, 63), (2, 4), ValueError, r"qkv must have a multiple of 2 H \+ HV = 8 channels, .* \(5, 63\)"),
        (torch.ones(5, 0), (2, 4), ValueError, r"multiple of .* 8 channels, got shape \(5, 0\)"),
        (torch.tensor(1.0), (2, 4), ValueError, r"multiple of .* 8 channels, got shape \(\)"),
        (torch.ones(5, 64), (2, 3), ValueError, "HV=3 and H=2"),
        (torch.ones(5, 64), (0, 4), ValueError, "H must be at least 1, got 0"),
        (torch.ones(5, 64), (2, -4), ValueError, "HV must be at least 1, got -4"),
        (torch.ones(5, 64), (2.0, 4), TypeError, "H must be an integer, got 2.0"),
        (torch.ones(5, 64), (2, "4"), TypeError, "HV must be an integer, got '4'"),
        ([1.0], (2, 4), TypeError, "qkv must be a tensor, got list"),
    ],
)
def test_rows_that_do_not_divide(row: Any, heads: tuple, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ds.packed_qkv_views(row, H=heads[0], HV=heads[1])
