"""The pictures of a record, by what it holds: a plan, a demo's run or a benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltaspan.plots.bench import save_ratios, save_times
from deltaspan.plots.curves import save_curves
from deltaspan.plots.partition import save_partition
from deltaspan.plots.whole import check_bench, check_demo, check_plan


def draw(text: str | bytes, folder: Path | str) -> list[Path]:
    """Draws what there is to draw of a record.

    Args:
        text: the JSON that `deltaspan plan`, `demo` or `bench` wrote.
        folder: is made if it is not there.

    Returns:
        the files.

    Raises:
        ValueError: no JSON, a record of another kind, or one that is not whole. Nothing is written then.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:  # also of bytes that are no text, and of numbers too long to read
        raise ValueError(f"record must be JSON, and this is not: {error}") from None
    held = record.keys() if isinstance(record, Mapping) else set()
    for keys, check, pictures in KINDS:
        if held >= keys:
            check(record)
            Path(folder).mkdir(parents=True, exist_ok=True)
            return pictures(record, Path(folder))
    found = f"has the keys {', '.join(sorted(held))}" if held else "has none of their keys"
    raise ValueError(f"record must be what deltaspan plan, demo or bench wrote; this one {found}")


def _of_bench(record: Mapping[str, Any], folder: Path) -> list[Path]:
    return [save_times(record, folder / "times.png"), *save_ratios(record, folder / "ratios.png")]


def _of_demo(record: Mapping[str, Any], folder: Path) -> list[Path]:
    return [save_curves(record, folder / "losses.png"), *_of_plan(record["partition"], folder)]


def _of_plan(record: Mapping[str, Any], folder: Path) -> list[Path]:
    return [save_partition(record, folder / "partition.png")]


KINDS = (
    ({"decay", "asked", "rows"}, check_bench, _of_bench),
    ({"losses", "partition"}, check_demo, _of_demo),
    ({"fragments", "segments", "lengths", "cp", "layout"}, check_plan, _of_plan),
)
