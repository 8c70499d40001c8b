"""The picture of a partition: ranks as rows, fragments as bars, an arrow wherever a document's state changes ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Patch
from matplotlib.transforms import offset_copy

from deltaspan.plots.record import Link, Piece, caption, links_of, pieces_of

BAR_HEIGHT = 0.62
NAMED_DOCUMENTS = 12
NAMED_ROWS = 24  # more rows are too low for text
ARROWS_AT_MOST = 150
MARKS_AT_MOST = 1500
TICKS_AT_MOST = 33
PALETTE = matplotlib.colormaps["tab10"].colors
LIGHTER = 0.3  # towards white, so that black text stands on every colour


def save_partition(record: Mapping[str, Any], path: Path | str) -> Path:
    """Draws a partition record as a PNG.

    Args:
        record: what `deltaspan plan --json` writes: pack, lengths, cp, layout, fragments.
        path: the file to write; its folder exists.

    Returns:
        the path.
    """
    pieces = pieces_of(record)
    links = [link for link in links_of(pieces) if link.crosses]
    figure = Figure(figsize=(11, _height(record["cp"])), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    longest = max((piece.stop for piece in pieces), default=1)
    axes.set_xlim(0, 1.005 * longest)
    axes.set_ylim(record["cp"] - 0.4, -0.6)
    _draw_pieces(axes, pieces, longest)
    if record["cp"] <= NAMED_ROWS:
        _name_pieces(axes, pieces, longest)
    _draw_links(axes, links)
    _label(figure, axes, record, len(links))
    path = Path(path)
    figure.savefig(path, dpi=130)
    return path


def colour(doc: int) -> tuple[float, ...]:
    """The document's colour, one of ten."""
    return tuple(channel + LIGHTER * (1 - channel) for channel in PALETTE[doc % len(PALETTE)])


def _height(ranks: int) -> float:
    return min(1.9 + max(0.55, 0.8 - 0.02 * ranks) * ranks, 14)


def _draw_pieces(axes: Axes, pieces: list[Piece], longest: int) -> None:
    top, bottom = -BAR_HEIGHT / 2, BAR_HEIGHT / 2
    bars = [
        [(p.start, p.rank + y) for y in (top, bottom)] + [(p.stop, p.rank + y) for y in (bottom, top)] for p in pieces
    ]
    edges = ["white" if piece.length > 0.004 * longest else "none" for piece in pieces]
    axes.add_collection(PolyCollection(bars, facecolors=[colour(p.doc) for p in pieces], edgecolors=edges))


def _name_pieces(axes: Axes, pieces: list[Piece], longest: int) -> None:
    for piece in pieces:
        share = piece.length / longest
        if share < 0.03:
            continue
        text = f"doc {piece.doc}" if share > 0.06 else str(piece.doc)
        if share > 0.15 and piece.of > 1:
            text += f", piece {piece.number} of {piece.of}"
        axes.text(piece.start + piece.length / 2, piece.rank, text, ha="center", va="center", fontsize=8)


def _draw_links(axes: Axes, links: list[Link]) -> None:
    if len(links) > MARKS_AT_MOST:
        return
    if len(links) > ARROWS_AT_MOST:
        for end, place, marker, inward in ((0, "stop", ">k", -3), (1, "start", "<k", 3)):
            pieces = [link[end] for link in links]
            shifted = offset_copy(axes.transData, axes.figure, x=inward, units="points")
            at = [getattr(piece, place) for piece in pieces]
            axes.plot(at, [piece.rank for piece in pieces], marker, markersize=3, transform=shifted)
        return
    for source, target in links:
        down = 1 if target.rank > source.rank else -1
        axes.add_patch(
            FancyArrowPatch(
                (source.stop, source.rank + down * BAR_HEIGHT / 2),
                (target.start, target.rank - down * BAR_HEIGHT / 2),
                arrowstyle="-|>",
                mutation_scale=9,
                shrinkA=0,
                shrinkB=0,
                color="black",
                linewidth=0.9,
            )
        )


def _label(figure: Figure, axes: Axes, record: Mapping[str, Any], crossings: int) -> None:
    ranks, lengths = record["cp"], record["lengths"]
    goes_on = f"a document continues on another rank, and its state goes there ({crossings:,} in all)."
    if not crossings:
        seams = "No document changes ranks."
    elif crossings <= ARROWS_AT_MOST:
        seams = f"Arrows: {goes_on}"
    elif crossings <= MARKS_AT_MOST:
        seams = f"Black marks (> out, < in): {goes_on}"
    else:
        seams = f"No arrows, for there would be too many: {goes_on}"
    figure.suptitle(f"Where tokens live: {caption(record)}", fontsize=11, x=0.01, ha="left")
    axes.set_title(
        "A row is one rank's tokens, in local order; a colour is a document.\n" + seams,
        fontsize=9,
        loc="left",
    )
    axes.set_xlabel("position in the rank's shard (tokens)")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.set_yticks(range(0, ranks, -(-ranks // TICKS_AT_MOST)))
    axes.yaxis.set_major_formatter(lambda y, _: f"rank {y:.0f}")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [
        Patch(color=colour(doc), label=f"doc {doc}: {length:,} tokens")
        for doc, length in enumerate(lengths[:NAMED_DOCUMENTS])
    ]
    if len(lengths) > NAMED_DOCUMENTS:
        handles.append(Patch(alpha=0, label=f"and {len(lengths) - NAMED_DOCUMENTS:,} more (colours repeat)"))
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)
