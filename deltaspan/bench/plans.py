"""What a chunk's step of each walk costs on this GPU, and which step costs give the planner the better plans there.

    python -m deltaspan.bench.plans [--json FILE]

Steps are timed by kernel on one shard. Then every pack x CP x layout is planned by the default rule with the published
costs and with those just measured; where the plans differ, each rank's forward is timed under both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

import deltaspan as ds
from deltaspan.bench.facts import commit, end_without_hopper, machine, versions
from deltaspan.bench.kernels import graph_times
from deltaspan.bench.operands import DECAYS, Operands, draw
from deltaspan.bench.shards import local_shard
from deltaspan.bench.stages import stage_rows
from deltaspan.layout import LAYOUTS
from deltaspan.plan import DEFAULT_RULE, RULES, rank_chunks
from deltaspan.plan.cost import RankChunks, StepCosts
from deltaspan.plan.rules import PUBLISHED_COSTS, Target

HEADS = (16, 48)
PACKS = ("P1", "P2", "P3", "P4", "P5")
CPS = (2, 4, 8, 16)
STEPS_SHARD, STEPS_SEGMENTS = "P4/4", 11  # four waves of walks, as long as a plan would make them
UNIT_MS = 1e-5  # of step costs, 10 ns


class Row(NamedTuple):
    """A batch over ranks of which at least one is cut otherwise by the two plans."""

    name: str
    lengths: list[list[int]]  # by rank, of its fragments, in tokens
    published: list[int]
    measured: list[int]


def step_costs(decay: str, *, sm_count: int, seed: int = 0) -> StepCosts:
    """Measured: time of a walk over the chunks that the busiest multiprocessor walks, one after another."""
    made = stage_rows(local_shard(STEPS_SHARD), HEADS, decay, STEPS_SEGMENTS, sm_count=sm_count, seed=seed)
    rows = {row["stage"]: row for row in made}
    ms = [rows[name]["step_us"] / 1e3 for name in ("walk", "maps", "exit states")]
    ms.append(rows["chain"]["ms"] / (STEPS_SEGMENTS - 2))
    return StepCosts(*(max(1, round(cost / UNIT_MS)) for cost in ms), compose_weight=1)


def differing(
    packs: Mapping[str, Sequence[int]], cps: Sequence[int], costs: StepCosts, *, hv: int, sm_count: int
) -> tuple[list[Row], int]:
    """The batches that the two step costs cut differently, and how many there are in all."""
    rows, count = [], 0
    for name, lengths in packs.items():
        for cp in cps:
            for layout in LAYOUTS:
                part = ds.partition([0, *accumulate(lengths)], cp, layout=layout)
                ranks = rank_chunks(part)
                plans = [_plan(ranks, Target(hv, sm_count, of)) for of in (PUBLISHED_COSTS, costs)]
                count += 1
                if plans[0] != plans[1]:
                    own = [part.table.length[part.rows(rank)].tolist() for rank in range(cp)]
                    rows.append(Row(f"{name} CP{cp} {layout}", [[n for n in of if n] for of in own], *plans))
    return rows, count


def _plan(ranks: list[RankChunks], to: Target) -> list[int]:
    different = list(dict.fromkeys(ranks))
    cut = dict(zip(different, RULES[DEFAULT_RULE].choose(different, to), strict=True))
    return [cut[rank] for rank in ranks]


def report(packs: Mapping[str, Sequence[int]], cps: Sequence[int] = CPS, *, seed: int = 0) -> dict[str, Any]:
    """The costs in both regimes of decay; with those of the first, by row the slowest rank's forward under both plans,
    in both regimes."""
    facts = machine("cuda")
    sm_count = facts["sm_count"]
    costs = {decay: step_costs(decay, sm_count=sm_count, seed=seed) for decay in DECAYS}
    rows, count = differing(packs, cps, costs[DECAYS[0]], hv=HEADS[1], sm_count=sm_count)
    most = max((sum(of) for row in rows for of in row.lengths), default=0)
    timed = [row._asdict() | {"ms": {}} for row in rows]
    for decay in DECAYS:
        x = draw(most, HEADS, decay, device="cuda", seed=seed)

        @lru_cache  # ranks that hold alike take as long
        def forward_ms(lengths: tuple[int, ...], segments: int, x: Operands = x) -> float:
            return _forward_ms(lengths, segments, x)

        for row, record in zip(rows, timed, strict=True):
            plans = {"published": row.published, "measured": row.measured}
            record["ms"][decay] = {
                name: [forward_ms(tuple(of), cut) for of, cut in zip(row.lengths, plan, strict=True)]
                for name, plan in plans.items()
            }
    return {
        "machine": facts, "versions": versions([]), "commit": commit(), "heads": HEADS, "rows": timed, "batches": count,
        "costs": {decay: of._asdict() for decay, of in costs.items()}, "published_costs": PUBLISHED_COSTS._asdict(),
    }  # fmt: skip


def _forward_ms(lengths: tuple[int, ...], segments: int, x: Operands) -> float:
    """Of one rank by itself, its fragments as documents."""
    tokens = sum(lengths)
    ctx = ds.build_context(ds.partition([0, *accumulate(lengths)], 1), device="cuda")
    given = [t[:, :tokens] for t in x[:5]]
    with torch.no_grad():
        (ms,) = graph_times(
            partial(ds.chunk_gated_delta_rule, *given, ctx, backend="hopper", segments=min(segments, _most(lengths)))
        )
    return ms


def _most(lengths: Sequence[int]) -> int:
    return max(1, -(-max(lengths, default=0) // 64))


def table(record: Mapping[str, Any]) -> Iterator[Table | str]:
    for decay, costs in record["costs"].items():
        yield f"{decay}: " + ", ".join(f"{name} {cost}" for name, cost in costs.items()) + " (10 ns)"
    shown = Table("batch", "published plan", "measured plan", *(f"{d}, ms" for d in DECAYS))
    for row in record["rows"]:
        slowest = [[max(row["ms"][d][name]) for name in ("published", "measured")] for d in DECAYS]
        cells = (f"{before:.2f} -> {after:.2f} ({after / before:.2f})" for before, after in slowest)
        shown.add_row(row["name"], str(row["published"]), str(row["measured"]), *cells)
    yield shown
    yield f"{len(record['rows'])} of {record['batches']} batches are planned differently"


def main(
    packs: Annotated[str, typer.Option(help="Names of packs, with commas between.")] = ",".join(PACKS),
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the record to a file.")] = None,
) -> None:
    """Measure step costs and compare the plans that follow from them."""
    known = json.loads(files("deltaspan").joinpath("data/packs.json").read_text(encoding="utf-8"))["packs"]
    if unknown := set(packs.split(",")) - known.keys():
        typer.echo(f"error: --packs: unknown {min(unknown)!r}; known are {', '.join(known)}", err=True)
        raise typer.Exit(2)
    end_without_hopper()
    record = report({name: known[name] for name in packs.split(",")})
    Console(width=160).print(*table(record), sep="\n")
    if json_to is not None:
        json_to.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
