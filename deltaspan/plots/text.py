"""Pictures for a terminal: a partition as rows of cells, a curve as a line of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from rich.style import Style
from rich.text import Text

from deltaspan.plots.record import Piece, caption, pieces_of

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"
COLOURS = ("blue", "dark_orange", "green", "red", "medium_purple", "orange4", "hot_pink", "grey50", "yellow4", "cyan")
BLOCKS = "▁▂▃▄▅▆▇█"


def partition_picture(record: Mapping[str, Any], ranks: Sequence[int] | None = None, width: int = 72) -> list[Text]:
    """A partition record as lines: a row per rank, a cell per so many tokens, filled with the document's symbol.

    A piece that its document's state enters opens with `<`, one that it leaves ends with `>`; a piece of a single cell
    shows its symbol alone, and pieces too short for a cell of their own are left out and counted.

    Args:
        record: what `deltaspan plan --json` writes.
        ranks: which to draw, rising; None for all.
        width: cells of the longest row.
    """
    by_rank: list[list[Piece]] = [[] for _ in range(record["cp"])]
    for piece in pieces_of(record):
        by_rank[piece.rank].append(piece)
    scale = max((piece.stop for row in by_rank for piece in row), default=1) / width
    lines, omitted, before = [Text(caption(record), style="bold")], 0, -1
    for rank in range(record["cp"]) if ranks is None else ranks:
        if rank != before + 1:
            lines.append(Text("..."))
        before = rank
        line = Text(f"rank {rank:>{len(str(record['cp'] - 1))}} ")
        for piece in sorted(by_rank[rank], key=lambda piece: piece.start):
            cells = round(piece.stop / scale) - round(piece.start / scale)
            omitted += cells == 0
            line.append(_cells(piece, cells), Style(color=COLOURS[piece.doc % len(COLOURS)]))
        lines.append(line)
    note = f"a cell is about {scale:,.0f} tokens; `<` state comes in from the document's previous piece, `>` goes on"
    if len(record["lengths"]) > len(SYMBOLS):
        note += "; symbols repeat"
    if omitted:
        note += f"; {omitted:,} short piece" + (" is" if omitted == 1 else "s are") + " too short to show"
    lines.append(Text(note, style="dim"))
    return lines


def sparkline(values: Sequence[float]) -> str:
    """One block per value, from the lowest to the highest of them; `?` for what is no number."""
    numbers = [value for value in values if isfinite(value)]
    low, span = min(numbers, default=0), (max(numbers, default=0) - min(numbers, default=0)) or 1
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((value - low) / span * top)] if isfinite(value) else "?" for value in values)


def _cells(piece: Piece, cells: int) -> str:
    filled = SYMBOLS[piece.doc % len(SYMBOLS)] * cells
    if cells >= 3 and piece.number > 1:
        filled = "<" + filled[1:]
    if cells >= 3 and piece.number < piece.of:
        filled = filled[:-1] + ">"
    return filled
