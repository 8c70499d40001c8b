"""The picture of a partition: ranks as rows, fragments as bars cut into segments, and where a document's state goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.transforms import offset_copy

from deltaspan.plan import Cut, count_of, in_words
from deltaspan.plots.record import Link, Piece, caption, cuts_of, links_of, p_of, pieces_of, segment_cuts

BAR_HEIGHT = 0.62
TICK_HEIGHT = 0.17  # of a segment's ticks, from both edges of the bar, so that its name stays free
NAMED_DOCUMENTS = 12
NAMED_ROWS = 24  # more rows are too low for text
MARKED_ROWS = 128  # more rows are too low for edges and marks, which would cover them
ARROWS_AT_MOST = 150
MARKS_AT_MOST = 1500
LABELS_AT_MOST = 33
SEEN_SHARE = 0.004  # of a row; narrower things are drawn without an edge, or left out
PALETTE = matplotlib.colormaps["tab10"].colors
LIGHTER = 0.3  # towards white, so that black text stands on every colour
DARKER = 0.35  # towards black, so that every colour's arrows stand on white
GREY = "0.45"


def save_partition(record: Mapping[str, Any], path: Path | str) -> Path:
    """Draws a partition record as a PNG.

    Args:
        record: what `deltaspan plan --json` writes: pack, lengths, cp, layout, rule, fragments, segments.
        path: the file to write; its folder exists.

    Returns:
        the path.
    """
    pieces = pieces_of(record)
    links = links_of(pieces)
    figure = Figure(figsize=(11, _height(record["cp"])), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    longest = max((piece.stop for piece in pieces), default=1)
    axes.set_xlim(0, 1.005 * longest)
    axes.set_ylim(record["cp"] - 0.4, -0.6)
    _draw_pieces(axes, pieces, longest, record["cp"])
    _draw_segments(axes, pieces, cuts_of(record), longest)
    if record["cp"] <= NAMED_ROWS:
        _name_pieces(axes, pieces, longest)
        _name_empty_ranks(axes, pieces, record["cp"])
    _draw_links(axes, links, record["cp"])
    _label(figure, axes, record, links)
    path = Path(path)
    figure.savefig(path, dpi=110)
    return path


def colour(doc: int) -> tuple[float, ...]:
    """The document's colour, one of ten."""
    return tuple(channel + LIGHTER * (1 - channel) for channel in PALETTE[doc % len(PALETTE)])


def arrow_colour(doc: int) -> tuple[float, ...]:
    """The document's colour for what is drawn on white."""
    return tuple(channel * (1 - DARKER) for channel in PALETTE[doc % len(PALETTE)])


def _height(ranks: int) -> float:
    return min(2.1 + max(0.55, 0.8 - 0.02 * ranks) * ranks, 14)


def _draw_pieces(axes: Axes, pieces: list[Piece], longest: int, ranks: int) -> None:
    top, bottom = -BAR_HEIGHT / 2, BAR_HEIGHT / 2
    # the narrow ones last, with an edge of their own colour, so that a document of one token is seen
    pieces = sorted(pieces, key=lambda piece: -piece.length)
    bars = [
        [(p.start, p.rank + y) for y in (top, bottom)] + [(p.stop, p.rank + y) for y in (bottom, top)] for p in pieces
    ]
    colours = [colour(piece.doc) for piece in pieces]
    wide = [piece.length > SEEN_SHARE * longest and ranks <= MARKED_ROWS for piece in pieces]
    edges = ["white" if is_wide else own for is_wide, own in zip(wide, colours, strict=True)]
    widths = [1 if is_wide or ranks > MARKED_ROWS else 2 for is_wide in wide]
    axes.add_collection(PolyCollection(bars, facecolors=colours, edgecolors=edges, linewidths=widths))


def _draw_segments(axes: Axes, pieces: list[Piece], plan: Sequence[Cut], longest: int) -> None:
    half, ticks = BAR_HEIGHT / 2, []
    for piece in pieces:
        cuts = segment_cuts(piece, plan[piece.rank])
        if piece.length < SEEN_SHARE * longest * (len(cuts) + 1):
            continue
        for cut in cuts:
            ticks += [
                [(cut, piece.rank + side * half), (cut, piece.rank + side * (half - TICK_HEIGHT))] for side in (-1, 1)
            ]
    axes.add_collection(LineCollection(ticks, colors="black", linewidths=0.8))


def _name_pieces(axes: Axes, pieces: list[Piece], longest: int) -> None:
    for piece in pieces:
        share = piece.length / longest
        if share < 0.03:
            continue
        text = f"doc {piece.doc}" if share > 0.06 else str(piece.doc)
        if share > 0.15 and piece.of > 1:
            text += f", piece {piece.number} of {piece.of}"
        axes.text(piece.start + piece.length / 2, piece.rank, text, ha="center", va="center", fontsize=8)


