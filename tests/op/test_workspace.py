"""What is foretold of a call's memory is what the call requests, to the byte: of torch here, of CUDA on a GPU."""

from collections.abc import Generator
from itertools import cycle
from typing import Any

import pytest
import torch

import deltaspan as ds
from deltaspan.exchange import AllGather, Beside, simulated
from deltaspan.exchange.collectives import Ongoing
from deltaspan.op import again
from deltaspan.op.workspace import Watch
from tests.op.memory import CALLS, HEADS, LENGTHS, calling, requested
from tests.op.support import LAYOUTS, offsets, split


@pytest.mark.timeout(600)  # on a GPU kernels are compiled
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_rank_alone(dry: Any, hopper: str, rng: torch.Generator, layout: str) -> None:
    """Also where its fragments cross to itself; on a GPU while it is recorded, and from its recording."""
    ctx = ds.build_context(split(offsets(LENGTHS), 1, layout), device=hopper, p_rule="occ", sm_count=40)
    for call in CALLS:
        run, foretold = calling(ctx, rng, call), ds.workspace_bytes(ctx, **HEADS, backend="hopper", **call)
        run()  # what is made once is there
        runs = 3 if hopper == "cuda" else 1
        assert [requested(run, hopper) for _ in range(runs)] == [foretold] * runs, call


