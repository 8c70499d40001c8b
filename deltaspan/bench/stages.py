"""What each stage of the Hopper tier takes of a device, beside what it must move and compute.

    python -m deltaspan.bench.stages [--shards NAMES] [--heads H,HV] [--segments P] [--json FILE]

Each is captured in a CUDA graph, in turns with the others. Before that the results of walks and maps are compared with
FP64; those of prep are in `deltaspan.bench.kernels`, those of the chain by tests alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import deltaspan as ds
from deltaspan.bench.facts import commit, end_without_hopper, machine, versions
from deltaspan.bench.kernels import graph_times
from deltaspan.bench.operands import DECAYS, HEAD_DIM, Operands, draw
from deltaspan.bench.shards import LOCAL_SHARDS, Shard, local_shard
from deltaspan.kernels import select
from deltaspan.kernels.stages import Runs
from deltaspan.op.segments import Segments
from deltaspan.plan import CHUNK, rank_chunks
from deltaspan.plan.cost import makespans
from deltaspan.reference import chunked_gated_delta_rule

HEADS = (16, 48)
TENSOR_CORES, MEMORY = 770e12, 4.2e12  # FLOP/s and bytes/s, measured on an H200
BOUND = 8e-3  # relative RMS against FP64: some ten roundings to bf16, as in the tests of stages

LARGE, MIDDLE, SMALL = (2 * n for n in (HEAD_DIM * HEAD_DIM, CHUNK * HEAD_DIM, CHUNK * CHUNK))
"""FLOP a token of products with the state, of a chunk's rows with keys, and within a chunk."""

STATE = 2 * HEAD_DIM * HEAD_DIM // CHUNK
"""Bytes a token of a bf16 state a chunk."""


class Count(NamedTuple):
    """A token of a value head's."""

    flop: int
    own: int  # bytes
    of_keys: int = 0  # bytes that the value heads of a key head share


