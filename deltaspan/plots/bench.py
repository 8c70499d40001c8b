"""The pictures of a benchmark record: times by shard and side, and ours over those of the fastest peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import blended_transform_factory

TITLES = {"forward": "forward", "step": "checkpointed step"}
OURS = "deltaspan"
COLOURS = {OURS: "tab:blue", "fla": "tab:orange", "flash_qla": "tab:green", "flashinfer": "tab:red"}
OTHER = "tab:purple"
GROUP = 0.8  # of a row's height, shared by the bars of its sides
ROW_INCHES, BAR_INCHES, FRAME_INCHES = 0.2, 0.2, 1.7

Row = Mapping[str, Any]


def save_times(record: Mapping[str, Any], path: Path | str) -> Path:
    """Draws the times of what was timed as a PNG: a bar for each shard and side, with a line over its quartiles.

    Args:
        record: what `deltaspan bench --json` writes.
        path: the file to write; its folder exists.

    Returns:
        the path.
    """
    rows = record["rows"]
    sides = list(dict.fromkeys(name for row in rows for name in _sides(row)))
    timed = _timed(record)
    figure, panels = _panels(record, rows, len(sides), "Medians, and the middle half of the samples as black lines")
    height = GROUP / len(sides)
    for axes, what in zip(panels, timed, strict=True):
        for at, row in enumerate(rows):
            of_row = _sides(row)
            for i, (name, side) in enumerate(of_row.items()):
                _bar(axes, side, what, at + (i - (len(of_row) - 1) / 2) * height, height, name)
        axes.margins(x=0.12)  # for the numbers behind the bars
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{TITLES[what]}, ms")
    patches = [Patch(color=COLOURS.get(name, OTHER), label=name) for name in sides]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(sides), frameon=False)
    return _saved(figure, path)


def save_ratios(record: Mapping[str, Any], path: Path | str) -> list[Path]:
    """Draws our time over the fastest peer's of each shard that has both, as a PNG.

    Args:
        record: what `deltaspan bench --json` writes.
        path: the file to write; its folder exists.

    Returns:
        the path, or nothing if no row has a peer's time beside ours.
    """
    timed = _timed(record)
    rows = [row for row in record["rows"] if any(_fastest(row, what) for what in timed)]
    if not rows:
        return []
    figure, panels = _panels(
        record, rows, 1, "Time of deltaspan over the fastest peer's: left of 1 it is the faster one"
    )
    for axes, what in zip(panels, timed, strict=True):
        label = blended_transform_factory(axes.transAxes, axes.transData)
        for at, row in enumerate(rows):
            if (fastest := _fastest(row, what)) is None:
                continue
            name, ratio = fastest
            axes.plot([1, ratio], [at, at], color=COLOURS[OURS], linewidth=2.5, alpha=0.45)
            axes.plot([ratio], [at], "o", color=COLOURS[OURS], fillstyle="full" if row["steady"] else "none")
            axes.text(1.02, at, f"{ratio:.2f} of {name}'s", transform=label, va="center", fontsize=8)
        axes.axvline(1, color="0.3", linewidth=1)
        axes.margins(x=0.12)
        axes.set_xlabel(TITLES[what])
    if not all(row["steady"] for row in rows):
        figure.supxlabel("Hollow: an unsteady row.", fontsize=8, x=0.01, ha="left")
    return [_saved(figure, path)]


def _panels(record: Mapping[str, Any], rows: Sequence[Row], bars: int, title: str) -> tuple[Figure, Sequence[Axes]]:
    """A panel for each of what was timed, with the rows' names at the left, the first on top."""
    height = FRAME_INCHES + len(rows) * (ROW_INCHES + BAR_INCHES * bars)
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    heads = "{} key and {} value heads".format(*record["heads"])
    where = record["machine"].get("gpu") or record["machine"].get("platform")
    figure.suptitle(f"{title}\n{record['decay']} decay, {heads}, {where}", fontsize=11)
    (panels,) = figure.subplots(1, len(_timed(record)), sharey=True, squeeze=False)
    panels[0].set_yticks(range(len(rows)), [f"{row['name']}\n{row['tokens']:,} tokens" for row in rows], fontsize=8)
    panels[0].set_ylim(len(rows) - 0.5, -0.5)
    for axes in panels:
        axes.grid(axis="x", alpha=0.25)
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
    return figure, panels


def _bar(axes: Axes, side: Row, what: str, at: float, height: float, name: str) -> None:
    """A side's median, or words if it was not timed."""
    colour, ms = COLOURS.get(name, OTHER), side[f"{what}_ms"]
    if ms is None:
        axes.text(0, at, f" {name}: not timed", va="center", fontsize=7, color=colour)
        return
    spread = side["spread"][what]
    axes.barh(at, ms, 0.92 * height, color=colour)
    axes.plot([spread["quartile_1"], spread["quartile_3"]], [at, at], color="black", linewidth=1)
    end = max(ms, spread["quartile_3"])
    axes.annotate(f"{ms:.3g}", (end, at), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)


def _timed(record: Mapping[str, Any]) -> Sequence[str]:
    """Keys of `TITLES`: all, where a record does not say."""
    return record.get("phases", list(TITLES))


def _sides(row: Row) -> dict[str, Row]:
    return {OURS: row, **row["peers"]}


def _fastest(row: Row, what: str) -> tuple[str, float] | None:
    """The fastest peer, and our time over its."""
    times = {name: side[f"{what}_ms"] for name, side in row["peers"].items() if side[f"{what}_ms"] is not None}
    own = row[f"{what}_ms"]
    if own is None or not times:
        return None
    name = min(times, key=lambda name: times[name])
    return name, own / times[name]


def _saved(figure: Figure, path: Path | str) -> Path:
    figure.savefig(path, dpi=130)
    return Path(path)
