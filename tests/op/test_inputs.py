"""Operands as projections give them: l2norm of q and k, the gate of g and the sigmoid of beta inside the operation."""

from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from tests.helpers import gloo, same_bits
from tests.op.raw import (
    ALL,
    GATE,
    L2NORM,
    SHARES,
    STATES,
    WAYS,
    draw_raw,
    join_raw,
    run_explicitly,
    run_raw,
    true_raw,
)  # fmt: skip
from tests.op.support import LAYOUTS, TOKENWISE, alone, assert_exact, differing, leaf, relative_error, simulate, split

LENGTHS = [150, 0, 1, 30]
SHAPE = {"H": 2, "HV": 4, "K": 6, "V": 5}
CUT = {"p_rule": "occ", "sm_count": 40}  # fragments of several chunks are walked in pieces
PLACES = [*((layout, 3) for layout in LAYOUTS), ("contiguous", 1)]


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert [differing(a, b) for a, b in zip(found, expected, strict=True)] == [[]] * len(expected)


# Exactness


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("layout", "world_size"), PLACES)
def test_as_the_recurrence_after_the_plain_formulas(
    rng: torch.Generator, layout: str, world_size: int, way: str
) -> None:
    raw = draw_raw(rng, LENGTHS, WAYS[way], **SHAPE)
    part = split(raw.pack.cu_seqlens, world_size, layout, rng)
    truth = true_raw(raw)
    for plan in ({}, CUT):
        ctx = simulate(part, **plan)
        by_rank = run_raw(raw, ctx)
        assert_exact(join_raw(part, by_rank), truth)
        assert_same(run_explicitly(raw, ctx), by_rank)
        assert_same(run_explicitly(raw, ctx, keep=False), by_rank)


@pytest.mark.parametrize("HV", [2, 4, 6, 8])
def test_gate_without_a_bias_and_any_number_of_value_heads(rng: torch.Generator, HV: int) -> None:
    raw = draw_raw(rng, LENGTHS, ALL, bias=False, **SHAPE | {"HV": HV})
    part = split(raw.pack.cu_seqlens, 2, "zigzag")
    assert_exact(join_raw(part, run_raw(raw, simulate(part))), true_raw(raw))
    assert_same(run_explicitly(raw, simulate(part)), run_raw(raw, simulate(part)))


def test_keys_of_any_length_keep_the_promise_of_unit_keys(rng: torch.Generator) -> None:
    raw = draw_raw(rng, LENGTHS, L2NORM, **SHAPE)
    raw = raw.replace(k=raw.pack.k * torch.logspace(-6, 6, raw.pack.k.shape[1])[:, None, None])
    ctx = alone(raw.pack)
    assert_exact(run_raw(raw, ctx)[0], true_raw(raw))
    assert_exact(run_raw(raw, ctx, unit_keys=False)[0], true_raw(raw))


def test_a_parameters_gradient_is_one_ranks_share(rng: torch.Generator) -> None:
    """Each rank's is what its own tokens give: of the gate alone, the sum over them of dg, and of dg times the gate."""
    raw = draw_raw(rng, LENGTHS, GATE, **SHAPE)
    for found in run_raw(raw, simulate(split(raw.pack.cu_seqlens, 3, "zigzag"))):
        assert torch.allclose(found["ddt_bias"], found["dg"][0].sum(0), rtol=0, atol=1e-12)
    only = ds.partition(raw.pack.cu_seqlens, 2, fragments=[[(d, 0, n) for d, n in enumerate(LENGTHS)], []])
    full, none = run_raw(raw, simulate(only))
    assert all(full[name].all() and none[name].shape == (4,) and not none[name].any() for name in SHARES)


@pytest.mark.parametrize("wide", [(), ("A_log",), ("A_log", "dt_bias")])
def test_parameters_beside_fp64_may_be_fp32(rng: torch.Generator, wide: tuple[str, ...]) -> None:
    raw = draw_raw(rng, LENGTHS, ALL, **SHAPE)
    raw = raw._replace(**{n: x if n in wide else x.float() for n, x in raw.parameters.items()})
    (found,), truth = run_raw(raw, alone(raw.pack)), true_raw(raw)
    assert {n: found[f"d{n}"].dtype for n in raw.parameters} == {n: x.dtype for n, x in raw.parameters.items()}
    for name in SHARES:
        # a gradient in FP32 is rounded once, to half a unit of its last place
        bound = 1e-10 if name[1:] in wide else torch.finfo(torch.float32).eps
        assert relative_error(found.pop(name), truth.pop(name))[1] <= bound, name
    assert_exact(found, truth)


