"""What fails on one rank ends on all of them, with an error that names the rank, and leaves nothing behind."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deltaspan as ds
from tests.helpers import gloo, same_bits
from tests.op.support import Pack, draw, run_convolution, run_rule, simulate, split

LENGTHS = [20, 5, 35]


def drawn(world_size: int) -> tuple[Pack, ds.Partition]:
    pack = draw(torch.Generator().manual_seed(0), LENGTHS)
    return pack, split(pack.cu_seqlens, world_size, "zigzag")


def said(call: Callable, *args: Any, **options: Any) -> str:
    """The error of a call, in words."""
    try:
        call(*args, **options)
    except (RuntimeError, ValueError, TypeError) as error:
        kind = RuntimeError if isinstance(error, RuntimeError) else type(error)
        return f"{kind.__name__}: {error}"
    return "nothing"


def calls(ctx: ds.Context, pack: Pack, bad: bool) -> dict[str, Callable]:
    """Calls in which all ranks take part, each spoilt in one argument where this rank is the bad one."""
    q, k, v, g, beta, do, x = (ctx.shard(x) for x in (*pack[1:6], pack.do, pack.x))
    spoilt = slice(None, -1) if bad else slice(None)
    return {
        "rule": lambda: ds.chunk_gated_delta_rule(q, k, v[:, spoilt], g, beta, ctx),
        "forward": lambda: ds.forward(q, k, v, g[:, spoilt], beta, ctx),
        "backward": lambda: ds.backward(q, k, v, g, beta, ctx, do[:, spoilt]),
        "convolution": lambda: ds.causal_conv1d(x[:, spoilt], pack.weight, ctx),
        "unshard": lambda: ctx.unshard(x[:, spoilt]),
        "context": lambda: ds.build_context(ctx.part, dist.group.WORLD, device="cpu", conv_kernel_size=0 if bad else 4),
    }


FIRST = {
    "rule": "summaries",
    "forward": "summaries",
    "backward": "summaries",
    "convolution": "halo",
    "unshard": "unshard",
    "context": "context_digest",
}


def fail(name: str, bad_ranks: tuple[int, ...]) -> tuple[str, dict]:
    """What a rank is told of a failure; and what the next step gives."""
    pack, part = drawn(dist.get_world_size())
    ctx = ds.build_context(part, dist.group.WORLD, device="cpu")
    told = said(calls(ctx, pack, ctx.rank in bad_ranks)[name])
    return told, run_rule(pack, ctx)[0] | run_convolution(pack, ctx)[0]


@pytest.mark.parametrize(("world_size", "bad_ranks"), [(2, (1,)), (4, (2,)), (4, (0, 3)), (2, (0, 1))])
@pytest.mark.parametrize("name", FIRST)
def test_all_ranks_are_told_and_go_on(name: str, world_size: int, bad_ranks: tuple[int, ...]) -> None:
    pack, part = drawn(world_size)
    ctx = simulate(part)
    expected = [a | b for a, b in zip(run_rule(pack, ctx), run_convolution(pack, ctx), strict=True)]
    for rank, (told, next_step) in enumerate(gloo(world_size).run(fail, name, bad_ranks)):
        if rank in bad_ranks:
            assert told.startswith("ValueError: ")
        else:
            assert told.startswith(f"RuntimeError: rank {rank}: collective '{FIRST[name]}'"), told
            assert any(f"rank {bad} failed: ValueError: " in told for bad in bad_ranks), told
        assert [n for n in next_step if not same_bits(next_step[n], expected[rank][n])] == []


def fall_silent() -> str:
    """Rank 1 does not call."""
    pack, part = drawn(2)
    ctx = ds.build_context(part, dist.new_group(timeout=timedelta(seconds=2)), device="cpu")
    return said(calls(ctx, pack, False)["rule"]) if ctx.rank == 0 else ""


def test_a_silent_rank_is_named() -> None:
    told = gloo(2).run(fall_silent)[0]
    assert told.startswith("RuntimeError: rank 0: collective 'summaries'") and "rank 1" in told


def call_something_else() -> str:
    pack, part = drawn(2)
    ctx = ds.build_context(part, dist.new_group(timeout=timedelta(seconds=5)), device="cpu")
    return said(calls(ctx, pack, False)["rule" if ctx.rank else "convolution"])


def test_ranks_that_call_different_things() -> None:
    first, second = gloo(2).run(call_something_else)
    assert first.startswith("RuntimeError: rank 0: collective 'halo'") and "rank 1" in first and "summaries" in first
    assert second.startswith("RuntimeError: rank 1: collective 'summaries'") and "rank 0" in second and "halo" in second


OTHER = {"type": {}, "heads": {"HV": 6}, "key channels": {"K": 9}, "value channels": {"V": 5}}


def bring_other_operands(what: str, exchange: str) -> str:
    """Rank 1's operands fit its context, yet not those of rank 0."""
    rank = dist.get_rank()
    dtype = torch.float64 if what == "type" and rank else torch.float32
    pack = draw(torch.Generator().manual_seed(0), [40], **(OTHER[what] if rank else {})).to(dtype)
    ctx = ds.build_context(ds.partition([0, 40], 2), dist.new_group(timeout=timedelta(seconds=5)), device="cpu")
    return said(ds.chunk_gated_delta_rule, *(ctx.shard(x) for x in pack[1:6]), ctx, exchange=exchange)


