"""What is refused, with which words, and that nobody waits for the rank that was refused."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deltaspan as ds
from deltaspan.plan import DEFAULT_RULE, HOPPER_RULE, RULES
from tests.helpers import gloo
from tests.op.refusals import GROUPS, PART, Rank, context
from tests.op.support import simulate

TABLE = {f"{group}: {name}": (bad, others) for group, (cases, others) in GROUPS.items() for name, bad in cases.items()}


@contextlib.contextmanager
def no_collective() -> Iterator[None]:
    """A rank that enters a collective waits for something, which one that only tells of its failure does not."""
    entered = mock.Mock(side_effect=AssertionError("a collective was entered"))
    with mock.patch.multiple(dist, irecv=entered, all_to_all_single=entered, all_gather=entered):
        yield


def refuse(name: str) -> tuple[str, str] | None:
    """Rank 1 makes the bad call, rank 0 a good one. Then they meet, which they could not if one waited elsewhere."""
    rank, (bad, others) = Rank(context()), TABLE[name]
    call, where = (bad.call, no_collective()) if dist.get_rank() else (others, contextlib.nullcontext())
    refusal = None
    with where:
        try:
            if call:
                call(rank)
        except Exception as error:
            refusal = type(error).__name__, str(error)
    dist.barrier()
    return refusal


@pytest.mark.parametrize("name", TABLE)
def test_refused_before_any_collective(name: str) -> None:
    told, refusal = gloo(2).run(refuse, name)
    bad, others = TABLE[name]
    assert refusal is not None, "served"
    assert refusal[0] == bad.error.__name__, refusal
    assert re.search(bad.says, refusal[1]), refusal
    if others:
        assert f"rank 1 failed: {refusal[0]}: {refusal[1][:60]}" in told[1]
    else:
        assert told is None


def accept() -> bool:
    """That every good argument is accepted: what is refused is what a case spoils."""
    rank = Rank(context())
    rank.rule(initial_state=rank.pack.initial_state, scale=1, backend="torch", segments=1)
    rank.rule(scale=0.5, recompute_output="always", reuse_recompute_tapes=False)
    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(4)}
    raw = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    rank.rule(**gate, **raw, g=rank.g.bfloat16(), beta=rank.beta.bfloat16(), save_mode="full", save_transfer=False)
    rank.rule(**gate | {"dt_bias": None}, boundary_mode="replay", recompute_handle=None, reuse_recompute_tapes=True)
    rank.backward(**gate, **raw)
    rank.backward(dfinal_state=rank.pack.dfinal_state)
    rank.convolution(bias=rank.bias)
    rank.convolution(x=(rank.x, rank.x), weight=(rank.weight,) * 2, bias=(None, rank.bias), activation=None)
    rank.ctx.unshard(rank.x, total=13)
    context(rank=dist.get_rank(), p_rule="one", conv_kernel_size=1, sm_count=1)
    context(p_rule=(None, DEFAULT_RULE)[dist.get_rank()])
    return True


def test_good_arguments_are_accepted() -> None:
    assert gloo(2).run(accept) == [True, True]


# Disagreement

DIFFERENT = {
    "documents": [{"part": ds.partition([0, n, 12], 2, "zigzag")} for n in (5, 6)],
    "layouts": [{"part": ds.partition([0, 12], 2, layout)} for layout in ("zigzag", "contiguous")],
    "fragments": [
        {"part": ds.partition([0, 12], 2, fragments=[(0, 0, n, 0), (0, n, 12 - n, 1)])} for n in (5, 6)
    ],
    "taps": [{"conv_kernel_size": n} for n in (4, 3)],
    "multiprocessors": [{"sm_count": n} for n in (132, 148)],
    "rules": [{"p_rule": rule} for rule in sorted(RULES)[:2]],
    "rules by default": [{}, {"p_rule": HOPPER_RULE}],  # as of ranks of which one alone has the kernels
}  # fmt: skip
NAMES = {"taps": "conv_kernel_size", "multiprocessors": "sm_count", "rules": "p_rule", "rules by default": "p_rule"}


def disagree(about: str) -> tuple[str, str] | None:
    try:
        context(**DIFFERENT[about][dist.get_rank()])
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("about", DIFFERENT)
def test_ranks_that_disagree_are_all_told(about: str) -> None:
    told = gloo(2).run(disagree, about)
    assert told[0] == told[1] and told[0] is not None
    assert told[0][0] == "ValueError"
    assert re.search(f"differ from rank 0: rank 1: {NAMES.get(about, 'part')}$", told[0][1]), told[0]


# Groups


def outside() -> str:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        return ""
    try:
        context(group=group, part=ds.partition([0, 5], 1))
    except ValueError as error:
        return str(error)
    return "served"


def square_mesh() -> str:
    mesh = dist.init_device_mesh("cpu", (1, 2))
    try:
        context(group=mesh)
    except ValueError as error:
        return str(error)
    return "served"


def test_groups_that_do_not_serve() -> None:
    assert re.search("group does not contain this process", gloo(2).run(outside)[1])
    for said in gloo(2).run(square_mesh):
        assert re.search("group must be a DeviceMesh of one dimension, got 2", said)


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_simulated_group_of_no_size(size: Any, error: type[Exception]) -> None:
    with pytest.raises(
        error, match=f"world_size must be .* got {size if error is ValueError else type(size).__name__}"
    ):
        ds.SimulatedGroup(size)


def test_simulated_ranks_take_lists() -> None:
    r = Rank(simulate(PART))
    for name in ("q", "k", "v", "g", "beta"):
        shards = r.operands[name]
        for spoilt, found in ((shards[0], "Tensor"), ([*shards, shards[0]], "a list of 3"), (tuple(shards), "tuple")):
            with pytest.raises(ValueError, match=f"{name} must be a list of 2 shards .* got {found}"):
                r.rule(**{name: spoilt})
    with pytest.raises(ValueError, match=r"do must be a list of 2 shards .* got Tensor"):
        r.backward(do=r.do[0])
    with pytest.raises(ValueError, match=r"saved must be a list of 2 shards .* got Saved"):
        r.backward(saved=r.rule(ds.forward)[2][0])
    with pytest.raises(ValueError, match=r"initial_state must be a list of 2 shards .* got a list of 1"):
        r.rule(initial_state=[r.pack.initial_state])
    with pytest.raises(ValueError, match=r"x must be a list of 2 shards .* got tuple"):
        r.convolution(x=(r.x, r.x), weight=(r.weight,) * 2)
    with pytest.raises(ValueError, match=r"weight must be a list of 2 shards .* got a list of 3"):
        r.convolution(weight=[r.weight] * 3)
    with pytest.raises(ValueError, match=r"x_local must be a list of 2 shards .* got Tensor"):
        r.ctx.unshard(r.x[0])
    with pytest.raises(ValueError, match=r"q has 5 tokens, .* this rank 6"):
        r.rule(q=[r.q[0], r.q[1][:, :5]])
    with pytest.raises(ValueError, match="rank must be the group's own, got 0"):
        ds.build_context(PART, ds.SimulatedGroup(2), rank=0, device="cpu")
    with pytest.raises(ValueError, match="part is for 2 ranks, but there is a group of 3 ranks"):
        ds.build_context(PART, ds.SimulatedGroup(3), device="cpu")


@pytest.mark.parametrize("query", [ds.comm_bytes, ds.saved_bytes, ds.workspace_bytes])
@pytest.mark.parametrize(
    ("H", "HV", "words"),
    [
        (2, 3, "HV=3 and H=2"),
        (0, 4, "H must be at least 1, got 0"),
        (2, 0, "HV must be at least 1, got 0"),
        (2, -2, "HV must be at least 1, got -2"),
    ],
)
def test_bytes_of_bad_heads(query: Callable, H: int, HV: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        query(simulate(PART), H=H, HV=HV)