def _name_empty_ranks(axes: Axes, pieces: list[Piece], ranks: int) -> None:
    for rank in set(range(ranks)) - {piece.rank for piece in pieces}:
        axes.text(0, rank, " no tokens", va="center", fontsize=8, color=GREY)


def _how_drawn(links: Sequence[Link], ranks: int) -> str | None:
    if ranks > MARKED_ROWS or len(links) > MARKS_AT_MOST:
        return None
    return "arrows" if len(links) <= ARROWS_AT_MOST else "marks"


def _draw_links(axes: Axes, links: list[Link], ranks: int) -> None:
    how = _how_drawn(links, ranks)
    if how == "marks":
        for end, place, marker, inward in ((0, "stop", ">k", -3), (1, "start", "<k", 3)):
            pieces = [link[end] for link in links]
            shifted = offset_copy(axes.transData, axes.figure, x=inward, units="points")
            at = [getattr(piece, place) for piece in pieces]
            axes.plot(at, [piece.rank for piece in pieces], marker, markersize=3, transform=shifted)
    if how != "arrows":
        return
    for source, target in links:
        down = (target.rank > source.rank) - (target.rank < source.rank)
        if down:
            half = down * BAR_HEIGHT / 2
            _draw_arrow(axes, source.doc, (source.stop, source.rank + half), (target.start, target.rank - half), 3)
        else:  # these always touch: the arrow leaps over the seam
            seam = target.start, target.rank - BAR_HEIGHT / 2
            _draw_arrow(axes, source.doc, seam, seam, 7 if ranks <= NAMED_ROWS else 4, bend=-0.9)


def _draw_arrow(
    axes: Axes, doc: int, tail: tuple[float, float], head: tuple[float, float], inward: float, bend: float = 0
) -> None:
    """An arrow from the end of a piece to the start of the next, `inward` points inside both."""
    left, right = (offset_copy(axes.transData, axes.figure, x=x, units="points") for x in (-inward, inward))
    shape = {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend}", "mutation_scale": 9, "linewidth": 0.9}
    arrow = {**shape, "shrinkA": 0, "shrinkB": 0, "color": arrow_colour(doc)}
    axes.annotate("", xy=head, xycoords=right, xytext=tail, textcoords=left, arrowprops=arrow, annotation_clip=False)


def _label(figure: Figure, axes: Axes, record: Mapping[str, Any], links: Sequence[Link]) -> None:
    ranks, lengths = record["cp"], record["lengths"]
    figure.suptitle(f"Where tokens live: {caption(record)}", fontsize=11, x=0.01, ha="left")
    axes.set_title("\n".join(_legend(record, links)), fontsize=9, loc="left")
    axes.set_xlabel("position in the rank's shard (tokens)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    labelled = range(0, ranks, -(-ranks // LABELS_AT_MOST))
    axes.set_yticks(labelled)
    axes.yaxis.set_major_formatter(lambda y, _: f"rank {y:.0f}")
    plan = cuts_of(record)
    for rank in labelled:
        label = f"P {in_words(plan[rank])}"
        axes.text(1.005, rank, label, transform=axes.get_yaxis_transform(), va="center_baseline")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [
        Patch(color=colour(doc), label=f"doc {doc}: {length:,} token" + "s" * (length != 1))
        for doc, length in enumerate(lengths[:NAMED_DOCUMENTS])
    ]
    if len(lengths) > NAMED_DOCUMENTS:
        handles.append(Patch(alpha=0, label=f"and {len(lengths) - NAMED_DOCUMENTS:,} more (colours repeat)"))
    figure.legend(handles=handles, loc="outside right center", frameon=False, fontsize=9)


def _legend(record: Mapping[str, Any], links: Sequence[Link]) -> list[str]:
    lines = ["A row is one rank's tokens, in local order; a colour is a document."]
    if any(count_of(cut) > 1 for cut in cuts_of(record)):
        lines.append(
            f"{p_of('piece', cuts_of(record))}, by the rule {record['rule']}; "
            "ticks stand between them, where there is room."
        )
    else:
        lines.append("P 1: the pieces are not cut into segments.")
    across = sum(link.crosses for link in links)
    within = len(links) - across
    if not links:
        return [*lines, "Every document is whole on one rank: no state is passed."]
    count = " and ".join(
        f"{n:,} {where}" for n, where in ((across, "to another rank"), (within, "to the same rank's next piece")) if n
    )
    how = {"arrows": "Arrows", "marks": "Black marks (> out, < in)", None: "No arrows, for there would be too many"}
    drawn = how[_how_drawn(links, record["cp"])]
    return [*lines, f"{drawn}: a document goes on, and its state with it ({count})."]
