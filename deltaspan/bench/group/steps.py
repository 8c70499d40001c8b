"""Forward and checkpointed step of the whole group: the bits of simulated ranks, errors, and times beside a model.

The model of a row: what the slowest ranks compute between their collectives, as the ranks of a simulated group take it
on this device, and the wire by `deltaspan.plan.wire`. Ranks are in step: before each sample their devices meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import deltaspan as ds
from deltaspan.bench.check import Truth, objection
from deltaspan.bench.group.launch import Member
from deltaspan.bench.operands import HEAD_DIM, Operands, Results, draw
from deltaspan.bench.sides import Deltaspan, TimedGroup
from deltaspan.bench.timing import Phases, Samples, Stopwatch, interleave
from deltaspan.exchange import EXCHANGES
from deltaspan.layout import LAYOUTS, Partition
from deltaspan.plan import plan_segments, wire_time
from deltaspan.verify.checks import same_bits

PHASES = ("forward", "step")
BESIDE, AFTER = "beside", "after"  # whether work is done while states cross


class Asked(NamedTuple):
    """What all rows have in common."""

    heads: tuple[int, int]
    decay: str
    backend: str
    samples: int
    seed: int


class Alone(NamedTuple):
    """What simulated ranks gave on this device."""

    own: Results  # of this rank
    errors: dict[str, float]  # of all, on rank 0
    times: dict[str, Samples]  # by phase, without the wire


def measured(
    member: Member, packs: Mapping[str, Sequence[int]], asked: Asked, tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """A row for every pack, layout and exchange, the same on every rank."""
    for pack, lengths in packs.items():
        cu_seqlens = [0, *accumulate(lengths)]
        x = draw(cu_seqlens[-1], asked.heads, asked.decay, device=str(member.device), seed=asked.seed)
        truth = Truth.of(x, cu_seqlens) if member.rank == 0 else None
        for layout in LAYOUTS:
            part = ds.partition(cu_seqlens, member.world_size, layout=layout)
            alone = simulated(member, part, x, truth, asked)
            for exchange in EXCHANGES:
                row = {"pack": pack, "cp": member.world_size, "layout": layout, "exchange": exchange}
                row |= _row(member, part, x, exchange, alone, asked)
                tell(line(row))
                yield row


def simulated(member: Member, part: Partition, x: Operands, truth: Truth | None, asked: Asked) -> Alone:
    """All ranks on this device, timed between their collectives."""
    stopwatch = Stopwatch(member.device.type)
    group = TimedGroup(part.world_size, stopwatch)
    side = Deltaspan(ds.build_context(part, group, device=member.device), asked.backend)
    given = Operands(*map(side.ctx.shard, x))
    results = side.step(given)
    errors = {} if truth is None else {n: truth.error(n, side.whole(t)) for n, t in results._asdict().items()}
    own = Results(*(shards[member.rank].clone() for shards in results))
    del results
    calls = {what: partial(group.during, partial(getattr(side, what), given)) for what in PHASES}
    return Alone(own, errors, interleave(calls, stopwatch, asked.samples))


def _row(member: Member, part: Partition, x: Operands, exchange: str, alone: Alone, asked: Asked) -> dict[str, Any]:
    if member.device.type == "cuda":
        torch.cuda.empty_cache()
    usual, after = (real(member, part, exchange, asked, beside=wanted) for wanted in (True, False))
    given = Operands(*(usual.ctx.shard(t) for t in x))
    ways = {"checkpoint": usual, "recompute handle": Deltaspan(usual.ctx, asked.backend, exchange, handle=True)}
    sides = {AFTER: after}
    if usual.ctx._transport.beside:
        sides |= {BESIDE: usual}
        ways |= {"nothing beside": after}
    different = {name: found for name, side in ways.items() if (found := differing(side, given, alone.own))}
    everywhere = {rank: found for rank, found in enumerate(member.gather(different)) if found}
    times = timed(
        member, {f"{what} {name}": partial(getattr(side, what), given)
                 for what in PHASES for name, side in sides.items()}, asked.samples,
    )  # fmt: skip
    H, HV = asked.heads
    wire = wire_time(part, HV=HV, K=HEAD_DIM, V=HEAD_DIM, exchange=exchange)
    on_wire = {"forward": wire.forward, "step": 2 * wire.forward + wire.backward}  # the recompute exchanges again
    plan = plan_segments(part, hv=HV, sm_count=usual.ctx.sm_count, rule=usual.ctx.p_rule)
    errors = member.gather({n: e if math.isfinite(e) else "not finite" for n, e in alone.errors.items()})[0]
    off = member.gather(objection(alone.errors))[0]
    return {
        "tokens": [part.tokens(rank) for rank in range(part.world_size)],
        "segments": plan, "early": member.gather(_early(usual.ctx, HV)),
        "bytes": member.gather(ds.comm_bytes(usual.ctx, H=H, HV=HV, channels=0, exchange=exchange)),
        "errors": errors, "off": off, "bits": everywhere,
        **{what: _figures(what, times, alone.times[what], on_wire[what], member) for what in PHASES},
        "ok": off is None and not everywhere,
    }  # fmt: skip


def real(member: Member, part: Partition, exchange: str, asked: Asked, *, beside: bool = True) -> Deltaspan:
    """This rank's side of the group."""
    ctx = ds.build_context(part, dist.group.WORLD, device=member.device)
    if not beside:
        ctx._transport.beside = False  # before the first call divides anything
    return Deltaspan(ctx, asked.backend, exchange)


