"""A plan record as a table: what each rank holds, what crosses its seams, and how long its device is busy at least."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from deltaspan.plan import CHUNK
from deltaspan.plots.record import links_of, pieces_of

ROWS_AT_MOST = 32
MIB = 2**20


class RankLoad(NamedTuple):
    """One rank of a plan record."""

    rank: int
    tokens: int
    fragments: int
    entered: int  # fragments that a document's state enters, from another fragment of this rank too
    left: int  # fragments that it leaves
    chunks: int
    segments: int
    longest_walk: int  # chunks of the longest segment, one after another
    steps: int  # chunks one after another on the rank's device, at least


def rank_loads(record: Mapping[str, Any]) -> list[RankLoad]:
    """Every rank's load, by rank.

    A device walks all segments of all heads side by side, one on each multiprocessor. So it is busy at least as long as
    the longest walk, and at least as long as all walks evenly spread: steps = max(longest, chunks * hv / sms).
    """
    ranks = range(record["cp"])
    entered, left = [0] * len(ranks), [0] * len(ranks)
    for link in links_of(pieces_of(record)):
        left[link.source.rank] += 1
        entered[link.target.rank] += 1
    loads = []
    for rank in ranks:
        lengths = [length for _, _, length in record["fragments"][rank]]
        cuts = record["segments"][rank]
        chunks = [-(-length // CHUNK) for length in lengths]
        longest = -(-max(chunks, default=0) // cuts)
        steps = max(longest, -(-sum(chunks) * record["hv"] // record["sms"]))
        crossings = (entered[rank], left[rank])
        loads.append(
            RankLoad(rank, sum(lengths), len(lengths), *crossings, sum(chunks), cuts * len(lengths), longest, steps)
        )
    return loads


def slowest_rank(loads: list[RankLoad]) -> int:
    """The rank whose device is busy longest; the first of equals."""
    return max(loads, key=lambda load: load.steps).rank


def shown_ranks(ranks: int, slowest: int) -> list[int]:
    """All ranks where they are few, else the first, the last, and the slowest."""
    if ranks <= ROWS_AT_MOST:
        return list(range(ranks))
    half = ROWS_AT_MOST // 2
    return sorted({*range(half), *range(ranks - half, ranks), slowest})


def plan_table(loads: list[RankLoad], traffic: Mapping[int, tuple[int, int]], sms: int) -> Table:
    """The table of the ranks in `traffic`, which holds (sent, received) bytes of one layer's step by rank."""
    slowest = slowest_rank(loads)
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption=f"in, out: seams by which state comes and goes. steps: chunks of {CHUNK} tokens that the device walks "
        f"one after another, at least, with {sms} multiprocessors; * is the slowest rank. sent, received: states of "
        "one layer, forward and backward.",
        caption_justify="left",
    )
    for name in ("rank", "tokens", "frag-\nments", "in", "out", "chunks", "seg-\nments", "longest\nwalk", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("sent\nMiB", justify="right", no_wrap=True)
    table.add_column("received\nMiB", justify="right", no_wrap=True)
    before = -1
    for rank, (sent, received) in traffic.items():
        if rank != before + 1:
            table.add_row("...")
        before = rank
        is_slowest = rank == slowest and len(loads) > 1
        cells = [f"{value:,}" for value in loads[rank]]
        cells[-1] += " *" if is_slowest else "  "
        table.add_row(*cells, f"{sent / MIB:,.1f}", f"{received / MIB:,.1f}", style="bold" if is_slowest else None)
    return table
