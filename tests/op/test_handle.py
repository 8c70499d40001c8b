"""A checkpoint's recompute with a handle: no collective is asked for, the same bits, and a wrong handle is told."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from deltaspan.exchange import Program, one_by_one
from deltaspan.exchange.process_group import ProcessGroup
from deltaspan.exchange.simulated import SimulatedGroup
from tests.helpers import gloo, same_bits
from tests.op.checkpoints import SELECTIVE
from tests.op.support import LAYOUTS, Pack, draw, leaf, simulate, split

LENGTHS = [200, 1, 0, 70]
SHAPE = {"H": 1, "HV": 3, "K": 6, "V": 5}
PLAN = {"p_rule": "occ", "sm_count": 40}
EXCHANGES = ("all_to_all", "ring", "all_gather")
MODES = [{"exchange": e, "save_transfer": t} for e, t in product(EXCHANGES, (True, False))]
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of reentrant in reentrant
SENT_BY = {  # collectives of one forward of convolution and operation
    "all_to_all": {"halo", "summaries", "entry_states"},
    "ring": {"halo", "entry_states"},
    "all_gather": {"halo", "summaries"},
}


class Watching(TorchDispatchMode):
    """As loggers and counters of operations are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def drawn(rng: torch.Generator, **shape: int) -> Pack:
    return draw(rng, LENGTHS, **SHAPE | shape).to(torch.float32)


def region(pack: Pack, ctx: ds.Context, after: bool = True, **options: Any) -> Callable[..., Tensor]:
    """A convolution, the operation, and with `after` something more that saves."""

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, x: Tensor, handle: Any = None) -> Tensor:
        y = ds.causal_conv1d(ctx.shard(x), pack.weight, ctx, recompute_handle=handle)
        o, _ = ds.chunk_gated_delta_rule(
            *map(ctx.shard, (q, k, v, g, beta)), ctx, recompute_handle=handle, **options
        )  # fmt: skip
        both = torch.cat([t.flatten() for t in (*y, *o)])
        return both.sin() if after else both

    return run


@contextmanager
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the collectives that rank 0 asks for, as they come."""
    names: list[str] = []

    def listening(program: Program) -> Program:
        arrived = None
        while True:
            try:
                collective = program.send(arrived)
            except StopIteration as end:
                return end.value
            names.append(collective.name.split(",")[0])
            arrived = yield collective

    with monkeypatch.context() as patched:
        for group in (SimulatedGroup, ProcessGroup):
            real = group.run

            def run(self: Any, programs: Sequence[Program], real: Callable = real) -> list[Any]:
                return real(self, [listening(one_by_one(programs[0])), *programs[1:]])

            patched.setattr(group, "run", run)
        yield names


def leaves_of(pack: Pack) -> list[Tensor]:
    return [leaf(x) for x in (*pack[1:6], pack.x)]


def step(run: Callable[..., Tensor], pack: Pack, *handle: Any) -> list[Tensor]:
    leaves = leaves_of(pack)
    y = run(*leaves, *handle)
    y.square().sum().backward()
    return [y.detach(), *(x.grad for x in leaves)]


def checkpointed(run: Callable[..., Tensor], reentrant: bool = False) -> Callable[..., Tensor]:
    return lambda *given: checkpoint(run, *given, use_reentrant=reentrant)


def nested(run: Callable[..., Tensor], outer: bool, inner: bool) -> Callable[..., Tensor]:
    return checkpointed(lambda *given: checkpointed(run, inner)(*given).cos(), outer)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(same_bits, found, expected))


@pytest.mark.parametrize(("mode", "layout"), [*zip(MODES, LAYOUTS + LAYOUTS, strict=False)], ids=str)
def test_no_collective_in_the_recompute(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any], layout: str
) -> None:
    """The backward alone asks for what a backward asks for; without a handle the forward's come again."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, layout, rng), **PLAN)
    for after, save_mode in ((True, "light"), (False, "light"), (True, "full")):
        run = region(pack, ctx, after, save_mode=save_mode, **mode)
        with asked(monkeypatch) as names:
            expected = step(run, pack)
            plain = list(names)
            assert same(step(checkpointed(run), pack), expected)
            recomputed = names[len(plain) :]
            assert same(step(checkpointed(run), pack, ds.RecomputeHandle()), expected)
            handled = names[len(plain) + len(recomputed) :]
        assert sorted(handled) == sorted(plain)
        sent = SENT_BY[mode["exchange"]]
        assert len(recomputed) > len(handled)
        assert set(plain) > sent
        assert sorted(recomputed) == sorted(plain + [name for name in plain if name in sent])


