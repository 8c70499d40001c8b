"""A plan as tables and sentences: what each rank holds, walks and sends, and how two rules compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from deltaspan.layout import Partition
from deltaspan.plan import CHUNK, Cut, collective_bytes, crossings, in_words, lengths, rank_chunks, walk_steps
from deltaspan.plots.record import cuts_of, listed, p_of
from deltaspan.plots.text import partition_picture

ROWS_AT_MOST = 32
MIB = 2**20
HEAD_DIM = 128  # of the public models
FP32_BYTES = 4


class RankLoad(NamedTuple):
    """One rank of a plan."""

    rank: int
    tokens: int
    fragments: int  # empty ones too
    entered: int  # fragments that a document's state enters, from another fragment of this rank too
    left: int  # fragments that it leaves
    chunks: int
    segments: Cut  # P, into which each fragment is cut
    longest: int  # chunks of the longest segment
    steps: int  # chunks that the device walks one after another in a training step with a checkpoint


def plan_view(record: Mapping[str, Any], part: Partition, columns: int) -> list[RenderableType]:
    """All that a terminal shows of a plan.

    Args:
        record: what `deltaspan plan --json` writes; with "compare", the two plans are compared.
        part: the record's partition.
        columns: of the picture's rows.
    """
    target = {"hv": record["hv"], "sms": record["sms"]}
    loads = rank_loads(part, cuts_of(record), **target)
    other = rank_loads(part, cuts_of(record["compare"]), **target) if "compare" in record else None
    shown = shown_ranks(len(loads), *(slowest_ranks(each)[0] for each in (loads, other) if each))
    rules = record["rule"], record.get("compare", {}).get("rule")
    return [
        *partition_picture(record, shown, columns),
        *_load_view(loads, shown, **target),
        *_traffic_view(part, shown, record["hv"]),
        *(_comparison_view(loads, other, shown, rules) if other else ()),
    ]


def rank_loads(part: Partition, plan: Sequence[Cut], *, hv: int, sms: int) -> list[RankLoad]:
    """Every rank's load, by rank; plan: P by rank."""
    left, entered, _ = (counts.tolist() for counts in crossings(part))
    steps = walk_steps(part, plan, hv=hv, sm_count=sms)
    loads = []
    for rank, held in enumerate(rank_chunks(part)):
        chunks = sum(run.chunks * run.count for run in held.runs)
        longest = max(lengths(held.longest, plan[rank]), default=0)
        held_tokens = part.tokens(rank), held.fragments
        seams = entered[rank], left[rank]
        loads.append(RankLoad(rank, *held_tokens, *seams, chunks, plan[rank], longest, steps[rank]))
    return loads


def slowest_ranks(loads: Sequence[RankLoad]) -> list[int]:
    """The ranks that take the most walk steps."""
    most = max(load.steps for load in loads)
    return [load.rank for load in loads if load.steps == most]


def shown_ranks(ranks: int, *slowest: int) -> list[int]:
    """All ranks where they are few, else the first, the last, and the slowest."""
    if ranks <= ROWS_AT_MOST:
        return list(range(ranks))
    half = ROWS_AT_MOST // 2
    return sorted({*range(half), *range(ranks - half, ranks), *slowest})


def slowest_in_words(loads: Sequence[RankLoad]) -> str:
    """Whom the others wait for, as a clause."""
    slowest = slowest_ranks(loads)
    steps = f"{loads[slowest[0]].steps:,} walk steps"
    if len(loads) == 1:
        return f"the only rank takes {steps}"
    if len(slowest) == len(loads):
        return f"all {len(loads):,} ranks take {steps}, and none is the slowest"
    if len(slowest) > 1:
        return f"the slowest are {listed(slowest)}, which tie at {steps}"
    return f"the slowest is {listed(slowest)} at {steps}"


def comparison_in_words(loads: Sequence[RankLoad], other: Sequence[RankLoad], rules: tuple[str, str]) -> str:
    """Which of two plans is shorter, judged by the slowest rank of each, as a sentence or two."""
    one, two = (each[slowest_ranks(each)[0]].steps for each in (loads, other))
    if [load.segments for load in loads] == [load.segments for load in other]:
        return "Both rules give the same plan."
    if one == two:
        return f"Neither is shorter: the slowest ranks take {one:,} walk steps with both."
    ratio = f"The slowest ranks' walk steps, {rules[0]} / {rules[1]}: {one:,} / {two:,} = {one / two:.4f}."
    return f"{ratio} {rules[one > two]} is shorter."


