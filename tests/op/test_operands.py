"""Operands as they come: strided, without a batch axis, in buffers that are too long, or empty."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import deltaspan as ds
from tests.helpers import same_bits
from tests.op.support import (
    GRADIENTS,
    LAYOUTS,
    STATES,
    TOKENWISE,
    Pack,
    alone,
    differing,
    draw,
    join,
    leaf,
    run_convolution,
    run_rule,
    simulate,
    split,
)

LENGTHS = [70, 0, 1, 45, 9]


def strided(x: Tensor, how: str) -> Tensor:
    """The same values, spread in memory."""
    if how == "every other channel":
        return torch.stack([x, x + 1], dim=-1)[..., 0]
    if how == "heads before tokens":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.cat([x, x, x], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]]  # a column of a wider row


@pytest.mark.parametrize("how", ["every other channel", "heads before tokens", "column of a wider row"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_strides_change_no_bit(rng: torch.Generator, dtype: torch.dtype, how: str) -> None:
    pack = draw(rng, LENGTHS).to(dtype)
    ctx = alone(pack)
    names = (*TOKENWISE, "do", "x")
    spread = {name: strided(getattr(pack, name), how) for name in names}
    assert not any(x.is_contiguous() for x in spread.values())
    states = {name: getattr(pack, name).mT.contiguous().mT for name in ("initial_state", "dfinal_state")}
    weight = pack.weight.T.contiguous().T

    def results(pack: Pack) -> dict[str, Tensor]:
        leaves = [x.detach().requires_grad_() for x in (*pack[1:7], pack.x, pack.weight)]
        *operands, initial_state, x, weight = leaves
        o, final = ds.chunk_gated_delta_rule(*operands, ctx, initial_state=initial_state, output_final_state=True)
        y = ds.causal_conv1d(x, weight, ctx)
        grads = torch.autograd.grad((o, final, y), leaves, (pack.do, pack.dfinal_state, pack.dy))
        return {"o": o, "final": final, "y": y} | {str(i): grad for i, grad in enumerate(grads)}

    assert differing(results(pack), results(pack._replace(**spread, **states, weight=weight))) == []


def test_strides_of_dy_change_no_bit(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS)
    ctx = alone(pack)
    leaves = [leaf(x) for x in (pack.x, pack.weight, pack.bias)]
    y = ds.causal_conv1d(*leaves[:2], ctx, bias=leaves[2])
    plain = torch.autograd.grad(y, leaves, pack.dy, retain_graph=True)
    found = torch.autograd.grad(y, leaves, strided(pack.dy, "heads before tokens"))
    assert all(map(same_bits, found, plain))


def test_views_of_a_packed_row(rng: torch.Generator) -> None:
    """q, k and v of one row, and through them its gradient, on simulated ranks."""
    pack = draw(rng, LENGTHS).to(torch.bfloat16)
    ctx = simulate(split(pack.cu_seqlens, 3, "zigzag"))
    heads = [pack.q.shape[2], pack.k.shape[2], pack.v.shape[2]]
    packed = [leaf(torch.cat(x, dim=2)) for x in zip(*(ctx.shard(x) for x in pack[1:4]), strict=True)]
    views = [list(x) for x in zip(*(x.split(heads, dim=2) for x in packed), strict=True)]
    o, _ = ds.chunk_gated_delta_rule(*views, ctx.shard(pack.g), ctx.shard(pack.beta), ctx)
    grads = torch.autograd.grad(o, packed, ctx.shard(pack.do))

    leaves = [[leaf(x) for x in ctx.shard(x)] for x in pack[1:4]]
    plain, _ = ds.chunk_gated_delta_rule(*leaves, ctx.shard(pack.g), ctx.shard(pack.beta), ctx)
    expected = torch.autograd.grad(plain, [*leaves[0], *leaves[1], *leaves[2]], ctx.shard(pack.do))
    for rank in range(3):
        assert same_bits(o[rank], plain[rank])
        assert same_bits(grads[rank], torch.cat(expected[rank::3], dim=2))


@pytest.mark.parametrize("bare", [{"q"}, {"k", "g", "do"}, {"q", "k", "v", "g", "beta", "do", "x", "dy"}])
@pytest.mark.parametrize("world_size", [1, 2])
def test_batch_axes_may_be_left_out(rng: torch.Generator, world_size: int, bare: set[str]) -> None:
    pack = draw(rng, LENGTHS).to(torch.float32)
    ctx = simulate(split(pack.cu_seqlens, world_size, "zigzag"))
    operands = {
        name: [x[0] if name in bare else x for x in ctx.shard(getattr(pack, name))]
        for name in (*TOKENWISE, "do", "x", "dy")
    }
    *inputs, do, x, dy = operands.values()
    leaves = [[leaf(t) for t in column] for column in inputs]
    o, _ = ds.chunk_gated_delta_rule(*leaves, ctx)
    expected = ds.chunk_gated_delta_rule(*(ctx.shard(x) for x in pack[1:6]), ctx)[0]
    assert all(same_bits(a, b[0] if "q" in bare else b) for a, b in zip(o, expected, strict=True))
    douts = [d if d.dim() == a.dim() else d.reshape(a.shape) for d, a in zip(do, o, strict=True)]
    grads = torch.autograd.grad(o, [t for column in leaves for t in column], douts)
    assert [g.shape for g in grads] == [t.shape for column in leaves for t in column]
    explicit = ds.backward(*inputs, ctx, do)
    assert all(same_bits(explicit[i % world_size][i // world_size], grad) for i, grad in enumerate(grads))
    assert [o.dim() for o in ds.forward(*inputs, ctx)[0]] == [3 if "q" in bare else 4] * world_size

    rows = [leaf(t) for t in x]
    y = ds.causal_conv1d(rows, pack.weight, ctx)
    dx = torch.autograd.grad(y, rows, [d.reshape(t.shape) for d, t in zip(dy, x, strict=True)])
    whole = run_convolution(pack, ctx, bias=False)
    for rank in range(world_size):
        assert same_bits(y[rank], whole[rank]["y"].reshape(x[rank].shape))
        assert same_bits(dx[rank], whole[rank]["dx"].reshape(x[rank].shape))


def test_gradients_that_autograd_expands(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS)
    ctx = simulate(split(pack.cu_seqlens, 3, "zigzag_per_document"))
    pack = pack._replace(do=torch.ones_like(pack.do), dfinal_state=torch.ones_like(pack.dfinal_state))
    pack = pack._replace(dy=torch.ones_like(pack.dy))
    expected = join(ctx.part, run_rule(pack, ctx)) | join(ctx.part, run_convolution(pack, ctx, bias=False))
    leaves = [leaf(x) for x in (*pack[1:7], pack.x, pack.weight)]
    *operands, initial_state, x, weight = leaves
    o, final = ds.chunk_gated_delta_rule(
        *(ctx.shard(x) for x in operands), ctx, initial_state=initial_state, output_final_state=True
    )
    y = ds.causal_conv1d(ctx.shard(x), weight, ctx)
    sum(t.sum() for t in (*o, *final, *y)).backward()
    for name, t in zip((*GRADIENTS, "dx", "dweight"), leaves, strict=True):
        # sums over ranks are taken in another order
        assert torch.allclose(t.grad, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("fill", [torch.nan, 1e30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffer_tail_on_one_rank(rng: torch.Generator, layout: str, dtype: torch.dtype, fill: float) -> None:
    pack = draw(rng, [100, 0, 109]).to(dtype)
    part = split(pack.cu_seqlens, 1, layout, rng)
    ctx = simulate(part)

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_full((1, 256 - 209, *x.shape[2:]), fill)], dim=1)

    rows = (*TOKENWISE, "do", "x", "dy")
    longer = pack._replace(**{name: padded(getattr(pack, name)) for name in rows})
    (exact,) = (a | b for a, b in zip(run_rule(pack, ctx), run_convolution(pack, ctx), strict=True))
    leaves = [leaf(x) for x in (*longer[1:7], longer.x, longer.weight, longer.bias)]
    *operands, initial_state, x, weight, bias = leaves
    (o,), (final,) = ds.chunk_gated_delta_rule(
        *([t] for t in operands), ctx, initial_state=initial_state, output_final_state=True
    )
    (y,) = ds.causal_conv1d([x], weight, ctx, bias=bias)
    grads = torch.autograd.grad((o, final, y), leaves, (longer.do, longer.dfinal_state, longer.dy))
    found = dict(zip((*GRADIENTS, "dx", "dweight", "dbias"), grads, strict=True))
    found |= {"o": o.detach(), "final_state": final.detach(), "y": y.detach()}
    for name in ("o", "y", "dq", "dk", "dv", "dg", "dbeta", "dx"):
        assert found[name].shape[1] == 256
        assert not found[name][:, 209:].any(), name  # NaN is true
        found[name] = found[name][:, :209]
    assert differing(found, exact) == []


def test_shard_drops_a_tail_and_unshard_fills_it(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS)
    T = pack.cu_seqlens[-1]
    ctx = simulate(split(pack.cu_seqlens, 3, "zigzag"))
    buffer = leaf(torch.cat([pack.x, torch.full_like(pack.x[:, :7], torch.nan)], dim=1))
    shards = ctx.shard(buffer)
    assert all(map(same_bits, shards, ctx.shard(pack.x)))
    wholes = ctx.unshard(shards, total=T + 7)
    (grad,) = torch.autograd.grad(wholes[1], buffer, torch.ones_like(wholes[1]))
    for whole in wholes:
        assert same_bits(whole[:, :T], pack.x) and not whole[:, T:].any()
    assert (grad[:, :T] == 1).all() and not grad[:, T:].any()


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_shard_along_any_axis(rng: torch.Generator, dim: int) -> None:
    ctx = simulate(split([0, 4, 11], 3, "zigzag"))
    x = torch.randn(11, 11, 11, generator=rng)
    for rank, shard in enumerate(ctx.shard(x, dim=dim)):
        assert same_bits(shard, x.index_select(dim, torch.from_numpy(ctx.part.token_ids(rank))))
    for whole in ctx.unshard(ctx.shard(x, dim=dim), dim=dim):
        assert same_bits(whole, x)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_document"])
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("cu_seqlens", [[0], [0, 0, 0]])
def test_no_tokens_on_any_rank(rng: torch.Generator, cu_seqlens: list[int], world_size: int, layout: str) -> None:
    pack = draw(rng, [0] * (len(cu_seqlens) - 1))
    part = split(cu_seqlens, world_size, layout)
    ctx = simulate(part)
    for step in (run_rule(pack, ctx), run_convolution(pack, ctx)):
        found = join(part, step)
        assert all(x.numel() == 0 for name, x in found.items() if name not in STATES)
        for name in ("dweight", "dbias"):
            assert name not in found or not found[name].any()
        for name, expected in (("final_state", pack.initial_state), ("dinitial_state", pack.dfinal_state)):
            assert name not in found or same_bits(found[name], expected)
    assert [x.shape for x in ctx.unshard(ctx.shard(pack.x), total=2)] == [(1, 2, 6)] * world_size


@pytest.mark.parametrize("recorded", [True, False])
def test_forward_mode_derivatives_are_refused_rather_than_dropped(rng: torch.Generator, recorded: bool) -> None:
    """No gradient mode tells of them, so they are there where no node would be wanted."""
    ctx = ds.build_context(ds.partition([0, 5], 1), device="cpu")
    q, k, v = (torch.randn(1, 5, 1, 4, generator=rng) for _ in range(3))
    with forward_ad.dual_level(), torch.set_grad_enabled(recorded), pytest.raises(NotImplementedError, match="jvp"):
        ds.chunk_gated_delta_rule(forward_ad.make_dual(q, q), k / 4, v, -q[..., 0].abs(), q[..., 0].sigmoid(), ctx)