def differing(side: Deltaspan, given: Operands, expected: Results) -> list[str]:
    """Results of a step, and its forward's output, that do not have the bits of simulated ranks."""
    found = side.step(given)
    names = [n for n, a, b in zip(Results._fields, found, expected, strict=True) if not same_bits(a, b)]
    return names + ["forward"] * (not same_bits(side.forward(given), expected.o))


def timed(member: Member, calls: Mapping[str, Callable[[], Any]], samples: int) -> dict[str, list[list[float]]]:
    """Of every call, by name and rank: milliseconds of every sample, the calls in turns."""
    stopwatch = Stopwatch(member.device.type)

    def in_step(call: Callable[[], Any]) -> Phases:
        member.meet()
        return stopwatch.around(call)

    member.settle()
    taken = interleave({name: partial(in_step, call) for name, call in calls.items()}, stopwatch, samples)
    everyone = member.gather({name: samples.ms for name, samples in taken.items()})
    return {name: [of_rank[name] for of_rank in everyone] for name in calls}


def _early(ctx: ds.Context, hv: int) -> list[int]:
    """How many of a rank's segments are walked while states cross, and how many there are."""
    (view,) = ctx._views
    cut = ctx._cut(view, hv, None)
    return [0 if cut.early is None else cut.early.order.shape[0], cut.count]


def _figures(
    what: str, times: Mapping[str, list[list[float]]], alone: Samples, wire_ms: float, member: Member
) -> dict[str, Any]:
    """Of one phase. A time of the group is the median over samples of the slowest rank's; `ms` is None where nothing is
    done beside an exchange."""
    found = {name: times.get(f"{what} {name}") for name in (BESIDE, AFTER)}
    by_rank = found[BESIDE] or found[AFTER]
    ms, after_ms = (of and median(map(max, zip(*of, strict=True))) for of in found.values())
    local_ms = member.gather(alone.median)[0]
    spread = [Samples(of_rank).spread() for of_rank in by_rank]
    return {
        "ms": ms and _short(ms), "after_ms": _short(after_ms), "local_ms": _short(local_ms), "wire_ms": _short(wire_ms),
        "measured_to_model": _short(after_ms / (local_ms + wire_ms)),
        "ranks": [
            {"ms": _short(median(of_rank)), "spread": {name: _short(x) for name, x in of.items()}}
            for of_rank, of in zip(by_rank, spread, strict=True)
        ],
    }  # fmt: skip


def _short(value: float) -> float:
    return round(value, 4)


def line(row: Mapping[str, Any]) -> str:
    """What is told of a row as it is done."""
    trouble = [row["off"]] if row["off"] else []
    trouble += [f"rank {rank}, {way}: other bits in {', '.join(names)}"
                for rank, ways in row["bits"].items() for way, names in ways.items()]  # fmt: skip
    figures = ", ".join(
        f"{what} {row[what]['after_ms']:.3f} ms, model {row[what]['local_ms'] + row[what]['wire_ms']:.3f}"
        + (f", with work beside the exchange {ms:.3f}" if (ms := row[what]["ms"]) else "")
        for what in PHASES
    )
    return f"{row['pack']} CP{row['cp']} {row['layout']}, {row['exchange']}: {'; '.join([figures, *trouble])}"
