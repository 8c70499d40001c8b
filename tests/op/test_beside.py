"""Work beside an exchange: the same bits as after it, and nothing of it reads what the exchange brings."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import deltaspan as ds
from deltaspan.exchange import EXCHANGES, Beside, Program
from deltaspan.exchange.collectives import Ongoing
from deltaspan.op import segments
from tests.helpers import same_bits
from tests.op.hopper import drawn
from tests.op.support import LAYOUTS, Pack, draw, run_rule, split

LENGTHS = [200, 30, 0, 300, 1, 150]
PLAN = {"p_rule": "occ", "sm_count": 12}  # a few segments a fragment


class Late(ds.SimulatedGroup):
    """Ranks that carry out an exchange when it is waited for; until then nothing of it is there."""

    def run(self, programs: Sequence[Program]) -> list[Any]:
        return super().run([*map(late, programs)])


def late(program: Program) -> Program:
    arrived = None
    while True:
        try:
            asked = program.send(arrived)
        except StopIteration as end:
            return end.value
        if isinstance(asked, Beside):
            arrived = Ongoing(asked)
        elif isinstance(asked, Ongoing):
            arrived = yield from asked.result.program(*asked.result.operands)
        else:
            arrived = yield asked


class After(ds.SimulatedGroup):
    beside = False


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every rank divides its walk if it can, however little that gains; says for each whether it did."""
    ranks: list[bool] = []

    def ahead(part: ds.Partition, rank: int, table: Any, **_: Any) -> np.ndarray:
        free = ~part.crossing_in[part.rows(rank)][table.fragment]
        ranks.append(bool(free.any() and not free.all()))
        return free

    monkeypatch.setattr(segments, "walked_ahead", ahead)
    return ranks


def different(pack: Pack, part: ds.Partition, group: ds.SimulatedGroup, call: Any, device: str = "cpu") -> list:
    """Results whose bits depend on whether work is done beside the exchange."""
    contexts = (ds.build_context(part, g, device=device, **PLAN) for g in (group, After(part.world_size)))
    found, expected = map(call, contexts)
    return [
        (r, n) for r, (a, b) in enumerate(zip(found, expected, strict=True)) for n in b if not same_bits(a[n], b[n])
    ]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits(rng: torch.Generator, divided: list[bool], layout: str, exchange: str) -> None:
    pack = draw(rng, LENGTHS).to(torch.float32)
    part = split(pack.cu_seqlens, 3, layout, rng)
    ways = ({}, {"boundary_mode": "replay"}, {"save_mode": "full"})
    for options in ways:
        call = partial(run_rule, pack, exchange=exchange, **options)
        assert different(pack, part, Late(3), call) == []
    assert any(divided)


def test_the_hopper_tier(hopper: str, rng: torch.Generator, divided: list[bool]) -> None:
    pack = drawn(rng, [100, 70], hopper, H=2, HV=2)  # rank 1 cuts the second document, and begins in the first
    part = ds.partition(pack.cu_seqlens, 2)

    def call(ctx: ds.Context) -> list[dict[str, Tensor]]:
        return run_rule(pack, ctx, backend="hopper", segments=2)

    assert different(pack, part, Late(2), call, hopper) == [] and divided[1:2] == [True]


class Silent(ds.SimulatedGroup):
    """Ranks that may ask for nothing."""

    def run(self, programs: Sequence[Program]) -> list[Any]:
        return [silent(program) for program in programs]


def silent(program: Program) -> Any:
    with pytest.raises(StopIteration) as ended:
        pytest.fail(f"asked for {next(program)}")
    return ended.value.value


@pytest.mark.parametrize("segments", [1, 2])
def test_nobody_asks_where_nothing_crosses(rng: torch.Generator, segments: int) -> None:
    pack = draw(rng, [130, 200]).to(torch.float32)
    part = ds.partition(pack.cu_seqlens, 2, fragments=[[(0, 0, 130)], [(1, 0, 200)]])
    ctx, alike = ds.build_context(part, ds.SimulatedGroup(2)), ds.build_context(part, ds.SimulatedGroup(2))
    object.__setattr__(ctx, "_transport", Silent(2))
    found, expected = (run_rule(pack, c, segments=segments) for c in (ctx, alike))
    assert all(same_bits(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in b)
