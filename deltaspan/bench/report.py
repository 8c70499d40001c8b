"""A record to read: a line for each row as it is done, and all of them as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
PHASES = {"forward": "forward", "step": "checkpointed step"}  # that a record is of where it does not say


def line(row: Row, phases: Sequence[str] = tuple(PHASES)) -> str:
    """One row: what was timed of every side, in milliseconds, and whether that can be relied on."""
    sides = ", ".join(f"{name} {_times(side, phases)}" for name, side in _sides(row))
    notes = "".join(f"; {note}" for note in _notes(row))
    return f"{row['name']}: {' / '.join(phases)} {sides} ms{notes}"


def table(record: Mapping[str, Any]) -> str:
    """The whole record as Markdown."""
    peers = list(dict.fromkeys(name for row in record["rows"] for name in row["peers"]))
    phases = record.get("phases", tuple(PHASES))
    peak = "peak_mib" if "step" in phases else "forward_peak_mib"
    of_peak = f"{phases[-1]} MiB"
    head = ["shard", "tokens", "deltaspan", *peers, "to fastest peer", of_peak, "worst error", "notes"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 2) + ["---"]]
    for row in record["rows"]:
        sides = dict(_sides(row))
        timed = [_times(sides[name], phases) if name in sides else "" for name in ("deltaspan", *peers)]
        known = any(side[peak] is not None for side in sides.values())
        peaks = [_number(side[peak], 0) for side in sides.values()] if known else []
        figures = [" / ".join(_ratios(row, phases)), " / ".join(peaks), _worst(row), "; ".join(_notes(row))]
        lines.append([row["name"], f"{row['tokens']:,}", *timed, *figures])
    return "\n".join(
        [*_opening(record), "", *(f"| {' | '.join(cells)} |" for cells in lines), "", *_legend(record, phases)]
    )


def to_fastest_peer(row: Row, what: str) -> float | None:
    """Our time over that of the fastest peer, of "forward" or "step"; None without either."""
    times = [side[f"{what}_ms"] for side in row["peers"].values() if side[f"{what}_ms"] is not None]
    own = row[f"{what}_ms"]
    return own / min(times) if times and own is not None else None


def _sides(row: Row) -> Iterator[tuple[str, Row]]:
    yield "deltaspan", row
    yield from row["peers"].items()


def _times(side: Row, phases: Sequence[str]) -> str:
    return " / ".join(_number(side[f"{what}_ms"], 3) for what in phases)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _ratios(row: Row, phases: Sequence[str]) -> list[str]:
    ratios = [to_fastest_peer(row, what) for what in phases]
    return [_number(ratio, 2) for ratio in ratios] if any(ratios) else []


def _worst(row: Row) -> str:
    errors = row["errors"]
    if not errors:
        return ""
    name = max(errors, key=lambda name: float("inf") if isinstance(errors[name], str) else errors[name])
    return f"{errors[name]} ({name})" if isinstance(errors[name], str) else f"{errors[name]:.1e} ({name})"


def _notes(row: Row) -> Iterator[str]:
    for name, side in _sides(row):
        if side["off"] is not None:
            yield f"{name} not timed: {side['off']}"
    if row["control"] and not row["steady"]:
        yield "unsteady: control " + " / ".join(_number(ratio, 3) for ratio in row["control"].values())
    if row["layout"] != "local":
        wire = row["wire_ms"]
        told = "not counted" if wire is None else f"not counted, {wire:.3f} ms of a step by the model"
        yield f"all ranks simulated, slowest {row['slowest_rank']}, wire {told}"


def _opening(record: Mapping[str, Any]) -> list[str]:
    machine, (H, HV) = record["machine"], record["heads"]
    where = ", ".join(str(part) for part in (machine.get("gpu"), machine["platform"]) if part)
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version is not None)
    rows = f"{len(record['rows'])} of {record['asked']} rows"
    return [
        f"{H} key and {HV} value heads of 128, bf16, {record['decay']} decay, tier {record['backend']}, on {where}.",
        f"{versions}, commit {record['commit'] or 'unknown'}. {rows}, seed {record['seed']}.",
    ]


def _legend(record: Mapping[str, Any], phases: Sequence[str]) -> list[str]:
    timed = " / ".join(PHASES[what] for what in phases)
    return [
        f"Times are medians of {record['samples']} samples or more in ms, {timed}, sides",
        "interleaved, the L2 cache not flushed. MiB: allocated at its peak above its inputs, deltaspan first.",
        f"Every side that is timed was within {record['bound']:.0e} of float64 in all that it was timed for",
        "(relative RMS; first and last key head with their value heads). A row is unsteady if our side, timed twice,",
        "differs from itself by more than 1 %. No time counts the wire.",
    ]