def test_from_a_recording(dry: Any, hopper: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watched, which a call otherwise takes for a reason not to play what it has recorded."""
    if hopper == "cuda":
        pytest.skip("CUDA's allocator counts without a watch")
    ctx = ds.build_context(split(offsets(LENGTHS), 1, "zigzag"), device=hopper, p_rule="occ", sm_count=40)
    for call in CALLS:
        run, foretold = calling(ctx, rng, call), ds.workspace_bytes(ctx, **HEADS, backend="hopper", **call)
        run()
        run()
        with monkeypatch.context() as patched:
            patched.setattr(again, "may_repeat", lambda ctx, tier: True)
            assert requested(run, hopper) == foretold, call
    assert any(isinstance(known, tuple) for cut in ctx._cuts.values() for known in cut.recordings.values())


@pytest.mark.parametrize("world_size", [2, 4])
def test_each_of_several_ranks(
    dry: Any, hopper: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """All in lockstep, each watched by itself, with what NCCL's calls ask torch for."""
    if hopper == "cuda":
        pytest.skip("ranks that share a device share its allocator")
    monkeypatch.setattr(again, "may_repeat", lambda ctx, tier: False)
    for number, call in enumerate(CALLS):
        lengths = LENGTHS if number % 2 else [4 * n for n in LENGTHS]  # for peaks within exchanges, and behind them
        part = split(offsets(lengths), world_size, LAYOUTS[(number + world_size) % len(LAYOUTS)], rng)
        ctx = ds.build_context(part, ds.SimulatedGroup(world_size), device=hopper, p_rule="occ", sm_count=40)
        foretold = ds.workspace_bytes(ctx, **HEADS, backend="hopper", **call)
        watches, ranks = [Watch() for _ in range(world_size)], cycle(range(world_size))
        with monkeypatch.context() as patched:
            patched.setattr(
                simulated, "one_by_one", lambda program, w=watches, r=ranks: of_a_group(program, w[next(r)])
            )
            calling(ctx, rng, call)()
        assert [watch.peak for watch in watches] == foretold, (call, part.layout)
        assert next(ranks) == 0


def of_a_group(program: Any, watch: Watch) -> Generator[Any, Any, Any]:
    """The program, watched: what it asks for beside its own work is held until it is waited for, and what arrives is
    its own."""
    arrived = None
    while True:
        with watch:
            try:
                asked = program.send(arrived)
            except StopIteration as end:
                return end.value
            if isinstance(asked, Beside):
                carried = asked.program(*asked.operands)
        if isinstance(asked, Beside):
            arrived = Ongoing((yield from of_a_group(carried, watch)), asked.operands if asked.worth else ())
        elif isinstance(asked, Ongoing):
            arrived = asked.result
        else:
            received = yield asked
            with watch:
                sent, rows = asked.send.contiguous(), []
                if isinstance(asked, AllGather):
                    row, most = asked.send.shape[1:], max(asked.counts)
                    sent = asked.send.new_empty(most, *row)
                    rows = [torch.empty_like(sent) for _ in asked.counts]
                    asked.send.new_empty(len(rows), most, *row)
                arrived = received.clone()  # only now nobody holds what arrived before
                del sent, rows
        del asked


def test_of_whole_documents(dry: Any, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of docs/memory.md, for which nothing has to be there."""
    if hopper == "cpu":
        monkeypatch.setattr(dry, "_multiprocessors", lambda device: 132)
    found = {}
    for tokens in (127_488, 15_936):
        ctx = ds.build_context(ds.partition([0, tokens], 1), device=hopper)
        given = {"H": 16, "HV": 48, "segments": 11, "checkpoint": True, "backend": "hopper"}
        for slabs in (1, 2, 4):
            monkeypatch.setattr(dry, "_slabs", lambda *programs, slabs=slabs: slabs)
            found[tokens, slabs] = round(ds.workspace_bytes(ctx, **given) / 2**20)
    assert [*found.values()] == [10_871, 7_883, 6_389, 1_440, 1_067, 880]


def test_nothing_is_left_behind(dry: Any, hopper: str) -> None:
    """Neither memory, nor tables or recordings in the context; wherever it is asked."""
    ctx = ds.build_context(split(offsets(LENGTHS), 1, "zigzag"), device=hopper, sm_count=40)
    ask = {**HEADS, "segments": 2, "checkpoint": True, "backend": "hopper"}
    first = ds.workspace_bytes(ctx, **ask)
    asked = torch.cuda.memory_stats().get("allocation.all.allocated", 0) if hopper == "cuda" else None
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, lambda: torch.autocast(hopper)):
        with mode():
            assert ds.workspace_bytes(ctx, **ask) == first
    if hopper == "cuda":
        assert torch.cuda.memory_stats().get("allocation.all.allocated", 0) == asked
    assert not ctx._cuts


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"backend": "torch"}, "backend='torch' takes the torch tier here, .* measure a call"),
        ({"direction": "backward"}, "direction must be one of .*'forward', 'step'.*, got 'backward'"),
        ({"direction": "forward", "checkpoint": True}, "checkpoint=True belongs to direction='step'"),
        ({"segments": 40}, "segments must be at most 21"),
        ({"exchange": "post"}, "exchange must be one of"),
        ({"HV": 3}, "HV=3 and H=2"),
        ({"backend": "cuda"}, "backend must be one of"),
    ],
)
def test_what_is_refused(hopper: str, changed: dict[str, Any], says: str) -> None:
    ctx = ds.build_context(ds.partition(offsets(LENGTHS), 1), device=hopper)
    with pytest.raises(ValueError, match=says):
        ds.workspace_bytes(ctx, **({**HEADS, "backend": "hopper"} | changed))


def test_refused_where_the_torch_tier_serves() -> None:
    ctx = ds.build_context(ds.partition([0, 20], 1), device="cpu")
    with pytest.raises(ValueError, match="backend='auto' takes the torch tier here"):
        ds.workspace_bytes(ctx, **HEADS)
    with pytest.raises(ValueError, match=r"compute capability 9\.0, not on cpu"):
        ds.workspace_bytes(ctx, **HEADS, backend="hopper")


def test_a_watch_counts_what_has_gone() -> None:
    with Watch() as watch:
        stays = torch.empty(100)
        a = torch.empty(8)
        b = a.view(2, 4) + 1  # 64 bytes beside each other
        del a
        c = b.mul_(2).new_empty(4)
    assert watch.alive() == 400 + 32 + 16
    del b, c
    assert (watch.alive(), watch.peak, stays.nbytes) == (400, 64, 400)