# Narrow operands


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("way", ["l2norm", "all"])
def test_error(rng: torch.Generator, way: str, dtype: torch.dtype) -> None:
    """g and beta, where they are raw, have the operands' type, and so have their gradients from autograd."""
    raw = draw_raw(rng, [300, 1, 99], WAYS[way], H=2, HV=4, K=16, V=16).to(dtype, raw=dtype)
    pack, truth = raw.pack, true_raw(raw)
    part = split(pack.cu_seqlens, 2, "zigzag")
    types = {"o": pack.v.dtype, "final_state": torch.float32, "dinitial_state": torch.float32}
    types |= {f"d{name}": getattr(pack, name).dtype for name in TOKENWISE} | dict.fromkeys(SHARES, torch.float32)
    ctx = simulate(part)
    by_rank = run_raw(raw, ctx)
    for name, x in join_raw(part, by_rank).items():
        assert x.dtype == types[name], name
        # FP32 arithmetic, whose roundings of 6e-8 add up to a few of them, more in sums over all tokens whose terms
        # cancel; then one uniform rounding, of at most eps / 2 of a mantissa of at least 1
        fp32 = 1e-5 if name in SHARES else 2e-6
        narrow = torch.finfo(x.dtype).eps / 2 / 3**0.5 if x.dtype != torch.float32 else 0
        assert relative_error(x, truth[name])[0] <= fp32 + narrow, name
    for found, expected in zip(run_explicitly(raw, ctx), by_rank, strict=True):
        assert {found[name].dtype for name in ("dg", "dbeta")} == {torch.float32}
        assert [n for n in found if not same_bits(found[n].to(expected[n].dtype), expected[n])] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operands_of_bf16_are_their_values_in_fp32(rng: torch.Generator, dtype: torch.dtype) -> None:
    """Nothing is rounded between: raw g and beta in bf16 give the bits of the same values in FP32."""
    narrow = draw_raw(rng, LENGTHS, ALL, **SHAPE).to(torch.bfloat16, raw=torch.bfloat16)
    wide = narrow.replace(g=narrow.pack.g.float(), beta=narrow.pack.beta.float())
    ctx = simulate(split(narrow.pack.cu_seqlens, 2, "zigzag"))
    for a, b in zip(run_raw(narrow, ctx), run_raw(wide, ctx), strict=True):
        assert differing(a, {n: x.to(a[n].dtype) for n, x in b.items()}) == []


# The same bits by every way


MODES = {
    "full": {"save_mode": "full"},
    "replay": {"boundary_mode": "replay"},
    "no transfers": {"save_transfer": False},
    "full, no transfers, ring": {"save_mode": "full", "save_transfer": False, "exchange": "ring"},
    "all_gather": {"exchange": "all_gather"},
}


