"""The layer against its own formulas in float64 plain torch, on one rank and on real ranks."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from deltaspan import reference

from ..helpers import gloo, same_bits

LENGTHS = [70, 0, 1, 33, 2]
HIDDEN, H, HV, K, V = 12, 2, 4, 8, 6
# float64 rounds to 1e-16; a few hundred terms and two norms leave 1e-14
EXACT = 1e-11


def drawn(seed: int, taps: int = 4) -> tuple[ds.nn.GatedDeltaNet, list[int], Tensor, Tensor]:
    """A float64 layer, offsets, x [1, T, hidden] and the gradient of y: the same on every rank and here."""
    torch.manual_seed(seed)
    layer = ds.nn.GatedDeltaNet(HIDDEN, H, HV, K, V, taps).double()
    torch.nn.init.normal_(layer.o_norm.weight)
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    x, dy = torch.randn(2, 1, cu_seqlens[-1], HIDDEN, dtype=torch.float64)
    return layer, cu_seqlens, x, dy


def formulas(p: dict[str, Tensor], x: Tensor, cu_seqlens: list[int]) -> Tensor:
    """x [1, T, hidden] -> y, as the layer's docstring has it, over the token recurrence."""
    q, k, v = (
        reference.causal_conv1d(x @ p[f"{n}_proj.weight"].T, p[f"{n}_conv1d.weight"].squeeze(1), cu_seqlens)
        for n in "qkv"
    )
    q, k = (t.unflatten(-1, (H, K)) for t in (q, k))
    q, k = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    g = -torch.exp(p["A_log"]) * F.softplus(x @ p["a_proj.weight"].T + p["dt_bias"])
    beta = torch.sigmoid(x @ p["b_proj.weight"].T)
    o, _ = reference.recurrent_gated_delta_rule(q, k, v.unflatten(-1, (HV, V)), g, beta, cu_seqlens)
    o = o / torch.sqrt((o * o).mean(-1, keepdim=True) + 1e-6) * p["o_norm.weight"]
    gate = (x @ p["g_proj.weight"].T).unflatten(-1, (HV, V))
    return (o * gate * torch.sigmoid(gate)).flatten(-2) @ p["o_proj.weight"].T


def step(
    layer: ds.nn.GatedDeltaNet, ctx: ds.Context, x: Tensor, dy: Tensor, *, checkpointed: bool = False, **options: Any
) -> dict[str, Tensor]:
    """y, dx and every parameter's gradient, of this rank's shard."""
    x = ctx.shard(x).requires_grad_()
    y = checkpoint(layer, x, ctx, use_reentrant=False, **options) if checkpointed else layer(x, ctx, **options)
    grads = torch.autograd.grad(y, [x, *layer.parameters()], ctx.shard(dy))
    names = ["x", *(name for name, _ in layer.named_parameters())]
    return {"y": y.detach(), **dict(zip(names, grads, strict=True))}


def relative_errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    return {name: ((found[name] - t).norm() / t.norm()).item() for name, t in truth.items()}