COUNTS = {
    "prep": Count(MIDDLE // 2, 4 + 4 + 2 * CHUNK + 4, 2 * HEAD_DIM),
    "walk": Count(3 * LARGE + 3 * MIDDLE + SMALL, 4 * HEAD_DIM + 2 * CHUNK + 4, 4 * HEAD_DIM),
    "walk on halves": Count(3 * LARGE + 5 * MIDDLE + 2 * SMALL, 4 * HEAD_DIM + 2 * CHUNK + 4, 4 * HEAD_DIM),
    "exit states": Count(2 * LARGE + MIDDLE, 2 * HEAD_DIM + 2 * CHUNK + 4, 2 * HEAD_DIM),
    "maps": Count(4 * LARGE + MIDDLE, 2 * CHUNK, 2 * HEAD_DIM),
    "adjoint walk": Count(3 * LARGE + 3 * MIDDLE, 2 * HEAD_DIM + 2 * CHUNK + 4 + STATE, 4 * HEAD_DIM),
    "adjoint walk on halves": Count(3 * LARGE + 6 * MIDDLE, 2 * HEAD_DIM + 2 * CHUNK + 4 + STATE, 4 * HEAD_DIM),
    "entry adjoints": Count(3 * LARGE + 3 * MIDDLE, 2 * HEAD_DIM + 2 * CHUNK + 4, 4 * HEAD_DIM),
    "states of chunks": Count(2 * LARGE + MIDDLE, 2 * HEAD_DIM + 2 * CHUNK + 4 + STATE, 2 * HEAD_DIM),
    "gradients": Count(
        6 * LARGE + 8 * MIDDLE + 2 * SMALL, 3 * 2 * HEAD_DIM + 2 * CHUNK + 4 * 4 + 2 * STATE, 8 * HEAD_DIM
    ),
}
"""Of stages whose work is that of their tokens. What decays away is not walked: then less is done than is counted."""
WALKS = {
    "walk": 1,
    "walk on halves": 2,
    "exit states": 1,
    "maps": 1,
    "adjoint walk": 1,
    "adjoint walk on halves": 2,
    "entry adjoints": 1,
    "states of chunks": 1,
}
"""Programs a segment and value head."""


class Problem:
    """A local shard in so many segments, its stages as calls."""

    def __init__(self, shard: Shard, heads: tuple[int, int], decay: str, segments: int, device: str, seed: int) -> None:
        self.heads, self.tokens = heads, shard.part.total_tokens
        ctx = ds.build_context(shard.part, device=device)
        (self.view,), self.tier = ctx._views, select.tier("hopper")
        self.cut: Segments = ctx._cut(self.view, heads[1], segments)
        self.x: Operands = draw(self.tokens, heads, decay, device=device, seed=seed)
        self.states = torch.randn(self.cut.count, heads[1], HEAD_DIM, HEAD_DIM, device=device)
        self.leaving = torch.randn_like(self.states)
        self.tape = self.prep()
        like = *self.tape[:3], *(self.tape.beta.new_empty(self.tape.beta.shape, dtype=torch.float32) for _ in range(2))
        self.found = tuple(map(torch.empty_like, like))
        self.adjoint = self.tier.adjoint_prep(self.tape, self.x.do[0])
        self.walked = self.chunk_states(), self.tier.adjoint_walk(self.adjoint, self.cut.every, self.leaving)[1]

    def prep(self) -> Any:
        operands = (t[0] for t in self.x[:5])
        return self.tier.prep(*operands, self.view.grid, scale=HEAD_DIM**-0.5, unit_keys=True)

    def every(self, *, halves: bool) -> Runs:
        """All of them on halves of V, or none."""
        return self.cut.every._replace(whole=lambda heads: 0 if halves else self.cut.count * heads)

    def walk(self, halves: bool) -> Tensor:
        return self.tier.walk(self.tape, self.every(halves=halves), self.states, output=True, exits=False)[0]

    def exits(self) -> Tensor:
        """Of every segment, so that a shard in one piece has some to show."""
        return self.tier.exit_states(self.tape, self.every(halves=False), self.states)

    def chunk_states(self) -> Tensor:
        """Of every chunk, as a backward wants them."""
        return self.tier.chunk_states(self.tape, self.cut.every, self.states)

    def gradients(self) -> tuple[Tensor, ...]:
        self.tier.gradients(self.adjoint, *self.walked, self.found)
        return self.found

    def maps(self) -> Tensor:
        return self.tier.transfer(self.tape, self.cut.every)

    def walk_back(self, halves: bool) -> Tensor:
        return self.tier.adjoint_walk(self.adjoint, self.every(halves=halves), self.leaving)[0]

    def entry_adjoints(self) -> Tensor:
        return self.tier.adjoint_summary(self.adjoint, self.every(halves=False), self.leaving)

    def calls(self) -> dict[str, Callable[[], object]]:
        stages = {
            "prep": self.prep, "walk": partial(self.walk, False), "walk on halves": partial(self.walk, True),
            "exit states": self.exits, "maps": self.maps, "adjoint walk": partial(self.walk_back, False),
            "adjoint walk on halves": partial(self.walk_back, True), "entry adjoints": self.entry_adjoints,
            "states of chunks": self.chunk_states, "gradients": self.gradients,
        }  # fmt: skip
        if self.cut.forward.composes and len(self.cut.left.order):
            M = self.tier.transfer(self.tape, self.cut.through)
            b = self.tier.exit_states(self.tape, self.cut.left, self.states)
            stages["chain"] = partial(self.tier.chain, M, b, self.cut.forward.chains, maps=False)
        return stages

    def errors(self) -> dict[str, float]:
        """Relative RMS against FP64 of the first key head's value heads in the longest segment."""
        begin, end, _, entry, place = self.cut.every.table[0].tolist()
        left = self.cut.every.back[0, 3].item()
        group = self.heads[1] // self.heads[0]
        q, k = (t[:, begin:end, :1].double() for t in self.x[:2])
        v, g, beta = (t[:, begin:end, :group].double() for t in self.x[2:5])
        truth = partial(chunked_gated_delta_rule, cu_seqlens=[0, end - begin])
        state, leaving = (t[None, :group].double() for t in (self.states[entry], self.leaving[left]))
        o, exit = truth(q, k, v.requires_grad_(), g.requires_grad_(), beta, initial_state=state.requires_grad_())
        loss = (o * self.x.do[:, begin:end, :group]).sum() + (exit * leaving).sum()
        entering, dv, dg = torch.autograd.grad(loss, (state, v, g))
        unit = torch.eye(HEAD_DIM, dtype=torch.float64, device=v.device).expand(1, group, -1, -1)
        _, M = truth(q, k, torch.zeros_like(v), g, beta, initial_state=unit)

        whole = (end - begin - 1) // CHUNK * CHUNK  # tokens before the last chunk
        before = state
        if whole:
            before = truth(*(t[:, :whole] for t in (q, k, v, g, beta)), cu_seqlens=[0, whole], initial_state=state)[1]
        last = self.cut.every.table[0, 2].item() + whole // CHUNK

        def relative(found: Tensor, truth: Tensor) -> float:
            return ((found.double() - truth).norm() / truth.norm().clamp(min=1e-30)).item()

        def of_state(found: Tensor, truth: Tensor) -> float:
            return relative(found[place, :group], truth[0])

        return {
            "walk": relative(self.walk(False)[begin:end, :group], o[0]),
            "walk on halves": relative(self.walk(True)[begin:end, :group], o[0]),
            "exit states": of_state(self.exits(), exit),
            "maps": of_state(self.maps(), M),
            "adjoint walk": of_state(self.walk_back(False), entering),
            "adjoint walk on halves": of_state(self.walk_back(True), entering),
            "entry adjoints": of_state(self.entry_adjoints(), entering),
            "states of chunks": relative(self.chunk_states()[last, :group].mT, before[0].detach()),
            "gradients": max(
                relative(found[begin:end, :group], true[0])
                for found, true in zip(self.gradients()[2:4], (dv, dg), strict=True)
            ),
        }


def stage_rows(
    shard: Shard,
    heads: tuple[int, int],
    decay: str,
    segments: int,
    *,
    sm_count: int,
    device: str = "cuda",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A row for each stage: its time, its floor by count and the ceiling that sets it; of walks, a chunk's step too."""
    problem = Problem(shard, heads, decay, segments, device, seed)
    errors, calls = problem.errors(), problem.calls()
    (rank,) = rank_chunks(shard.part)
    rows = []
    for (name, _), ms in zip(calls.items(), graph_times(*calls.values()), strict=True):
        row = {"stage": name, "shard": shard.name, "heads": heads, "decay": decay, "segments": segments, "ms": ms}
        if name in COUNTS:
            count, token_heads = COUNTS[name], problem.tokens * heads[1]
            moved = (count.own + count.of_keys * heads[0] / heads[1]) * token_heads
            floors = {"tensor cores": 1e3 * count.flop * token_heads / TENSOR_CORES, "memory": 1e3 * moved / MEMORY}
            bound = max(floors, key=floors.__getitem__)
            row |= {"gflop": count.flop * token_heads / 1e9, "gigabytes": moved / 1e9, "floor_ms": floors[bound]}
            row |= {"floor": bound}
        if name in WALKS:
            _, steps = makespans(rank, segments, heads[1] * WALKS[name], sm_count)
            row |= {"step_us": 1e3 * ms / steps, "error": errors[name], "ok": errors[name] <= BOUND}
        rows.append(row)
    return rows


def table(record: dict[str, Any]) -> Table:
    shown = Table("stage", "shard", "heads", "decay", "P", "ms", "floor ms", "of", "share", "us a step", "error")
    for row in record["rows"]:
        floor = row.get("floor_ms")
        counted = ("", "", "") if floor is None else (f"{floor:.3f}", row["floor"], f"{floor / row['ms']:.0%}")
        walked = (f"{row['step_us']:.2f}", f"{row['error']:.1e}") if "step_us" in row else ("", "")
        heads = f"{row['heads'][0]}, {row['heads'][1]}"
        shown.add_row(
            row["stage"], row["shard"], heads, row["decay"], str(row["segments"]), f"{row['ms']:.3f}", *counted, *walked
        )  # fmt: skip
    return shown


def main(
    shards: Annotated[str, typer.Option(help="all, or names of local shards, with commas between.")] = "P4/2,P4/16",
    heads: Annotated[str, typer.Option(help="Key and value heads, with a comma between.")] = "16,48",
    segments: Annotated[int, typer.Option(help="Into which every document is cut.")] = 11,
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the record to a file.")] = None,
) -> None:
    """Time each stage against its floor."""
    names = list(LOCAL_SHARDS) if shards == "all" else shards.split(",")
    try:
        chosen = [local_shard(name) for name in names]
        counts = [int(n) if n.isdecimal() else 0 for n in heads.split(",")]
        if len(counts) != 2 or min(counts) < 1 or counts[1] % counts[0]:
            raise ValueError(f"heads must be key heads and a multiple of them, such as 16,48, got {heads!r}")
    except ValueError as error:
        typer.echo(f"error: --{error}", err=True)
        raise typer.Exit(2) from None
    end_without_hopper()
    facts = machine("cuda")
    rows = [
        row
        for shard in chosen
        for decay in DECAYS
        for row in stage_rows(shard, tuple(counts), decay, segments, sm_count=facts["sm_count"])
    ]
    record = {"machine": facts, "versions": versions([]), "commit": commit(), "rows": rows}
    Console(width=160).print(table(record))
    if json_to is not None:
        json_to.write_text(json.dumps(record) + "\n", encoding="utf-8")
    raise typer.Exit(0 if all(row.get("ok", True) for row in rows) else 1)


if __name__ == "__main__":
    typer.run(main)