@pytest.mark.parametrize("nesting", list(product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("mode", [MODES[0], MODES[3]], ids=str)
def test_nested_checkpoints(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any], nesting: tuple[bool, bool]
) -> None:
    """One handle for all of them, whose two recomputes ask for nothing."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"), **PLAN)
    run = region(pack, ctx, **mode)
    with asked(monkeypatch) as names:
        expected = step(lambda *given: run(*given).cos(), pack)
        plain = len(names)
        assert same(step(nested(run, *nesting), pack, ds.RecomputeHandle()), expected)
    assert sorted(names[:plain]) == sorted(names[plain:])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_handle_outside_the_outermost_checkpoint_alone(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, reentrant: bool
) -> None:
    """One that is made within a region is new in each recompute, which exchanges as a first run does."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    run = region(pack, ctx)
    expected = step(run, pack)
    with asked(monkeypatch) as names:
        found = step(checkpointed(lambda *given: run(*given, ds.RecomputeHandle()), reentrant), pack)
    assert same(found, expected)
    assert names.count("summaries") == names.count("halo") == 2


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_second_backward(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]) -> None:
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"), **PLAN)
    run, leaves = region(pack, ctx, **mode), leaves_of(pack)
    y = checkpointed(run)(*leaves, ds.RecomputeHandle())
    dout = torch.randn(y.shape, generator=rng)
    with asked(monkeypatch) as names:
        once, twice = (torch.autograd.grad(y, leaves, dout, retain_graph=True) for _ in range(2))
    assert same(list(once), list(twice))
    assert same(list(once), list(torch.autograd.grad(run(*leaves), leaves, dout)))
    assert "halo" not in names and "summaries" not in names