@pytest.mark.parametrize(
    ("what", "exchange"), [*((what, "all_to_all") for what in OTHER), ("type", "ring"), ("heads", "all_gather")]
)
def test_ranks_whose_operands_differ(what: str, exchange: str) -> None:
    """State goes from rank 0 to rank 1 alone: rank 1 must not take what it gets for what it wants."""
    told = gloo(2).run(bring_other_operands, what, exchange)[1]
    assert told.startswith("RuntimeError: rank 1: collective ") and "rank 0" in told, told


def fail_downstream(exchange: str) -> str:
    """Rank 1 is bad; in a contiguous layout state goes to it from rank 0, and nothing comes back."""
    pack = draw(torch.Generator().manual_seed(0), [40])
    ctx = ds.build_context(ds.partition([0, 40], 2), dist.new_group(timeout=timedelta(seconds=5)), device="cpu")
    operands = [ctx.shard(x) for x in pack[1:6]]
    operands[2] = operands[2][:, : 20 - ctx.rank]
    return said(ds.chunk_gated_delta_rule, *operands, ctx, exchange=exchange)


@pytest.mark.parametrize(
    "exchange",
    [
        "all_to_all",
        "all_gather",
        "ring",
    ],
)
def test_ranks_upstream_are_told(exchange: str) -> None:
    waiting, bad = gloo(2).run(fail_downstream, exchange)
    assert bad.startswith("ValueError: v must have shape")
    assert "rank 1 failed: ValueError: v must have shape" in waiting, waiting


def fail_twice() -> list[str]:
    """Two calls fail in a row, and rank 3 comes to either so late that the others have left it behind."""
    pack, part = drawn(4)
    ctx = ds.build_context(part, dist.new_group(timeout=timedelta(seconds=8)), device="cpu")
    told = []
    for name, bad_ranks, late in (("convolution", (2, 3), (0, 0.3, 0, 0.45)), ("rule", (0, 1), (0, 0, 0, 0.28))):
        time.sleep(late[ctx.rank])
        told.append(said(calls(ctx, pack, ctx.rank in bad_ranks)[name]))
    return [*told, said(run_rule, pack, ctx)]


def test_two_failures_in_a_row_leave_nothing_behind() -> None:
    for rank, (first, second, step) in enumerate(gloo(4).run(fail_twice)):
        assert ("ValueError" in first) and ("ValueError" in second)
        assert step == "nothing", f"rank {rank}: {step}"


def ignore_the_output() -> str:
    """Rank 1's loss does not use what the operation gave it, so that it has no backward there."""
    pack, part = drawn(2)
    ctx = ds.build_context(part, dist.new_group(timeout=timedelta(seconds=2)), device="cpu")
    operands = [x.requires_grad_() for x in (ctx.shard(x).clone() for x in pack[1:6])]
    o, _ = ds.chunk_gated_delta_rule(*operands, ctx)
    loss = o.sum() if ctx.rank == 0 else operands[0].sum()
    return said(loss.backward)