def assert_close(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    errors = relative_errors(found, truth)
    assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


@pytest.mark.parametrize("taps", [1, 3, 4])
def test_one_rank_is_the_formulas(rng: torch.Generator, taps: int) -> None:
    layer, cu_seqlens, x, dy = drawn(rng.initial_seed(), taps)
    found = step(layer, ds.build_context(ds.partition(cu_seqlens, 1), device="cpu", conv_kernel_size=taps), x, dy)
    assert_close(found, true_step(layer, x, cu_seqlens, dy), EXACT)


def true_step(layer: ds.nn.GatedDeltaNet, x: Tensor, cu_seqlens: list[int], dy: Tensor) -> dict[str, Tensor]:
    """The formulas in float64, from the layer's parameters as they are rounded."""
    leaves = {"x": x, **dict(layer.named_parameters())}
    leaves = {name: p.detach().double().clone().requires_grad_() for name, p in leaves.items()}
    y = formulas(leaves, leaves["x"], cu_seqlens)
    grads = torch.autograd.grad(y, list(leaves.values()), dy.double())
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


OPTIONS = {
    "full": {"save_mode": "full"},
    "replay": {"boundary_mode": "replay"},
    "ring": {"exchange": "ring", "save_transfer": False},
    "checkpoint": {"checkpointed": True},
    "checkpoint, full": {"checkpointed": True, "save_mode": "full"},
    "checkpoint with a handle": {"checkpointed": True, "handle": True},
}


@pytest.mark.parametrize("way", OPTIONS)
def test_options_change_no_bit(rng: torch.Generator, way: str) -> None:
    layer, cu_seqlens, x, dy = drawn(rng.initial_seed())
    ctx = ds.build_context(ds.partition(cu_seqlens, 1), device="cpu", p_rule="occ", sm_count=40)
    options = dict(OPTIONS[way])
    if options.pop("handle", False):
        options["recompute_handle"] = ds.RecomputeHandle()
    plain, found = step(layer, ctx, x, dy), step(layer, ctx, x, dy, **options)
    assert [name for name in plain if not same_bits(plain[name], found[name])] == []
    assert_close(found, true_step(layer, x, cu_seqlens, dy), EXACT)


@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 8), (torch.bfloat16, 4)])
def test_a_narrow_model_is_the_formulas_too(rng: torch.Generator, dtype: torch.dtype, times: int) -> None:
    layer, cu_seqlens, x, dy = drawn(rng.initial_seed())
    layer, x, dy = layer.to(dtype), x.to(dtype), dy.to(dtype)
    found = step(layer, ds.build_context(ds.partition(cu_seqlens, 1), device="cpu"), x, dy)
    assert found["A_log"].dtype == found["dt_bias"].dtype == torch.float32
    truth = true_step(layer, x, cu_seqlens, dy)
    # A dozen roundings stand between x and a gradient, sqrt(12) times one if they are independent; in fp32 products are
    # summed in the same type, which is as many again. What one does, to x and every parameter, depends on the draw: an
    # output that is small before its norm makes it ten times as much.
    one = [relative_errors(true_step(*rounded(layer, x, dtype, rng), cu_seqlens, dy), truth) for _ in range(3)]
    errors = relative_errors({n: t.double() for n, t in found.items()}, truth)
    assert {n: error for n, error in errors.items() if not error <= times * max(of[n] for of in one)} == {}


def rounded(layer: torch.nn.Module, x: Tensor, dtype: torch.dtype, rng: torch.Generator) -> tuple[Any, Tensor]:
    """The layer and x in float64, each number off by up to half a unit in the last place of its type."""
    layer = copy.deepcopy(layer).double()
    off = lambda t: 1 + (torch.rand(t.shape, generator=rng, dtype=torch.float64) - 0.5) * torch.finfo(dtype).eps  # noqa: E731
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(off(p))
    return layer, x.double() * off(x)


def shared_step(seed: int, table: Any, with_handle: bool) -> dict[str, Tensor]:
    """On a real rank: the whole y and dx, and this rank's share of the parameters' gradients."""
    layer, cu_seqlens, x, dy = drawn(seed)
    group = dist.group.WORLD
    options = {"layout": table} if isinstance(table, str) else {"fragments": table}
    ctx = ds.build_context(ds.partition(cu_seqlens, group.size(), **options), group, device="cpu")
    how = {"checkpointed": True, "recompute_handle": ds.RecomputeHandle()} if with_handle else {}
    found = step(layer, ctx, x, dy, **how)
    return {n: ctx.unshard(t) if n in ("x", "y") else t for n, t in found.items()} | {"tokens": ctx.tokens}


ALL_ON_RANK_0 = [[(doc, 0, length) for doc, length in enumerate(LENGTHS)], []]


@pytest.mark.parametrize("with_handle", [False, True], ids=["plain", "checkpoint with a handle"])
@pytest.mark.parametrize("table", ["contiguous", "zigzag", "zigzag_per_document", ALL_ON_RANK_0])
def test_two_ranks_are_one(rng: torch.Generator, table: Any, with_handle: bool) -> None:
    seed = rng.initial_seed()
    ranks = gloo(2).run(shared_step, seed, table, with_handle)
    if table is ALL_ON_RANK_0:
        assert ranks[1]["tokens"] == 0
    layer, cu_seqlens, x, dy = drawn(seed)
    one = step(layer, ds.build_context(ds.partition(cu_seqlens, 1), device="cpu"), x, dy)
    found = {n: ranks[1][n] if n in ("x", "y") else ranks[0][n] + ranks[1][n] for n in one}
    assert_close(found, one, EXACT)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16(), lambda m: m.half()])
