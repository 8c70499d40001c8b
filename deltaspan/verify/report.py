"""What a suite found: rows, each a check of a case, as JSON and as a table."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Figures = Mapping[str, str | int | float | None]

SHOWN_FAILURES = 4  # of one check; the JSON has all


@dataclass(frozen=True)
class Row:
    """One check of one case."""

    name: str  # the check
    row: str  # the case
    ok: bool
    figures: Figures


@dataclass(frozen=True)
class Report:
    """All rows of a run, and the machine that they hold for."""

    machine: Mapping[str, str | int]
    rows: Sequence[Row]
    seed: int

    @property
    def ok(self) -> bool:
        """Whether every check holds, and there was one."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Plain values. JSON knows no infinity, so a figure that is not finite becomes a string that says so."""
        checks = [asdict(row) | {"figures": {k: _finite(x) for k, x in row.figures.items()}} for row in self.rows]
        return {"machine": dict(self.machine), "checks": checks, "ok": self.ok}

    def table(self) -> RenderableType:
        """One line a check, with the row that came nearest to its bound; and every failure."""
        summary = Table("check", "rows", "hold", "nearest to its bound")
        failures = Table("failed", "case", "figures", show_lines=True)
        for name, rows in _by_name(self.rows):
            failed = [row for row in rows if not row.ok]
            held = f"[red]{len(rows) - len(failed)}[/red]" if failed else str(len(rows))
            summary.add_row(name, str(len(rows)), held, escape(_nearest(rows)))
            for row in failed[:SHOWN_FAILURES]:
                failures.add_row(name, escape(row.row), escape(shown(row.figures)))
            if len(failed) > SHOWN_FAILURES:
                failures.add_row(name, f"and {len(failed) - SHOWN_FAILURES} more", "")
        return Group(*([summary, failures] if failures.rows else [summary]), self.caption())

    def caption(self) -> RenderableType:
        """What it all holds for."""
        facts = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        return Text(f"{facts}. Random inputs of seed {self.seed}.", style="dim")


def machine_facts(device: str) -> dict[str, str | int]:
    """What the results may depend on."""
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    facts: dict[str, str | int] = {
        "platform": platform.platform(),
        "cpus": os.cpu_count() or 1,
        "torch": torch.__version__,
        "blas": blas[1] if blas else "unknown",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": device,
    }
    return facts | ({"gpu": torch.cuda.get_device_name()} if device == "cuda" else {})


def _finite(figure: str | int | float | None) -> str | int | float | None:
    return "not finite" if isinstance(figure, float) and not math.isfinite(figure) else figure


def _by_name(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    names = {row.name: i for i, row in reversed(list(enumerate(rows)))}  # in the order of their first rows
    ordered = sorted(rows, key=lambda row: names[row.name])
    return [(name, list(group)) for name, group in groupby(ordered, key=lambda row: row.name)]


def _nearest(rows: Sequence[Row]) -> str:
    judged = [row.figures for row in rows if "bound" in row.figures]
    if not judged:
        return "no bit differs" if all(row.ok for row in rows) else ""
    nearest = max(judged, key=lambda figures: figures["error"] / figures["bound"])
    return shown(nearest, hidden=("seed", "rms", "worst_element"))


def shown(figures: Figures, hidden: Sequence[str] = ("seed",)) -> str:
    """Figures in their order, the absent ones left out."""
    return ", ".join(
        f"{name} {value:.2g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures.items()
        if value is not None and name not in hidden
    )