@pytest.mark.parametrize("plan", [{}, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_every_mode(rng: torch.Generator, dtype: torch.dtype, plan: dict[str, Any]) -> None:
    raw = draw_raw(rng, LENGTHS, ALL, **SHAPE).to(dtype)
    ctx = simulate(split(raw.pack.cu_seqlens, 3, "zigzag_per_document"), **plan)
    expected = run_raw(raw, ctx)
    for mode in MODES.values():
        assert_same(run_raw(raw, ctx, **mode), expected)
        assert_same(run_explicitly(raw, ctx, **mode), expected)


@pytest.mark.parametrize("reuse", ["auto", True, False])
@pytest.mark.parametrize("handle", [False, True])
def test_checkpoints(rng: torch.Generator, handle: bool, reuse: str | bool) -> None:
    raw = draw_raw(rng, LENGTHS, ALL, **SHAPE).to(torch.bfloat16)
    ctx = simulate(split(raw.pack.cu_seqlens, 2, "zigzag"))
    names = [*TOKENWISE, *raw.parameters]
    leaves = [getattr(raw.pack, n, None) if n in TOKENWISE else getattr(raw, n) for n in names]
    leaves = [x.detach().clone().requires_grad_() for x in leaves]

    def rule(*given: Tensor, handle: Any = None) -> list[Tensor]:
        operands = {n: ctx.shard(x) if n in TOKENWISE else x for n, x in zip(names, given, strict=True)}
        options = {"reuse_recompute_tapes": reuse, "recompute_handle": handle}
        return ds.chunk_gated_delta_rule(**operands, ctx=ctx, **raw.way, **options)[0]

    plain = torch.autograd.grad(rule(*leaves), leaves, ctx.shard(raw.pack.do))
    o = checkpoint(rule, *leaves, use_reentrant=False, handle=ds.RecomputeHandle() if handle else None)
    assert all(map(same_bits, torch.autograd.grad(o, leaves, ctx.shard(raw.pack.do)), plain))


def on_a_real_rank(seed: int, layout: str) -> dict[str, Tensor]:
    raw = draw_raw(torch.Generator().manual_seed(seed), LENGTHS, ALL, **SHAPE).to(torch.bfloat16, raw=torch.bfloat16)
    part = split(raw.pack.cu_seqlens, 2, layout)
    (found,) = run_raw(raw, ds.build_context(part, dist.group.WORLD, device="cpu"))
    return found


@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_real_ranks(rng: torch.Generator, layout: str) -> None:
    seed = rng.initial_seed()
    raw = draw_raw(torch.Generator().manual_seed(seed), LENGTHS, ALL, **SHAPE).to(torch.bfloat16, raw=torch.bfloat16)
    expected = run_raw(raw, simulate(split(raw.pack.cu_seqlens, 2, layout)))
    assert_same(gloo(2).run(on_a_real_rank, seed, layout), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tokens_do_not_depend_on_how_many_stand_beside_them(rng: torch.Generator, dtype: torch.dtype) -> None:
    raw = draw_raw(rng, [151, 29, 3], ALL, H=2, HV=4, K=8, V=8).to(dtype)
    together, start = run_raw(raw, alone(raw.pack))[0], 0
    for doc, length in enumerate([151, 29, 3]):
        own = {n: getattr(raw.pack, n)[:, start : start + length] for n in (*TOKENWISE, "do")}
        own |= {n: getattr(raw.pack, n)[doc : doc + 1] for n in ("initial_state", "dfinal_state")}
        itself = raw.replace(cu_seqlens=[0, length], **own)
        for name, x in run_raw(itself, alone(itself.pack))[0].items():
            if name not in SHARES:
                whole = together[name]
                assert same_bits(x, whole[doc : doc + 1] if name in STATES else whole[:, start : start + length]), name
        start += length


# Under autocast


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_autocast_casts_q_k_and_v_alone(rng: torch.Generator, world_size: int, inside: bool) -> None:
    raw = draw_raw(rng, LENGTHS, ALL, **SHAPE).to(torch.float32)
    narrow = raw.replace(**{n: getattr(raw.pack, n).bfloat16() for n in ("q", "k", "v", "do")})
    ctx = simulate(split(raw.pack.cu_seqlens, world_size, "zigzag"))
    expected = run_raw(narrow, ctx)
    names = [*TOKENWISE, *raw.parameters]
    given = {n: [leaf(x) for x in ctx.shard(getattr(raw.pack, n))] for n in TOKENWISE}
    given |= {n: [leaf(x) for _ in range(world_size)] for n, x in raw.parameters.items()}
    states = {"initial_state": raw.pack.initial_state, "output_final_state": True}
    leaves, douts = list(chain(*given.values())), [*ctx.shard(narrow.pack.do), *[raw.pack.dfinal_state] * world_size]
    with torch.autocast("cpu", torch.bfloat16):
        o, final = ds.chunk_gated_delta_rule(**given, ctx=ctx, **states, **raw.way)
        grads = torch.autograd.grad([*o, *final], leaves, douts) if inside else None
    grads = grads or torch.autograd.grad([*o, *final], leaves, douts)
    for rank, results in enumerate(expected):
        assert same_bits(o[rank], results["o"]) and same_bits(final[rank], results["final_state"])
        for i, name in enumerate(names):
            assert same_bits(grads[i * world_size + rank], results[f"d{name}"].float()), name


@pytest.mark.parametrize("name", ["g", "beta"])
def test_autocast_leaves_narrow_g_and_beta_as_they_are(rng: torch.Generator, name: str) -> None:
    """They may have the type that the projections under autocast gave them."""
    raw = draw_raw(rng, LENGTHS, ALL, **SHAPE).to(torch.bfloat16, raw=torch.bfloat16)
    ctx = alone(raw.pack)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = run_raw(raw, ctx)
    assert differing(found, run_raw(raw, ctx)[0]) == [] and found[f"d{name}"].dtype == torch.bfloat16


def test_types_that_autocast_makes_alike_meet(rng: torch.Generator) -> None:
    """As in a matrix product: fp32 queries beside bf16 keys, and a raw g as a projection under autocast gives it."""
    raw = draw_raw(rng, LENGTHS, ALL, **SHAPE).to(torch.bfloat16, raw=torch.bfloat16)
    ctx = alone(raw.pack)
    expected = run_raw(raw, ctx)[0]
    mixed = raw.replace(q=raw.pack.q.float())
    with pytest.raises(ValueError, match="k must have q's type"):
        run_raw(mixed, ctx)
    with torch.autocast("cpu", torch.bfloat16):
        found = run_raw(mixed, ctx)[0]
    assert found.pop("dq").dtype == torch.float32 and expected.pop("dq").dtype == torch.bfloat16
    assert differing(found, expected) == []