def test_a_narrow_model_keeps_its_decay_in_fp32(rng: torch.Generator, cast: Any) -> None:
    torch.manual_seed(rng.initial_seed())
    model = torch.nn.ModuleDict({"layer": ds.nn.GatedDeltaNet(HIDDEN, H, HV, K)})
    layer = model["layer"]
    before = layer.A_log.detach().clone(), layer.dt_bias.detach().clone()
    cast(model)
    assert all(same_bits(a, b) for a, b in zip(before, (layer.A_log.detach(), layer.dt_bias.detach()), strict=True))
    narrow = layer.q_proj.weight.dtype
    assert narrow in (torch.bfloat16, torch.float16)
    assert {n for n, p in layer.named_parameters() if p.dtype != narrow} == {"A_log", "dt_bias"}

    x = torch.randn(1, 40, HIDDEN).to(narrow)
    y = layer(x, ds.build_context(ds.partition([0, 40], 1), device="cpu"))
    y.float().square().sum().backward()
    assert y.dtype == narrow
    assert layer.A_log.grad.dtype == torch.float32 and layer.A_log.grad.abs().min() > 0

    model.double()
    assert {p.dtype for p in layer.parameters()} == {torch.float64}
    model.float().to("meta")
    assert {(p.dtype, p.device.type) for p in layer.parameters()} == {(torch.float32, "meta")}


def test_parameters_start_as_published_and_bear_the_published_names(rng: torch.Generator) -> None:
    torch.manual_seed(rng.initial_seed())
    layer = ds.nn.GatedDeltaNet(8, 64, 256, 4, 2, dtype=torch.bfloat16)
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    rate, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16 + 1e-5
    # log-uniform: of 256 draws, half lie below the geometric mean 1e-2; 6 standard deviations are 48
    assert 1e-3 * (1 - 1e-4) <= dt.min() < 2e-3 and 5e-2 < dt.max() <= 1e-1 * (1 + 1e-4)
    assert abs((dt < math.sqrt(1e-3 * 1e-1)).sum().item() - 128) <= 48
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "A_log": (256,), "dt_bias": (256,), "o_norm.weight": (2,),
        "q_proj.weight": (256, 8), "k_proj.weight": (256, 8), "v_proj.weight": (512, 8), "g_proj.weight": (512, 8),
        "a_proj.weight": (256, 8), "b_proj.weight": (256, 8), "o_proj.weight": (8, 512),
        "q_conv1d.weight": (256, 1, 4), "k_conv1d.weight": (256, 1, 4), "v_conv1d.weight": (512, 1, 4),
    }  # fmt: skip


def test_zero_rows_give_finite_gradients() -> None:
    layer = ds.nn.GatedDeltaNet(HIDDEN, H, HV, K)
    x = torch.zeros(1, 70, HIDDEN, requires_grad=True)
    layer(x, ds.build_context(ds.partition([0, 70], 1), device="cpu")).sum().backward()
    assert all(t.grad.isfinite().all() for t in (x, *layer.parameters()))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 2, 3), "num_v_heads must be a multiple of num_heads = 2, got 3"),
        ((0, 2), "hidden_size must be at least 1, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ds.nn.GatedDeltaNet(*sizes)


def test_operands_that_do_not_fit_are_refused() -> None:
    layer = ds.nn.GatedDeltaNet(HIDDEN, H, HV, K)
    part = ds.partition([0, 10], 1)
    with pytest.raises(ValueError, match=r"x must have shape .* = \(1, 10, 12\), got \(1, 9, 12\)"):
        layer(torch.randn(1, 9, HIDDEN), ds.build_context(part, device="cpu"))
    with pytest.raises(ValueError, match="conv_kernel_size 4, got 3"):
        layer(torch.randn(1, 10, HIDDEN), ds.build_context(part, device="cpu", conv_kernel_size=3))
    with pytest.raises(ValueError, match="simulated"):
        layer(torch.randn(1, 10, HIDDEN), ds.build_context(part, ds.SimulatedGroup(1), device="cpu"))
    with pytest.raises(ValueError, match=r"output_final_state=True is not served .* call deltaspan\.chunk_gated"):
        layer(torch.randn(1, 10, HIDDEN), ds.build_context(part, device="cpu"), output_final_state=True)
