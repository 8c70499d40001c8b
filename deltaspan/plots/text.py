"""Pictures for a terminal: a partition as rows of cells, a curve as a line of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from rich.style import Style
from rich.text import Text

from deltaspan.plan import count_of, in_words
from deltaspan.plots.record import Piece, caption, cuts_of, links_of, p_of, pieces_of, segment_cuts

SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyz"
COLOURS = ("blue", "dark_orange", "green", "red", "medium_purple", "orange4", "hot_pink", "grey50", "yellow4", "cyan")
BLOCKS = "▁▂▃▄▅▆▇█"
CELLS_PER_SEGMENT = 3  # fewer, and the marks between segments would hide the document


def partition_picture(record: Mapping[str, Any], ranks: Sequence[int] | None = None, columns: int = 80) -> list[Text]:
    """A partition record as lines: a row per rank, a cell per so many tokens, filled with the document's symbol.

    A piece that its document's state enters from another rank opens with `<`, one that it leaves for another rank ends
    with `>`; `=` is the seam to a neighbour on the same rank. `|` stands between segments, and P at the row's end says
    into how many each piece of the row is cut. A piece of one or two cells shows its symbol alone, and pieces too short
    for a cell of their own are left out and counted.

    Args:
        record: what `deltaspan plan --json` writes.
        ranks: which to draw, rising; None for all.
        columns: of the longest row, its label and P included; the notes below the rows may be longer.
    """
    shown = list(range(record["cp"]) if ranks is None else ranks)
    pieces = pieces_of(record)
    by_rank: dict[int, list[Piece]] = {rank: [] for rank in shown}
    for piece in pieces:
        if piece.rank in by_rank:
            by_rank[piece.rank].append(piece)
    links = links_of(pieces)
    opening = {link.target: "<" if link.crosses else "=" for link in links if link.target.rank in by_rank}
    closing = {link.source: ">" if link.crosses else "=" for link in links if link.source.rank in by_rank}
    labels = [f"rank {rank:>{len(str(record['cp'] - 1))}} " for rank in range(record["cp"])]
    plan = cuts_of(record)
    is_cut = any(count_of(cut) > 1 for cut in plan)
    ends = [f" P {in_words(cut)}" if is_cut else "" for cut in plan]
    width = max(1, columns - len(labels[-1]) - max(map(len, ends)))
    scale = max((piece.stop for piece in pieces), default=1) / width
    lines, omitted, unmarked, before = [Text(caption(record), style="bold")], 0, False, -1
    for rank in shown:
        if rank != before + 1:
            lines.append(Text("..."))
        before = rank
        line = Text(labels[rank])
        for piece in sorted(by_rank[rank], key=lambda piece: piece.start):
            first, stop = round(piece.start / scale), round(piece.stop / scale)
            cuts = segment_cuts(piece, plan[rank])
            room = stop - first >= CELLS_PER_SEGMENT * (len(cuts) + 1)
            marks = [round(cut / scale) - first for cut in cuts] if room else []
            omitted, unmarked = omitted + (stop == first), unmarked or (bool(cuts) and not room)
            seams = opening.get(piece, ""), closing.get(piece, "")
            cells = _cells(SYMBOLS[piece.doc % len(SYMBOLS)] * (stop - first), marks, *seams)
            line.append(cells, Style(color=COLOURS[piece.doc % len(COLOURS)]))
        if not by_rank[rank]:
            line.append("(no tokens)", "dim")
        if is_cut:
            line.pad_right(len(labels[rank]) + width - len(line))
            line.append(ends[rank], "bold")
        lines.append(line)
    return lines + [Text(note, style="dim") for note in _notes(record, scale, omitted, is_cut, unmarked)]


def sparkline(values: Sequence[float]) -> str:
    """One block per value, from the lowest to the highest of them; `?` for what is no number."""
    numbers = [value for value in values if isfinite(value)]
    low, span = min(numbers, default=0), (max(numbers, default=0) - min(numbers, default=0)) or 1
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((value - low) / span * top)] if isfinite(value) else "?" for value in values)


def _cells(filled: str, marks: Sequence[int], opening: str, closing: str) -> str:
    cells = list(filled)
    for mark in marks:
        cells[mark] = "|"
    if len(cells) >= 3:
        cells[: len(opening)] = opening
        cells[len(cells) - len(closing) :] = closing
    return "".join(cells)


def _notes(record: Mapping[str, Any], scale: float, omitted: int, is_cut: bool, unmarked: bool) -> list[str]:
    cell = f"a cell about {scale:.0f} tokens" if scale > 1 else f"a token about {1 / scale:.0f} cells"
    legend = f"A symbol is a document, {cell}."
    if len(record["lengths"]) > len(SYMBOLS):
        legend += " Symbols repeat."
    if omitted:
        legend += f" {omitted:,} short piece" + (" is" if omitted == 1 else "s are") + " too short to show."
    notes = [legend, "State: < from another rank, > to another rank, = to this rank's next piece."]
    if is_cut:
        left_out = ", where there is room" if unmarked else ""
        notes.append(f"{p_of('piece', cuts_of(record))}, at most one a chunk; | parts them{left_out}.")
    return notes
