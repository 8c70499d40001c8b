"""Raw operands at the ends of their range, and beside what is not theirs: finite, exact, and contained."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import deltaspan as ds
from tests.helpers import same_bits
from tests.op.raw import (
    ALL,
    GATE,
    L2NORM,
    SHARES,
    SIGMOID,
    STATES,
    TWICE,
    WAYS,
    RawPack,
    draw_raw,
    join_raw,
    run_raw,
    some,
    true_raw,
)
from tests.op.support import TOKENWISE, alone, assert_exact, differing, simulate, split

LENGTHS = [150, 0, 1, 30]
SHAPE = {"H": 2, "HV": 4, "K": 6, "V": 5}


TINY = {torch.float64: 1e-10, torch.float32: 2e-5}  # FP32 steps by 8e-6 beside 100, where exponents cancel


@pytest.mark.parametrize("dtype", TINY)
@pytest.mark.parametrize("value", [-200.0, 0.0, -100.0, -104.5, -87.0])
def test_a_gate_of_e_to_the_100(rng: torch.Generator, value: float, dtype: torch.dtype) -> None:
    """exp(100) is infinite in FP32 and softplus(-200) zero: their product is not. At raw 0 nothing passes."""
    raw = draw_raw(rng, LENGTHS, GATE, bias=False, **SHAPE)
    raw = raw._replace(A_log=torch.full_like(raw.A_log, 100)).replace(g=some(raw.pack.g - 100, value)).to(dtype)
    part = split(raw.pack.cu_seqlens, 3, "zigzag")
    found = join_raw(part, run_raw(raw, simulate(part)))
    assert_exact(found, true_raw(raw), TINY[dtype])
    assert found["dg"][:, 0].any() == (value not in (0, -87))  # e^13 forgets all too


def test_the_gate_over_its_whole_range() -> None:
    """Against the formula by logarithms, in another form on each side: x + log1p(e^-x) above, e^x - e^2x / 2 below."""
    x = torch.cat([torch.linspace(-745, 60, 806), torch.linspace(-31, -29, 101)]).double()
    for A_log in (-3.0, 0.0, 5.0):
        softplus = [math.log1p(math.exp(v)) if v < 0 else v + math.log1p(math.exp(-v)) for v in x.tolist()]
        g = -math.exp(A_log) * torch.tensor(softplus, dtype=torch.float64)
        seen = decay_of(x, torch.full((1,), A_log, dtype=torch.float64))
        kept = g > -700
        assert torch.allclose(seen[kept], g[kept].exp(), rtol=1e-12, atol=0)


def decay_of(x: Tensor, A_log: Tensor) -> Tensor:
    """exp(g) as a state of ones feels it in a document of one token that writes nothing."""
    T = len(x)
    ctx = ds.build_context(ds.partition(range(T + 1), 1), device="cpu")
    zero = x.new_zeros(T, 1, 1)
    states = {"initial_state": x.new_ones(T, 1, 1, 1), "output_final_state": True}
    _, final = ds.chunk_gated_delta_rule(zero, zero, zero, x[:, None], zero[..., 0], ctx, A_log=A_log, **GATE, **states)
    return final.flatten()


@pytest.mark.parametrize("dtype", TINY)
@pytest.mark.parametrize(
    ("value", "alike"),
    [(torch.inf, 1e6), (1e30, 1e6), (1e4, 1e4), (-torch.inf, -800.0), (-1e30, -800.0), (-1e4, -800.0)],
)
def test_gates_far_open_and_far_closed(rng: torch.Generator, value: float, alike: float, dtype: torch.dtype) -> None:
    """alike: a value for which the plain formula has the same result, but no infinity times zero."""
    raw = draw_raw(rng, LENGTHS, GATE, **SHAPE).to(dtype)
    part = split(raw.pack.cu_seqlens, 3, "zigzag")
    found = join_raw(part, run_raw(raw.replace(g=some(raw.pack.g, value)), simulate(part)))
    truth = true_raw(raw.replace(g=some(raw.pack.g, alike)))
    assert_exact(found, truth, TINY[dtype])


def test_heads_that_forget_all_give_no_gradient_to_their_gate(rng: torch.Generator) -> None:
    raw = draw_raw(rng, LENGTHS, ALL, **SHAPE)
    raw = raw._replace(A_log=torch.tensor([100.0, 0.0, 80.0, 1e4]).double())
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        (found,) = run_raw(raw.to(dtype).replace(g=raw.to(dtype).pack.g.abs()), alone(raw.pack))
        assert all(x.isfinite().all() for x in found.values())
        for name in ("dg", *SHARES):
            assert not found[name][..., [0, 2, 3]].any() and found[name][..., 1].any(), name


@pytest.mark.parametrize("dtype", TINY)
@pytest.mark.parametrize("row", [0.0, 1e-30, 1e-8])
@pytest.mark.parametrize("names", ["q", "k", "qk"])
def test_rows_of_zero_through_l2norm(rng: torch.Generator, names: str, row: float, dtype: torch.dtype) -> None:
    raw = draw_raw(rng, LENGTHS, L2NORM, **SHAPE).to(dtype)
    raw = raw.replace(**{name: some(getattr(raw.pack, name), row) for name in names})
    part = split(raw.pack.cu_seqlens, 2, "zigzag")
    found, truth = join_raw(part, run_raw(raw, simulate(part))), true_raw(raw)
    assert_exact(found, truth, TINY[dtype])
    assert all(truth[f"d{name}"][:, 0].any() for name in names)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, 1e4, -1e4])
@pytest.mark.parametrize("way", [SIGMOID, TWICE], ids=["once", "twice"])
def test_write_strengths_at_their_ends(rng: torch.Generator, way: dict[str, bool], value: float) -> None:
    for dtype, bound in TINY.items():
        raw = draw_raw(rng, LENGTHS, way, **SHAPE).to(dtype)
        raw = raw.replace(beta=some(raw.pack.beta, value))
        found = run_raw(raw, alone(raw.pack))[0]
        assert not found["dbeta"][:, 0].any()
        alike = raw.replace(beta=some(raw.pack.beta, math.copysign(600, value)))  # whose e^x is finite
        assert_exact(found, true_raw(alike), bound)


# Strangers


def longer(raw: RawPack, fill: float) -> RawPack:
    pad: Callable[[Tensor], Tensor] = lambda x: torch.cat([x, x.new_full((1, 47, *x.shape[2:]), fill)], dim=1)  # noqa: E731
    return raw.replace(**{name: pad(getattr(raw.pack, name)) for name in (*TOKENWISE, "do")})


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("way", WAYS)
def test_the_tail_of_a_buffer_leaves_no_trace(rng: torch.Generator, way: str, fill: float) -> None:
    raw = draw_raw(rng, LENGTHS, WAYS[way], **SHAPE).to(torch.bfloat16)
    ctx = alone(raw.pack)
    T, (exact,) = raw.pack.cu_seqlens[-1], run_raw(raw, ctx)
    padded = longer(raw, fill)
    leaves = {n: getattr(padded.pack, n).requires_grad_() for n in (*TOKENWISE, "initial_state")}
    leaves |= {n: x.requires_grad_() for n, x in raw.parameters.items()}
    o, final = ds.chunk_gated_delta_rule(**leaves, ctx=ctx, output_final_state=True, **raw.way)
    grads = torch.autograd.grad((o, final), list(leaves.values()), (padded.pack.do, raw.pack.dfinal_state))
    found = {"o": o.detach(), "final_state": final.detach()}
    found |= {f"d{n}": grad for n, grad in zip(leaves, grads, strict=True)}
    for name in found.keys() - {*STATES}:
        assert not found[name][:, T:].any(), name  # NaN is true
        found[name] = found[name][:, :T]
    assert differing(found, exact) == []


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "g", "beta"])
def test_what_is_wrong_in_one_document_stays_there(rng: torch.Generator, name: str, value: float) -> None:
    raw = draw_raw(rng, [70, 45, 40], ALL, **SHAPE).to(torch.float32)
    part = split(raw.pack.cu_seqlens, 3, "zigzag_per_document")
    spoilt = getattr(raw.pack, name).clone()
    spoilt[0, 90].view(-1)[-1] = value
    ill, clean = (join_raw(part, run_raw(r, simulate(part))) for r in (raw.replace(**{name: spoilt}), raw))
    harmless = value == torch.inf and name in ("g", "beta")  # nothing passes, all is written
    for key in clean.keys() - {*SHARES}:
        for own in (slice(0, 70), slice(115, 155)) if key not in STATES else (slice(0, 1), slice(2, 3)):
            a, b = ((x[key][own] if key in STATES else x[key][:, own]) for x in (ill, clean))
            assert same_bits(a, b), key
    assert all(ill[key].isfinite().all() == harmless for key in SHARES)