def test_a_handle_serves_one_forward(rng: torch.Generator) -> None:
    """Found filled outside of a backward it is an error, of the operation as of the convolution."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    leaves, handle = leaves_of(pack), ds.RecomputeHandle()
    region(pack, ctx)(*leaves, handle)
    assert set(handle.entries) == {"rule", "convolution"}
    for call in (
        lambda: ds.chunk_gated_delta_rule(*map(ctx.shard, leaves[:5]), ctx, recompute_handle=handle),
        lambda: ds.causal_conv1d(ctx.shard(leaves[5]), pack.weight, ctx, recompute_handle=handle),
    ):
        with pytest.raises(RuntimeError, match=r"^recompute_handle has served another forward: make a new one"):
            call()


def other_context(pack: Pack, ctx: ds.Context) -> Callable:
    return region(pack, simulate(ctx.part))


def other_scale(pack: Pack, ctx: ds.Context) -> Callable:
    return region(pack, ctx, scale=0.5)


def other_exchange(pack: Pack, ctx: ds.Context) -> Callable:
    return region(pack, ctx, exchange="ring")


@pytest.mark.parametrize(
    ("other", "said"),
    [(other_context, "with another context"), (other_scale, "scale=0.5"), (other_exchange, "exchange='ring'")],
)
def test_another_calls_handle_is_refused(rng: torch.Generator, other: Callable, said: str) -> None:
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    runs = iter((region(pack, ctx), other(pack, ctx)))
    y = checkpointed(lambda *given: next(runs)(*given))(*leaves_of(pack), ds.RecomputeHandle())
    with pytest.raises(ValueError, match=rf"^recompute_handle was (kept|filled) by a .*{said}"):
        y.sum().backward()


def test_other_shapes_are_refused(rng: torch.Generator) -> None:
    """By the operation and the convolution, each with the handle that a call of other heads or channels has filled."""
    pack, wide = drawn(rng), drawn(rng, V=4, D=7)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    handle = ds.RecomputeHandle()
    region(wide, ctx)(*leaves_of(wide), handle)
    for key, named in (("rule", "forward with another v"), ("convolution", "convolution with another context")):
        y = checkpointed(region(pack, ctx))(*leaves_of(pack), entered := ds.RecomputeHandle())
        entered.entries[key] = handle.entries[key]
        with pytest.raises(ValueError, match=rf"^recompute_handle was (kept|filled) by a {named}"):
            y.sum().backward()


def test_another_activation_is_refused(rng: torch.Generator) -> None:
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    activations = iter(("silu", None))

    def run(x: Tensor, handle: Any) -> Tensor:
        y = ds.causal_conv1d(ctx.shard(x), pack.weight, ctx, activation=next(activations), recompute_handle=handle)
        return torch.cat(y, dim=1).sin()

    y = checkpoint(run, leaf(pack.x), ds.RecomputeHandle(), use_reentrant=False)
    with pytest.raises(ValueError, match=r"^recompute_handle was filled by a convolution with another .*activation"):
        y.sum().backward()


def test_a_tensor_that_was_changed_in_place_is_refused(rng: torch.Generator) -> None:
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    y = checkpointed(region(pack, ctx))(*leaves_of(pack), handle := ds.RecomputeHandle())
    handle.entries["rule"][0].kept.zero_()
    with pytest.raises(ValueError, match=r"^recompute_handle holds a tensor that was changed in place"):
        y.sum().backward()


def test_what_no_handle_can_serve_is_refused(rng: torch.Generator) -> None:
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    shards = [ctx.shard(x) for x in pack[1:6]]
    with pytest.raises(ValueError, match=r"^recompute_handle needs boundary_mode='saved'"):
        ds.chunk_gated_delta_rule(*shards, ctx, boundary_mode="replay", recompute_handle=ds.RecomputeHandle())
    for wrong in ({}, ds.RecomputeHandle, "handle"):
        with pytest.raises(TypeError, match=f"^recompute_handle must be a RecomputeHandle, got {type(wrong).__name__}"):
            ds.chunk_gated_delta_rule(*shards, ctx, recompute_handle=wrong)
        with pytest.raises(TypeError, match=f"^recompute_handle must be a RecomputeHandle, got {type(wrong).__name__}"):
            ds.causal_conv1d(ctx.shard(pack.x), pack.weight, ctx, recompute_handle=wrong)


@pytest.mark.parametrize("save_mode", ["light", "full"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_retained_bytes(rng: torch.Generator, mode: dict[str, Any], save_mode: str) -> None:
    """Those of save mode light, and the convolution's rows; what the stages leave is formed again."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"), **PLAN)
    handle = ds.RecomputeHandle()
    checkpointed(region(pack, ctx, save_mode=save_mode, **mode))(*leaves_of(pack), handle)
    kept = [sum(t.untyped_storage().nbytes() for t in saved.tensors) for saved in handle.entries["rule"]]
    assert kept == ds.saved_bytes(ctx, **SHAPE, **mode)
    rows = [sum(t.untyped_storage().nbytes() for t in history) for history in handle.entries["convolution"][1]]
    halo = [rank["halo"][1] for rank in ds.comm_bytes(ctx, **SHAPE, dtype=torch.float32, channels=pack.x.shape[2])]
    assert rows == halo and sum(rows) > 0


def on_rank(seed: int, part: ds.Partition) -> list[Any]:
    """The collectives of recomputes with a handle, and whether bits are those without."""
    ctx = ds.build_context(part, dist.group.WORLD, device="cpu", **PLAN)
    pack, found = drawn(torch.Generator().manual_seed(seed)), []
    for mode in MODES:
        run = region(pack, ctx, **mode)
        expected, leaves = step(run, pack), leaves_of(pack)
        with pytest.MonkeyPatch.context() as patch, asked(patch) as names:
            y = checkpointed(run)(*leaves, ds.RecomputeHandle())
            forward = len(names)
            y.square().sum().backward()
        assert forward >= 2
        found.append((set(names[forward:]), same([y.detach(), *(x.grad for x in leaves)], expected)))
    return found


