"""A checkpointed step with its collectives as one CUDA graph; and the wire by itself, by graphs of collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import deltaspan as ds
from deltaspan.bench.group.launch import Member
from deltaspan.bench.group.steps import Asked, real, timed
from deltaspan.bench.operands import Operands, Results, draw
from deltaspan.exchange import EXCHANGES, AllGather, AllToAll, PeerToPeer, Program, transport
from deltaspan.exchange.collectives import Collective
from deltaspan.layout import LAYOUTS
from deltaspan.verify.checks import same_bits

NOT_RUN = "CUDA graphs of collectives need NCCL"
REPEATS = 10  # of a collective in a graph
SIZES = tuple(1 << n for n in range(14, 28, 2))  # bytes that a rank sends each other one


def captured(
    member: Member, pack: str, lengths: list[int], asked: Asked, tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """By layout and exchange: whether a replayed step has the bits of an eager one, with new operands too; times."""
    cu_seqlens = [0, *accumulate(lengths)]
    draws = [
        draw(cu_seqlens[-1], asked.heads, asked.decay, device=str(member.device), seed=seed)
        for seed in (asked.seed, asked.seed + 1)
    ]
    for layout in LAYOUTS:
        part = ds.partition(cu_seqlens, member.world_size, layout=layout)
        for exchange in EXCHANGES:
            side = real(member, part, exchange, asked)
            given = [Operands(*map(side.ctx.shard, x)) for x in draws]
            row = {"pack": pack, "cp": member.world_size, "layout": layout, "exchange": exchange}
            row |= _replayed(member, side.step, given, asked.samples)
            tell(f"graph of a step, {layout}, {exchange}: {_told(row)}")
            yield row


def _replayed(
    member: Member, step: Callable[[Operands], Results], given: list[Operands], samples: int
) -> dict[str, Any]:
    x = Operands(*(t.clone() for t in given[0]))  # which the graph reads
    graph, found = capture(member, lambda: step(x))
    different = []
    for number, operands in enumerate((*given, given[0])):
        for place, t in zip(x, operands, strict=True):
            place.copy_(t)
        expected = [t.clone() for t in step(operands)]
        graph.replay()
        pairs = zip(Results._fields, found, expected, strict=True)
        different += [f"{name}, replay {number + 1}" for name, a, b in pairs if not same_bits(a, b)]
    times = timed(member, {"graph": graph.replay, "eager": lambda: step(x)}, samples)
    everywhere = {rank: names for rank, names in enumerate(member.gather(different)) if names}
    ms = {f"{name}_ms": round(median(map(max, zip(*of, strict=True))), 4) for name, of in times.items()}
    return {**ms, "bits": everywhere, "ok": not everywhere}


def capture(member: Member, call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of the call, and the results that its replays write to. All ranks capture together, each by itself."""
    for _ in range(2):  # connections, tables and kernels are made at first use
        call()
    member.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog may ask about events meanwhile
        found = call()
    member.settle()
    return graph, found


def _told(row: dict[str, Any]) -> str:
    if row["ok"]:
        return f"the same bits, {row['graph_ms']:.3f} ms, eager {row['eager_ms']:.3f}"
    return f"other bits: {row['bits']}"


def probed(member: Member, samples: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Milliseconds of every kind of collective by the bytes that a rank sends each other one, and the latency and rate
    that fit them best. On GPUs each sample is a graph of ten."""
    group, W = transport(dist.group.WORLD), member.world_size
    rows = []
    for size in SIZES:
        for kind in (AllToAll, PeerToPeer, AllGather):
            asked = _asked(kind, size, member)
            ms = _time_of(member, lambda asked=asked: group.run([_asking(asked)]), samples)
            rows.append({"collective": kind.__name__, "bytes": size * (W - 1), "ms": round(ms, 5)})
    fitted = {kind.__name__: _fit([r for r in rows if r["collective"] == kind.__name__])
              for kind in (AllToAll, PeerToPeer, AllGather)}  # fmt: skip
    tell("; ".join(f"{kind}: {fit['latency_us']} us, {fit['gb_per_s']} GB/s" for kind, fit in fitted.items()))
    return {"rows": rows, "fitted": fitted}


def _asked(kind: type[Collective], size: int, member: Member) -> Collective:
    W, own = member.world_size, member.rank
    if kind is AllGather:
        return AllGather("probe", torch.zeros(1, size, dtype=torch.uint8, device=member.device), (1,) * W)
    counts = tuple(int(peer != own) for peer in range(W))
    return kind("probe", torch.zeros(W - 1, size, dtype=torch.uint8, device=member.device), counts, counts)


def _asking(asked: Collective) -> Program[Any]:
    return (yield asked)


def _time_of(member: Member, call: Callable[[], Any], samples: int) -> float:
    if member.backend == "gloo":
        times = timed(member, {"call": call}, samples)["call"]
        return median(map(max, zip(*times, strict=True)))

    def several() -> list[Any]:
        return [call() for _ in range(REPEATS)]

    graph, found = capture(member, several)
    times = timed(member, {"call": graph.replay}, samples)["call"]
    del graph, found
    return median(map(max, zip(*times, strict=True))) / REPEATS


def _fit(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Of ms = latency + bytes / rate, each row's error beside its own time."""
    size, ms = (np.array([row[name] for row in rows], dtype=float) for name in ("bytes", "ms"))
    latency, per_byte = np.linalg.lstsq(np.stack([1 / ms, size / ms], axis=1), np.ones_like(ms), rcond=None)[0]
    return {"latency_us": round(1e3 * latency, 1), "gb_per_s": round(1 / per_byte / 1e6, 1) if per_byte > 0 else None}
