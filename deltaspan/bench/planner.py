"""How long a rank takes to lay out and plan a batch, and how that grows with ranks and with documents.

    taskset -c 0 python -m deltaspan.bench.planner --json FILE

Every rank does this for every batch, on one core, before its device has work. Times are of the processor, user's and
system's: the work is pure computation on one thread, and what else runs on the machine shall not count.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer

import deltaspan as ds
from deltaspan.bench.facts import commit
from deltaspan.layout import Partition, halo_plan
from deltaspan.plan import DEFAULT_RULE, chain_links, plan_segments, segment_table
from deltaspan.plan.cost import makespans

HV, SM_COUNT = 48, 132
REPEATS = 5
SEED = 0
SPREAD = 1.0  # of the logarithm of a document's length
TOKENS_PER_RANK = 32_768
WHOLE_DOCUMENTS, CUT_DOCUMENTS = 10_000, 500  # of 1,024 ranks; where each rank holds pieces of all there are fewer
MOST_RANKS = 1_024
CONV_TAPS = 4


@dataclass(frozen=True)
class Batch:
    """A random batch: documents of log-normal length, as long together as `ranks` times `tokens_per_rank`."""

    shows: str  # what the row is there for
    layout: str
    ranks: int
    documents: int
    tokens_per_rank: int = TOKENS_PER_RANK
    random_cuts: bool = False  # of every document, so that no two ranks hold alike

    def offsets(self) -> np.ndarray:
        """cu_seqlens, int64 [documents + 1]."""
        share = np.random.default_rng(SEED).lognormal(0, SPREAD, self.documents)
        lengths = np.rint(share / share.sum() * self.ranks * self.tokens_per_rank).astype(np.int64)
        return np.concatenate(([0], np.cumsum(np.maximum(lengths, 1))))

    def cut_points(self, offsets: np.ndarray) -> list[np.ndarray] | None:
        """2 * ranks + 1 offsets within each document, if they are random."""
        if not self.random_cuts:
            return None
        rng, inner = np.random.default_rng(SEED + 1), 2 * self.ranks - 1
        return [
            np.concatenate(([0], np.sort(rng.integers(0, length + 1, inner)), [length])) for length in np.diff(offsets)
        ]


def batches(most_ranks: int) -> Iterator[Batch]:
    """The largest batches, and how they are reached: documents a rank fixed, then ranks fixed."""
    whole, cut = (max(1, n * most_ranks // MOST_RANKS) for n in (WHOLE_DOCUMENTS, CUT_DOCUMENTS))
    few_long = max(1, 3 * most_ranks // 2)
    yield Batch("largest", "contiguous", most_ranks, whole)
    yield Batch("largest", "zigzag", most_ranks, whole)
    yield Batch("largest", "zigzag_per_document", most_ranks, cut)
    yield Batch("no two ranks alike", "zigzag_per_document", most_ranks, cut, random_cuts=True)
    for layout in ("contiguous", "zigzag"):
        yield Batch("few long fragments", layout, most_ranks, few_long, tokens_per_rank=4 * TOKENS_PER_RANK)
    for layout, documents in (("contiguous", whole), ("zigzag", whole), ("zigzag_per_document", cut)):
        for part in (16, 8, 4, 2, 1):
            yield Batch("ranks", layout, max(1, most_ranks // part), max(1, documents // part))
        for part in (64, 16, 4, 1):
            yield Batch("documents", layout, most_ranks, max(1, documents // part))


def measure(batch: Batch, repeats: int = REPEATS) -> dict[str, Any]:
    """One row of the record: the batch, its fragments, and medians in milliseconds of each step and of all."""
    offsets = batch.offsets()
    cut_points = batch.cut_points(offsets)

    def lay_out() -> Partition:
        return ds.partition(offsets, batch.ranks, batch.layout, cut_points=cut_points)

    part = lay_out()
    rank = int(np.argmax(np.diff(part.rank_rows)))  # the one with most fragments
    plan = plan_segments(part, hv=HV, sm_count=SM_COUNT)

    def choose() -> list[int]:
        makespans.cache_clear()  # the next batch is another one
        return plan_segments(part, hv=HV, sm_count=SM_COUNT)

    def tabulate() -> None:
        segment_table(part, rank, plan[rank])
        chain_links(part)
        halo_plan(part, CONV_TAPS, rank)

    seconds = [[_seconds(step) for step in (lay_out, choose, tabulate)] for _ in range(repeats)]
    steps = dict(zip(("partition_ms", "plan_ms", "tables_ms"), zip(*seconds, strict=True), strict=True))
    figures = {name: round(1e3 * median(times), 3) for name, times in steps.items()}
    return {
        **asdict(batch),
        "fragments": len(part.table),
        "segments_a_fragment": [min(plan), max(plan)],
        **figures,
        "total_ms": round(1e3 * median(map(sum, seconds)), 3),
    }


def record(most_ranks: int = MOST_RANKS, repeats: int = REPEATS) -> dict[str, Any]:
    """All rows, and what they hold for."""
    return {
        "machine": _machine(),
        "versions": {"deltaspan": ds.__version__, "numpy": np.__version__, "python": platform.python_version()},
        "commit": commit(),
        "settings": {
            "rule": DEFAULT_RULE,
            "hv": HV,
            "sm_count": SM_COUNT,
            "repeats": repeats,
            "seed": SEED,
            "spread": SPREAD,
            "conv_taps": CONV_TAPS,
        },
        "rows": [measure(batch, repeats) for batch in batches(most_ranks)],
    }


def table(made: dict[str, Any]) -> str:
    """The rows to read, as Markdown; times in milliseconds of the processor."""
    lines = [("shows", "layout", "ranks", "documents", "fragments", "partition", "plan", "tables", "all")]
    for row in made["rows"]:
        sizes = [f"{row[name]:,}" for name in ("ranks", "documents", "fragments")]
        times = [f"{row[name]:.1f}" for name in ("partition_ms", "plan_ms", "tables_ms", "total_ms")]
        lines.append((row["shows"], row["layout"], *sizes, *times))
    lines.insert(1, ("---", "---", *7 * ("---:",)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def _machine() -> dict[str, str | int]:
    cpus = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cpus
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.MULTILINE)
    return {
        "name": f"{cpus}-core-{platform.machine()}",
        "cpu": model[1] if model else "unknown",
        "cpus": cpus,
        "cpus_used": usable,
        "system": platform.system(),
    }


def main(
    ranks: Annotated[int, typer.Option(min=1, help="Of the largest group.")] = MOST_RANKS,
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the record to a file.")] = None,
) -> None:
    """Time partition, plan and one rank's tables of random batches."""
    made = record(ranks)
    if json_to is not None:
        json_to.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(table(made))


if __name__ == "__main__":
    typer.run(main)