def _load_view(loads: Sequence[RankLoad], shown: Sequence[int], *, hv: int, sms: int) -> list[RenderableType]:
    names = "tokens", "frag-\nments", "in", "out", "chunks", "P", "longest\nsegment", "walk\nsteps  "
    marks = _marks(loads)
    rows = {rank: [*(_cell(value) for value in loads[rank][1:-1]), marks[rank]] for rank in shown}
    note = (
        f"in, out: seams by which state comes and goes. {p_of('fragment', [load.segments for load in loads])}; the "
        f"longest, in chunks of {CHUNK} tokens. walk steps: chunks that a device walks one after another in a "
        f"checkpointed training step, composing not counted, for {hv} value heads on {sms} multiprocessors; * is the "
        "slowest."
    )
    return [
        Text(),
        _table("What each rank holds and walks", names, rows),
        _note(note),
        _sentence(slowest_in_words(loads)),
    ]


def _traffic_view(part: Partition, shown: Sequence[int], hv: int) -> list[RenderableType]:
    if not part.crossing_out.any():
        return [_sentence("no document's state leaves its fragment, so nothing is exchanged")]
    sizes = {"HV": hv, "K": HEAD_DIM, "V": HEAD_DIM, "state_size": FP32_BYTES}
    no_convolution = {"channels": 0, "width": 1, "row_size": 0}
    traffic = {rank: collective_bytes(part, rank, **sizes, **no_convolution, exchange="all_to_all") for rank in shown}
    names = "summaries", "entry_states", "adjoint_offsets", "exit_adjoints"
    wide = {name: max(len(_mib(side)) for sides in traffic.values() for side in sides[name]) for name in names}
    rows = {
        rank: [" / ".join(f"{_mib(side):>{wide[name]}}" for side in sides[name]) for name in names]
        for rank, sides in traffic.items()
    }
    note = (
        "For one layer, the first two in its forward, the others in its backward; a rank's own share counts. "
        f"A state is {HEAD_DIM} x {HEAD_DIM} float32 for each value head, a summary twice that."
    )
    return [Text(), _table("What each rank exchanges, by collective: MiB sent / received", names, rows), _note(note)]


def _comparison_view(
    loads: Sequence[RankLoad], other: Sequence[RankLoad], shown: Sequence[int], rules: tuple[str, str]
) -> list[RenderableType]:
    names = [f"{rule}\n{figure}" for rule in rules for figure in ("P", "walk steps  ")]
    marks = [_marks(each) for each in (loads, other)]
    rows = {
        rank: [_cell(loads[rank].segments), marks[0][rank], _cell(other[rank].segments), marks[1][rank]]
        for rank in shown
    }
    slowest = [
        _sentence(f"with {rule} {slowest_in_words(each)}") for rule, each in zip(rules, (loads, other), strict=True)
    ]
    return [
        Text(),
        _table("Two rules", names, rows),
        *slowest,
        Text(comparison_in_words(loads, other, rules), style="bold"),
    ]


def _marks(loads: Sequence[RankLoad]) -> list[str]:
    """Walk steps with a star at the slowest, unless all are."""
    slowest = slowest_ranks(loads)
    starred = set(slowest) if len(slowest) < len(loads) else set()
    return [f"{load.steps:,} " + ("*" if load.rank in starred else " ") for load in loads]


def _cell(value: Cut) -> str:
    return f"{value:,}" if isinstance(value, int) else in_words(value)


def _mib(size: int) -> str:
    return f"{size / MIB:,.2f}" if size < 100 * MIB else f"{size / MIB:,.0f}"


def _table(title: str, names: Sequence[str], rows: Mapping[int, Sequence[str]]) -> Table:
    """rows: cells by rank, rising; ranks that are left out between them are shown as dots."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=title,
        title_justify="left",
        title_style="bold",
        min_width=len(title),
    )
    for name in ("rank", *names):
        table.add_column(name, justify="right", no_wrap=True)
    before = -1
    for rank, cells in rows.items():
        if rank != before + 1:
            table.add_row("...")
        before = rank
        table.add_row(f"{rank}", *cells)
    return table


def _note(text: str) -> Text:
    return Text(text, style="dim")


def _sentence(clause: str) -> Text:
    return Text(f"{clause[0].upper()}{clause[1:]}.")
