"""A context says where its tokens stand, never changes, and goes through other people's code as one piece."""

import copy
import pickle
import weakref

import pytest
import torch
from torch.utils._pytree import tree_flatten

import deltaspan as ds
from deltaspan.kernels import select
from deltaspan.op.context import default_rule
from tests.op.support import LAYOUTS, offsets, simulate, split

CU_SEQLENS = offsets([20, 0, 1, 33])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_tokens_stand(rng: torch.Generator, layout: str) -> None:
    part = split(CU_SEQLENS, 3, layout, rng)
    ctx = simulate(part)
    assert ctx.part is part and ctx.rank is None
    for rank in range(3):
        fragments = part.fragments[rank]
        assert ctx.tokens[rank] == sum(f.length for f in fragments)
        assert ctx.cu_seqlens[rank].dtype == torch.int32
        assert ctx.cu_seqlens[rank].tolist() == offsets(f.length for f in fragments)
        assert ctx.position_ids[rank].dtype == torch.int64
        assert ctx.position_ids[rank].tolist() == [f.offset + i for f in fragments for i in range(f.length)]


def test_one_rank_stands_alone() -> None:
    part = ds.partition(CU_SEQLENS, 1)
    ctx = ds.build_context(part, rank=0, device="cpu", conv_kernel_size=3, sm_count=7)
    assert (ctx.rank, ctx.tokens, ctx.conv_kernel_size, ctx.sm_count) == (0, 54, 3, 7)
    assert ctx.cu_seqlens.tolist() == [0, 20, 21, 54]  # an empty document is no fragment of a contiguous layout
    assert ctx.position_ids.tolist() == [*range(20), 0, *range(33)]
    x = torch.arange(54.0)
    assert ctx.shard(x, dim=0).equal(x) and ctx.unshard(x, dim=0).equal(x)


def test_what_ranks_without_a_gpu_plan_for_and_by() -> None:
    ctx = ds.build_context(ds.partition(CU_SEQLENS, 1), device="cpu")
    assert (ctx.sm_count, ctx.p_rule) == (132, "row_cost_lpt")
    for rule in ("least_time", "one"):
        assert ds.build_context(ds.partition(CU_SEQLENS, 1), device="cpu", p_rule=rule).p_rule == rule


@pytest.mark.parametrize(
    ("capability", "without_triton", "rule"),
    [
        ((9, 0), None, "least_time"),
        ((9, 0), "needs Triton", "row_cost_lpt"),
        ((8, 0), None, "row_cost_lpt"),
        ((10, 0), None, "row_cost_lpt"),
    ],
)
def test_the_rule_of_a_device(
    capability: tuple[int, int], without_triton: str | None, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(select, "_without_triton", lambda: without_triton)
    select.has_hopper.cache_clear()
    try:
        assert default_rule(torch.device("cuda", 0)) == rule
        assert default_rule(torch.device("cpu")) == "row_cost_lpt"
    finally:
        select.has_hopper.cache_clear()


@pytest.mark.gpu
def test_a_context_on_a_gpu_plans_by_its_rule() -> None:
    part = ds.partition([0, 16_000], 1)
    ctx = ds.build_context(part, device="cuda")
    rule = "least_time" if torch.cuda.get_device_capability() == (9, 0) else "row_cost_lpt"
    assert ctx.p_rule == rule
    assert [ctx._segments(0, 6, None)] == ds.plan_segments(part, hv=6, sm_count=ctx.sm_count, rule=rule)


def test_immutable() -> None:
    ctx = ds.build_context(ds.partition(CU_SEQLENS, 1), device="cpu")
    for name in ("part", "tokens", "conv_kernel_size", "anything"):
        with pytest.raises(AttributeError, match=name):
            setattr(ctx, name, 1)
    with pytest.raises(AttributeError, match="part"):
        del ctx.part
    assert ctx.part.total_tokens == 54


def test_one_opaque_leaf() -> None:
    """Of whoever walks a module's inputs; and its life is watched from outside."""
    ctx = simulate(ds.partition(CU_SEQLENS, 2))
    assert tree_flatten({"x": (1, ctx)})[0] == [1, ctx]
    alive = weakref.ref(ctx)
    del ctx
    assert alive() is None


def test_a_context_outlives_the_mode_it_is_built_in() -> None:
    with torch.inference_mode():
        ctx = ds.build_context(ds.partition([0, 9], 1), device="cpu")
    x = torch.ones(1, 9, 2, requires_grad=True)
    ctx.shard(x).sum().backward()
    assert x.grad.tolist() == torch.ones(1, 9, 2).tolist()
    assert copy.deepcopy(ctx) is ctx
    with pytest.raises(TypeError, match="belongs to its process"):
        pickle.dumps(ctx)