@pytest.mark.parametrize(("world_size", "layout"), [(2, "zigzag"), (4, "contiguous"), (4, "ragged")])
def test_real_ranks(rng: torch.Generator, world_size: int, layout: str) -> None:
    part = split(drawn(rng).cu_seqlens, world_size, layout, rng)
    back = {
        "all_to_all": {"adjoint_offsets", "exit_adjoints", "halo_gradient"},
        "ring": {"exit_adjoints", "halo_gradient"},
        "all_gather": {"adjoint_offsets", "halo_gradient"},
    }
    expected = [(back[mode["exchange"]], True) for mode in MODES]
    assert gloo(world_size).run(on_rank, rng.initial_seed(), part) == [expected] * world_size


def forgetful(seed: int, part: ds.Partition) -> str:
    """Rank 1 runs its checkpoint without the handle that rank 0 gives, in a group of their own, which ends with it."""
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=2))  # how long a rank waits at most
    ctx = ds.build_context(part, impatient, device="cpu")
    pack = drawn(torch.Generator().manual_seed(seed))
    handle = ds.RecomputeHandle() if ctx.rank == 0 else None
    try:
        step(checkpointed(region(pack, ctx)), pack, handle)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_forgot_its_handle_is_named(rng: torch.Generator) -> None:
    part = split(drawn(rng).cu_seqlens, 2, "zigzag")
    first, second = gloo(2).run(forgetful, rng.initial_seed(), part)
    assert "rank 1 asks for AllToAll 'halo'" in first, first  # at once, not when a timeout is over
    assert "rank 0 asks for AllToAll 'adjoint_offsets'" in second, second


def test_refused_in_a_selective_checkpoint(rng: torch.Generator) -> None:
    """It expects the same operators in both runs, some of which a handle leaves out."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    selective = {"use_reentrant": False, "context_fn": SELECTIVE}
    with pytest.raises(ValueError, match="selective checkpoint"):
        checkpoint(region(pack, ctx), *leaves_of(pack), ds.RecomputeHandle(), **selective)


def forgetful_at_the_end(seed: int, part: ds.Partition) -> str:
    """As above, where the recompute begins inside the operation's own backward."""
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    ctx = ds.build_context(part, impatient, device="cpu")
    pack = drawn(torch.Generator().manual_seed(seed))
    leaves = [leaf(ctx.shard(x)) for x in pack[1:6]]

    def rule(*operands: Tensor, handle: Any = None) -> Tensor:
        return ds.chunk_gated_delta_rule(*operands, ctx, recompute_handle=handle)[0]

    handle = ds.RecomputeHandle() if ctx.rank == 0 else None
    try:
        checkpoint(rule, *leaves, handle=handle, use_reentrant=False).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_forgot_its_handle_is_named_inside_a_backward(rng: torch.Generator) -> None:
    part = split(drawn(rng).cu_seqlens, 2, "zigzag")
    first, second = gloo(2).run(forgetful_at_the_end, rng.initial_seed(), part)
    assert "rank 1 asks for AllToAll 'summaries'" in first, first
    assert "rank 0 asks for AllToAll 'adjoint_offsets'" in second, second


def test_a_mode_inside_does_not_hide_a_selective_checkpoint(rng: torch.Generator) -> None:
    """Neither from the refusal of a handle nor from the rule that nothing is left out."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    run = region(pack, ctx, after=False)

    def watched(*given: Any) -> Tensor:
        with Watching():
            return run(*given)

    selective = {"use_reentrant": False, "context_fn": SELECTIVE}
    with pytest.raises(ValueError, match="selective checkpoint"):
        checkpoint(watched, *leaves_of(pack), ds.RecomputeHandle(), **selective)
    assert same(step(lambda *given: checkpoint(watched, *given, **selective), pack), step(run, pack))
