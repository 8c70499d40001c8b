"""Over NCCL, a GPU for every rank: the bits of simulated ranks, with work beside the exchange, and in a CUDA graph.

One rank, whose zigzag fragments cross all the same, needs one GPU; two need two.
"""

from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deltaspan as ds
from deltaspan.bench.group.graphs import capture
from deltaspan.bench.group.launch import Member
from deltaspan.bench.operands import Operands, Results
from deltaspan.bench.operands import draw as draw_operands
from deltaspan.bench.sides import Deltaspan
from deltaspan.exchange import EXCHANGES
from deltaspan.op import segments
from tests.helpers import gloo, same_bits
from tests.op.memory import CALLS, HEADS, calling, requested
from tests.op.support import LAYOUTS, Pack, draw, run_convolution, run_rule, split

pytestmark = pytest.mark.gpu
LENGTHS = [37, 150, 0, 1, 64, 5, 2, 300]
PLAN = {"p_rule": "occ", "sm_count": 12}  # a few segments a fragment


@pytest.fixture(params=(1, 2), ids=("one", "two"))
def world_size(request: pytest.FixtureRequest) -> int:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return request.param


@cache
def nccl() -> Any:
    """The group of all ranks of this process's helpers, each with a GPU of its own."""
    torch.cuda.set_device(dist.get_rank())
    return dist.new_group(backend="nccl")


def all_that_are_free(part: ds.Partition, rank: int, table: Any, **_: Any) -> np.ndarray:
    return ~part.crossing_in[part.rows(rank)][table.fragment]


divided = mock.patch.object(segments, "walked_ahead", all_that_are_free)


def steps(pack: Pack, ctx: ds.Context, exchange: str) -> list[dict[str, Tensor]]:
    pack = pack._replace(**{n: getattr(pack, n).to(ctx.device) for n in pack._fields[1:]})
    ranks = zip(run_rule(pack, ctx, exchange=exchange), run_convolution(pack, ctx), strict=True)
    return [{name: x.cpu() for name, x in (rule | convolution).items()} for rule, convolution in ranks]


def drawn(seed: int, world_size: int, layout: str) -> tuple[Pack, ds.Partition]:
    rng = torch.Generator().manual_seed(seed)
    pack = draw(rng, LENGTHS, HV=6, K=64, V=32).to(torch.float32)
    return pack, split(pack.cu_seqlens, world_size, layout, rng)


@divided
def on_nccl(seed: int, world_size: int, layout: str) -> dict[str, dict[str, Tensor]]:
    pack, part = drawn(seed, world_size, layout)
    ctx = ds.build_context(part, nccl(), **PLAN)
    assert ctx.device == torch.device("cuda", dist.get_rank()) and ctx._transport.beside
    return {exchange: steps(pack, ctx, exchange)[0] for exchange in EXCHANGES}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bits_of_simulated_ranks(rng: torch.Generator, world_size: int, layout: str) -> None:
    drawn_from = (rng.initial_seed(), world_size, layout)
    pack, part = drawn(*drawn_from)
    simulated = steps(pack, ds.build_context(part, ds.SimulatedGroup(world_size), device="cuda:0", **PLAN), "ring")
    for rank, by_exchange in enumerate(gloo(world_size).run(on_nccl, *drawn_from)):
        for exchange, found in by_exchange.items():
            different = [name for name in found if not same_bits(found[name], simulated[rank][name])]
            assert different == [], (rank, exchange)


@divided
def graphs(seed: int, exchange: str, backend: str) -> list[str]:
    """Results of replayed steps that differ from an eager one's, with new operands first."""
    world_size, group = dist.get_world_size(), nccl()
    device = torch.device("cuda", torch.cuda.current_device())
    member = Member(dist.get_rank(), world_size, device, "nccl", torch.zeros(1))
    cu_seqlens = [0, 700, 701, 1500, 4000]
    part = ds.partition(cu_seqlens, world_size, layout="zigzag")
    side = Deltaspan(ds.build_context(part, group), backend, exchange)
    first, second = (
        Operands(*map(side.ctx.shard, draw_operands(4000, (2, 6), "slow", device=str(device), seed=s)))
        for s in (seed, seed + 1)
    )
    x = Operands(*(t.clone() for t in first))
    graph, found = capture(member, lambda: side.step(x))
    different = []
    for given in (second, first):
        for place, t in zip(x, given, strict=True):
            place.copy_(t)
        graph.replay()
        pairs = zip(Results._fields, found, side.step(given), strict=True)
        different += [name for name, a, b in pairs if not same_bits(a, b)]
    return different


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("backend", ["torch", "hopper"])
def test_a_step_is_captured_with_its_collectives(
    rng: torch.Generator, world_size: int, exchange: str, backend: str
) -> None:
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    found = gloo(world_size).run(graphs, rng.initial_seed() % 2**31, exchange, backend)
    assert found == [[]] * world_size


def memory(seed: int, part: ds.Partition, call: dict[str, Any]) -> tuple[int, list[int], int]:
    """What was foretold of a call, what three runs of it request on this rank, and what it exchanges at most."""
    ctx = ds.build_context(part, nccl(), **PLAN)
    foretold = ds.workspace_bytes(ctx, **HEADS, backend="hopper", **call)
    run = calling(ctx, torch.Generator().manual_seed(seed), call)
    run()  # what is made once is there
    exchanged = ds.comm_bytes(
        ctx, **HEADS, **{k: call[k] for k in ("exchange", "boundary_mode", "save_transfer") if k in call}
    )
    twice = 2 * sum(sum(exchanged[name]) for name in exchanged if "halo" not in name)  # a checkpoint exchanges again
    return foretold, [requested(run, "cuda") for _ in range(3)], twice


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_memory_is_as_foretold(rng: torch.Generator, world_size: int, call: dict[str, Any]) -> None:
    """While it is recorded, and from its recording; but for what is exchanged, which torch holds over NCCL until it
    notices that a collective has ended: sooner or later from run to run."""
    part = split([0, 1300, 1300, 1370, 2270], world_size, "zigzag", rng)
    for foretold, runs, exchanged in gloo(world_size).run(memory, rng.initial_seed(), part, call):
        assert all(abs(run - foretold) <= exchanged for run in runs), (runs, foretold, exchanged)
        assert exchanged or runs == [foretold] * 3
