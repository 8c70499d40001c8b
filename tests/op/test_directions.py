"""Each direction by itself, and gradients of which only some are wanted."""

from typing import Any

import pytest
import torch
from torch import Tensor

import deltaspan as ds
from tests.helpers import same_bits
from tests.op.support import (
    GRADIENTS,
    LAYOUTS,
    TOKENWISE,
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


def gradients(outputs: Any, leaves: Any, douts: Any) -> dict[str, Tensor]:
    return dict(zip(GRADIENTS, torch.autograd.grad(outputs, leaves, douts), strict=False))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_explicit_directions_are_those_of_autograd(rng: torch.Generator, layout: str, dtype: torch.dtype) -> None:
    pack = draw(rng, LENGTHS).to(dtype)
    ctx = simulate(split(pack.cu_seqlens, 3, layout, rng))
    options = {"output_final_state": True, "scale": 0.7, "unit_keys": False}
    expected = run_rule(pack, ctx, scale=0.7, unit_keys=False)
    operands = [[leaf(x) for x in ctx.shard(getattr(pack, name))] for name in TOKENWISE]
    options["initial_state"] = leaf(pack.initial_state)
    o, final, saved = ds.forward(*operands, ctx, **options)
    assert not any(x.requires_grad for x in (*o, *final))
    douts = {"do": ctx.shard(pack.do), "dfinal_state": pack.dfinal_state}
    for kept in (saved, None, saved):  # of which nothing is used up
        grads = ds.backward(*operands, ctx, **douts, saved=kept, **options)
        for rank in range(3):
            assert grads[rank].dA_log is grads[rank].ddt_bias is None
            found = {"o": o[rank], "final_state": final[rank]} | grads[rank]._asdict()
            del found["dA_log"], found["ddt_bias"]
            assert differing(found, expected[rank]) == []


def test_explicit_directions_without_states(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS)
    ctx = alone(pack)
    o, final, saved = ds.forward(*pack[1:6], ctx)
    assert final is None
    grads = ds.backward(*pack[1:6], ctx, pack.do, saved=saved)
    assert grads.dinitial_state is None
    leaves = [leaf(x) for x in pack[1:6]]
    out, final = ds.chunk_gated_delta_rule(*leaves, ctx)
    assert final is None and same_bits(out, o)
    assert differing(gradients(out, leaves, pack.do), dict(zip(GRADIENTS, grads[:5], strict=False))) == []


def test_saved_of_another_call_is_refused(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS).to(torch.float32)
    ctx, twin = alone(pack), alone(pack)
    operands = pack[1:6]
    _, _, saved = ds.forward(*operands, ctx)
    with pytest.raises(ValueError, match=r"saved was kept .*another context"):
        ds.backward(*operands, twin, pack.do, saved=saved)
    for options in ({"scale": 0.5}, {"unit_keys": False}, {"output_final_state": True}, {"exchange": "ring"}):
        (name,) = options
        with pytest.raises(ValueError, match=f"saved was kept .*{name}"):
            ds.backward(*operands, ctx, pack.do, saved=saved, **options)
    with pytest.raises(ValueError, match=r"saved was kept .*initial_state: none, got \(5, 4, 8, 8\) in torch.float32"):
        ds.backward(*operands, ctx, pack.do, saved=saved, initial_state=pack.initial_state)
    wide = draw(rng, LENGTHS, V=9).to(torch.float32)
    with pytest.raises(ValueError, match=r"saved was kept .* v: .*4, 8\) in .*got .*4, 9\) in"):
        ds.backward(*wide[1:6], ctx, wide.do, saved=saved)
    with pytest.raises(ValueError, match=r"saved was kept .* q: .*float32, got .*float64"):
        ds.backward(*(x.double() for x in operands), ctx, pack.do.double(), saved=saved)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("wanted", [{"q"}, {"k", "beta"}, {"g"}, {"v"}, {"initial_state"}, {"beta", "initial_state"}])
def test_only_some_inputs_want_gradients(rng: torch.Generator, wanted: set[str], layout: str) -> None:
    pack = draw(rng, LENGTHS)
    ctx = simulate(split(pack.cu_seqlens, 2, layout))
    expected = join(ctx.part, run_rule(pack, ctx))
    inputs = {name: getattr(pack, name).clone() for name in (*TOKENWISE, "initial_state")}
    for name in wanted:
        inputs[name].requires_grad_()
    *operands, initial_state = inputs.values()
    o, final = ds.chunk_gated_delta_rule(
        *(ctx.shard(x) for x in operands), ctx, initial_state=initial_state, output_final_state=True
    )
    torch.autograd.backward([*o, *final], [*ctx.shard(pack.do), *[pack.dfinal_state] * 2])
    for name, x in inputs.items():
        assert (x.grad is None) == (name not in wanted)
        assert name not in wanted or torch.allclose(x.grad, expected[f"d{name}"], rtol=0, atol=1e-12)


def test_loss_of_one_output_only(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS)
    part = split(pack.cu_seqlens, 2, "zigzag")
    ctx = simulate(part)

    def grads_of(of: str) -> dict[str, Tensor]:
        leaves = [leaf(x) for x in pack[1:7]]
        o, final = ds.chunk_gated_delta_rule(
            *(ctx.shard(x) for x in leaves[:5]), ctx, initial_state=leaves[5], output_final_state=True
        )
        if of == "o":
            return gradients(o, leaves, ctx.shard(pack.do))
        return gradients(final, leaves, [pack.dfinal_state] * 2)

    both = join(part, run_rule(pack, ctx))
    parts = grads_of("o"), grads_of("final")
    for name in GRADIENTS:
        assert all(p[name].any() for p in parts) or name == "dq"
        assert torch.allclose(parts[0][name] + parts[1][name], both[name], rtol=0, atol=1e-12), name
    assert not parts[1]["dq"].any()


def test_loss_of_one_rank_only(rng: torch.Generator) -> None:
    """The other ranks' outputs have no gradient, and yet their tokens before it do."""
    pack = draw(rng, [80])
    ctx = simulate(split(pack.cu_seqlens, 2, "contiguous"))
    leaves = [leaf(x) for x in (pack.v, pack.x)]
    o, _ = ds.chunk_gated_delta_rule(*map(ctx.shard, (pack.q, pack.k, leaves[0], pack.g, pack.beta)), ctx)
    y = ds.causal_conv1d(ctx.shard(leaves[1]), pack.weight, ctx)
    dv, dx = torch.autograd.grad(o[1].sum() + y[1].sum(), leaves)
    assert dv[:, :40].any() and dv[:, 40:].any()
    assert not dx[:, :37].any() and dx[:, 37:40].any()


def test_no_gradients_wanted(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS)
    ctx = alone(pack)
    o, _ = ds.chunk_gated_delta_rule(*pack[1:6], ctx)
    y = ds.causal_conv1d(pack.x, pack.weight, ctx, bias=pack.bias)
    assert not o.requires_grad and not y.requires_grad
    with torch.no_grad():
        assert same_bits(ds.chunk_gated_delta_rule(*map(leaf, pack[1:6]), ctx)[0], o)


def test_frozen_weights(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS)
    ctx = alone(pack)
    for wanted in range(3):
        inputs = [x.clone() for x in (pack.x, pack.weight, pack.bias)]
        inputs[wanted].requires_grad_()
        y = ds.causal_conv1d(inputs[0], inputs[1], ctx, bias=inputs[2])
        (grad,) = torch.autograd.grad(y, inputs[wanted], pack.dy)
        assert same_bits(grad, run_convolution(pack, ctx)[0][("dx", "dweight", "dbias")[wanted]])
