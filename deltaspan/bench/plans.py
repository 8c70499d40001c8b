"""What a chunk's step of each walk costs on this GPU, and which step costs give the planner the better plans there.

    python -m deltaspan.bench.plans [--packs NAMES] [--json FILE]

Steps are timed by kernel on one shard. Then every local shard and every pack x CP x layout is planned by `row_cost_lpt`
with the published costs and with those just measured, and by `least_time` with its own. The forward of the rank that
takes longest by its plan under moderate decay is timed under each, without the other ranks but with the summaries that
they would want.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

import deltaspan as ds
from deltaspan.bench.facts import commit, end_without_hopper, machine, versions
from deltaspan.bench.kernels import graph_times
from deltaspan.bench.operands import DECAYS, Operands, draw
from deltaspan.bench.shards import LOCAL_SHARDS, local_shard
from deltaspan.bench.stages import stage_rows
from deltaspan.layout import LAYOUTS, Partition
from deltaspan.plan import HOPPER_RULE, RULES, Cut, in_words, rank_chunks
from deltaspan.plan.cost import RankChunks, StepCosts
from deltaspan.plan.rules import PUBLISHED_COSTS, Target
from deltaspan.plan.step_time import H200_TIMES, forward_time

HEADS = (16, 48)
PACKS = ("P1", "P2", "P3", "P4", "P5")
CPS = (2, 4, 8, 16)
STEPS_SHARD, STEPS_SEGMENTS = "P4/4", 11  # four waves of walks, as long as a plan would make them
UNIT_MS = 1e-5  # of step costs, 10 ns
ROUNDS, REPEATS = 5, 2  # of some 250 forwards, so that all take half a minute
PUBLISHED = "published"


class Row(NamedTuple):
    """A batch over ranks, and how it is planned."""

    name: str
    part: Partition
    plans: dict[str, list[Cut]]  # by what it reckons with
    slowest: dict[str, int]  # the rank that takes longest by each plan


def step_costs(decay: str, *, sm_count: int, seed: int = 0) -> StepCosts:
    """Measured: time of a walk over the chunks that the busiest multiprocessor walks, one after another."""
    made = stage_rows(local_shard(STEPS_SHARD), HEADS, decay, STEPS_SEGMENTS, sm_count=sm_count, seed=seed)
    rows = {row["stage"]: row for row in made}
    ms = [rows[name]["step_us"] / 1e3 for name in ("walk", "maps", "exit states")]
    ms.append(rows["chain"]["ms"] / (STEPS_SEGMENTS - 2))
    return StepCosts(*(max(1, round(cost / UNIT_MS)) for cost in ms), compose_weight=1)


def batches(packs: Mapping[str, Sequence[int]], cps: Sequence[int]) -> Iterator[tuple[str, Partition]]:
    for name in LOCAL_SHARDS:
        yield name, local_shard(name).part
    for name, lengths in packs.items():
        for cp in cps:
            for layout in LAYOUTS:
                yield f"{name} CP{cp} {layout}", ds.partition([0, *accumulate(lengths)], cp, layout=layout)


def planned(
    packs: Mapping[str, Sequence[int]], cps: Sequence[int], costs: Mapping[str, StepCosts], *, hv: int, sm_count: int
) -> Iterator[Row]:
    """Every batch, cut by `row_cost_lpt` with each of the costs and by `least_time`."""
    for name, part in batches(packs, cps):
        ranks = rank_chunks(part)
        plans = {of: _plan(ranks, "row_cost_lpt", Target(hv, sm_count, cost)) for of, cost in costs.items()}
        plans[HOPPER_RULE] = _plan(ranks, HOPPER_RULE, Target(hv, sm_count, H200_TIMES))
        yield Row(name, part, plans, {of: _slowest(ranks, plan, hv, sm_count) for of, plan in plans.items()})


def _plan(ranks: list[RankChunks], rule: str, to: Target) -> list[Cut]:
    different = list(dict.fromkeys(ranks))
    cut = dict(zip(different, RULES[rule].choose(different, to), strict=True))
    return [cut[rank] for rank in ranks]


def _slowest(ranks: list[RankChunks], plan: list[Cut], hv: int, sm_count: int) -> int:
    times = [forward_time(rank, cut, hv, sm_count, H200_TIMES) for rank, cut in zip(ranks, plan, strict=True)]
    return times.index(max(times))  # under moderate decay


def report(packs: Mapping[str, Sequence[int]], cps: Sequence[int] = CPS, *, seed: int = 0) -> dict[str, Any]:
    """The costs in both regimes of decay, every row's plans, and the slowest rank's forward in both regimes under the
    published costs, under those of the regime, and by `least_time`."""
    facts = machine("cuda")
    sm_count = facts["sm_count"]
    costs = {PUBLISHED: PUBLISHED_COSTS, **{decay: step_costs(decay, sm_count=sm_count, seed=seed) for decay in DECAYS}}
    rows = list(planned(packs, cps, costs, hv=HEADS[1], sm_count=sm_count))
    alone = [{rank: on_one_rank(row.part, rank) for rank in row.slowest.values()} for row in rows]
    most = max(part.total_tokens for of in alone for part in of.values())
    made = [{"name": row.name, "plans": row.plans, "slowest": row.slowest, "ms": {}} for row in rows]
    for decay in DECAYS:
        x = draw(most, HEADS, decay, device="cuda", seed=seed)
        for row, parts, record in zip(rows, alone, made, strict=True):
            record["ms"][decay] = _forward_ms(row, parts, (PUBLISHED, decay, HOPPER_RULE), x)
    return {
        "machine": facts, "versions": versions([]), "commit": commit(), "heads": HEADS, "rows": made,
        "costs": {of: cost._asdict() for of, cost in costs.items()} | {HOPPER_RULE: H200_TIMES._asdict()},
    }  # fmt: skip


def on_one_rank(part: Partition, rank: int) -> Partition:
    """A rank's fragments as those of one rank that has to summarise what it has to: where state enters a fragment or
    leaves it, a fragment of one token stands before or behind."""
    rows = part.rows(rank)
    ends = (column[rows].tolist() for column in (part.table.length, part.crossing_in, part.crossing_out))
    documents = [[1] * enters + [n] + [1] * leaves for n, enters, leaves in zip(*ends, strict=True)]
    fragments = [
        (doc, stop - n, n)
        for doc, lengths in enumerate(documents)
        for n, stop in zip(lengths, accumulate(lengths), strict=True)
    ]
    return ds.partition([0, *accumulate(map(sum, documents))], 1, fragments=[fragments])


def _forward_ms(row: Row, parts: Mapping[int, Partition], plans: Sequence[str], x: Operands) -> dict[str, float]:
    """By plan; what two plans have in common is timed once."""
    wanted = {of: (row.slowest[of], row.plans[of][row.slowest[of]]) for of in plans}
    calls = {
        (rank, segments): partial(_forward, ds.build_context(parts[rank], device="cuda"), segments, x)
        for rank, segments in wanted.values()
    }
    with torch.no_grad():
        taken = graph_times(*calls.values(), rounds=ROUNDS, repeats=REPEATS)
    found = dict(zip(calls, taken, strict=True))
    return {of: found[one] for of, one in wanted.items()}


def _forward(ctx: ds.Context, segments: Cut, x: Operands, backend: str = "hopper") -> torch.Tensor:
    given = (t[:, : ctx.tokens] for t in x[:5])
    return ds.chunk_gated_delta_rule(*given, ctx, backend=backend, segments=segments)[0]


def table(record: Mapping[str, Any]) -> Iterator[Table | str]:
    rows = record["rows"]
    for of, costs in record["costs"].items():
        yield f"{of}: " + ", ".join(f"{name} {cost}" for name, cost in costs.items()) + " (10 ns)"
    view = Table("batch", *record["costs"], *(f"{d}, ms: {PUBLISHED}, measured, {HOPPER_RULE}" for d in DECAYS))
    for row in rows:
        times = (" ".join(f"{row['ms'][d][of]:.2f}" for of in (PUBLISHED, d, HOPPER_RULE)) for d in DECAYS)
        view.add_row(row["name"], *(_short(row["plans"][of]) for of in record["costs"]), *times)
    yield view
    for decay in DECAYS:
        for of in (decay, HOPPER_RULE):
            mean = fmean(row["ms"][decay][of] / row["ms"][decay][PUBLISHED] for row in rows)
            yield f"{decay} decay, time of the plans by {of} / {PUBLISHED}, mean of {len(rows)} rows: {mean:.3f}"


def _short(plan: Sequence[Cut | list[int]]) -> str:
    cuts = [in_words(cut) for cut in plan]
    return cuts[0] if len(set(cuts)) == 1 else " ".join(cuts)


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