def test_a_loss_that_ignores_its_output_hangs_nobody() -> None:
    told, other = gloo(2).run(ignore_the_output)
    assert told.startswith("RuntimeError: rank 0: collective 'adjoint_offsets'") and "rank 1" in told
    assert other == "nothing"


def ignore_what_nobody_awaits() -> str:
    """The same where no state crosses: nobody needs the backward of rank 1, and the next step is as good as any."""
    pack, _ = drawn(2)
    part = ds.partition(pack.cu_seqlens, 2, fragments=[[(0, 0, 20), (1, 0, 5)], [(2, 0, 35)]])
    ctx = ds.build_context(part, dist.group.WORLD, device="cpu")
    operands = [x.requires_grad_() for x in (ctx.shard(x).clone() for x in pack[1:6])]
    o, _ = ds.chunk_gated_delta_rule(*operands, ctx)
    (o.sum() if ctx.rank == 0 else operands[0].sum()).backward()
    return said(ctx.unshard, o)


def test_a_backward_that_nobody_awaits_may_be_left_out() -> None:
    assert gloo(2).run(ignore_what_nobody_awaits) == ["nothing", "nothing"]


def step_until_killed(rank: int, store: str, answers: multiprocessing.SimpleQueue) -> None:
    """A process of its own; rank 1 is killed between the two directions."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))
    pack, part = drawn(3)
    ctx = ds.build_context(part, dist.group.WORLD, device="cpu")
    operands = [x.requires_grad_() for x in (ctx.shard(x).clone() for x in pack[1:6])]
    o, _ = ds.chunk_gated_delta_rule(*operands, ctx)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    answers.put((rank, said(o.sum().backward)))


def test_a_killed_rank_is_named_and_no_process_is_left(tmp_path: Path) -> None:
    start = multiprocessing.get_context("spawn")
    answers = start.SimpleQueue()
    store = (tmp_path / "store").as_uri()
    processes = [start.Process(target=step_until_killed, args=(rank, store, answers)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL, 0]
    told = dict(answers.get() for _ in range(2))
    for rank in (0, 2):
        assert told[rank].startswith(f"RuntimeError: rank {rank}: collective 'adjoint_offsets': rank 1 ended"), told


def break_the_layer() -> tuple[str, str]:
    """Rank 1's hidden states do not fit the layer's projections, which are no call of all ranks."""
    torch.manual_seed(0)
    layer = ds.nn.GatedDeltaNet(16, 1, 2, head_dim=8).double()
    ctx = ds.build_context(split([0, 60], 2, "zigzag"), dist.group.WORLD, device="cpu")
    x = torch.randn(1, ctx.tokens, 16, dtype=torch.float64)
    told = said(layer, x[..., :-1] if ctx.rank == 1 else x, ctx)
    return told, said(layer, x, ctx)


def test_a_layer_that_fails_is_told() -> None:
    (waiting, next_waiting), (bad, next_bad) = gloo(2).run(break_the_layer)
    assert bad.startswith("ValueError: x must have shape")
    assert "rank 1 failed: ValueError: x must have shape" in waiting
    assert (next_waiting, next_bad) == ("nothing", "nothing")


def differ_in(what: str) -> str:
    rank = dist.get_rank()
    narrow = torch.bfloat16 if what == "rounding" and rank else torch.float32
    pack = draw(torch.Generator().manual_seed(0), [40]).to(narrow)  # states are FP32 beside either
    ctx = ds.build_context(ds.partition([0, 40], 2), dist.group.WORLD, device="cpu")
    own = {"rounding": {}} | {
        "scale": {"scale": 0.5},
        "unit_keys": {"unit_keys": False},
        "save_transfer": {"save_transfer": False},
        "raw": {"use_qk_l2norm_in_kernel": True},
        "state": {"initial_state": pack.initial_state},
    }
    return said(ds.chunk_gated_delta_rule, *(ctx.shard(x) for x in pack[1:6]), ctx, **(own[what] if rank else {}))


@pytest.mark.parametrize("what", ["scale", "unit_keys", "save_transfer", "raw", "state", "rounding"])
def test_ranks_whose_options_differ(what: str) -> None:
    for rank, told in enumerate(gloo(2).run(differ_in, what)):
        assert told.startswith(f"RuntimeError: rank {rank}: collective 'summaries': rank {1 - rank} asks for"), told
