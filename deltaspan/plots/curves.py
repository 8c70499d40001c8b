"""The picture of two training runs: their losses one over the other, and how far apart they are."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

FLOOR = 1e-9


def save_curves(record: Mapping[str, Any], path: Path | str) -> Path:
    """Draws the losses of a demo record as a PNG.

    Args:
        record: losses {"ranks": [...], "one": [...]} by step, settings {"ranks", "layout"},
            bounds {"loss", "judged_steps"}.
        path: the file to write; its folder exists.

    Returns:
        the path.
    """
    ranks, layout = record["settings"]["ranks"], record["settings"]["layout"]
    many, one = record["losses"]["ranks"], record["losses"]["one"]
    bound, judged = record["bounds"]["loss"], record["bounds"]["judged_steps"]
    steps = range(1, len(many) + 1)
    differences = [abs(a - b) for a, b in zip(many, one, strict=True)]

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"The same training on {ranks} ranks ({layout}) and on one")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    above.plot(steps, one, color="tab:orange", linewidth=5, alpha=0.5, label="one rank")
    above.plot(steps, many, color="tab:blue", linewidth=1.5, marker="o", markersize=3.5, label=f"{ranks} ranks")
    above.set_ylabel("loss (nats per byte)")
    above.legend(frameon=False)

    # A logarithmic axis has no place for 0: equal losses are drawn at the floor, which the label names.
    below.semilogy(steps, [max(d, FLOOR) for d in differences], color="tab:blue", marker="o", markersize=3.5)
    last = min(judged, len(many))
    below.plot([1, last], [bound, bound], color="tab:red", linestyle="--", label=f"allowed up to step {last}")
    below.set_ylim(FLOOR / 2, 10 * max(bound, *filter(isfinite, differences)))
    below.set_ylabel(f"|difference| ({FLOOR:.0e} stands for 0)")
    below.set_xlabel("training step")
    below.xaxis.get_major_locator().set_params(integer=True)
    below.legend(frameon=False, loc="upper left")
    for axes in (above, below):
        axes.grid(alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    path = Path(path)
    figure.savefig(path, dpi=130)
    return path
