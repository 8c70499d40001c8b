"""A partition record (the JSON of `deltaspan plan`) as pieces with positions, their segments, and the links between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from deltaspan.plan import CHUNK, Cut, segment_starts

NAMED_RANKS = 8


class Piece(NamedTuple):
    """A non-empty fragment: where it lies in its document and in its rank's shard, in tokens."""

    rank: int
    doc: int
    offset: int
    length: int
    start: int  # first local position
    number: int  # which piece of its document, from 1
    of: int  # how many pieces its document has

    @property
    def stop(self) -> int:
        return self.start + self.length


class Link(NamedTuple):
    """A document's state leaves one piece and enters the next."""

    source: Piece
    target: Piece

    @property
    def crosses(self) -> bool:
        return self.source.rank != self.target.rank


def pieces_of(record: Mapping[str, Any]) -> list[Piece]:
    """The record's non-empty fragments, document by document, in the document's order."""
    found = []
    for rank, fragments in enumerate(record["fragments"]):
        start = 0
        for doc, offset, length in fragments:
            if length:
                found.append((doc, offset, rank, length, start))
            start += length
    found.sort()
    count: dict[int, int] = {}
    for doc, *_ in found:
        count[doc] = count.get(doc, 0) + 1
    pieces, number, last = [], 0, None
    for doc, offset, rank, length, start in found:
        number = number + 1 if doc == last else 1
        last = doc
        pieces.append(Piece(rank, doc, offset, length, start, number, count[doc]))
    return pieces


def links_of(pieces: list[Piece]) -> list[Link]:
    """Consecutive pieces of one document, given in the order of `pieces_of`."""
    return [Link(a, b) for a, b in pairwise(pieces) if a.doc == b.doc]


def cuts_of(record: Mapping[str, Any]) -> list[Cut]:
    """By rank, of a record that may have come through JSON."""
    return [tuple(cut) if isinstance(cut, list) else cut for cut in record["segments"]]


def p_of(what: str, plan: Sequence[Cut]) -> str:
    """What P says of each `what` of a plan."""
    return f"P: segments of each {what}" + (
        "" if all(isinstance(cut, int) for cut in plan) else ", or their relative lengths"
    )


def segment_cuts(piece: Piece, cut: Cut) -> list[int]:
    """Where in the shard a segment of the piece ends and the next begins, in tokens."""
    starts = segment_starts(np.array([-(-piece.length // CHUNK)]), cut)
    return [piece.start + CHUNK * chunk for chunk in np.unique(starts)[1:-1].tolist()]


def caption(record: Mapping[str, Any]) -> str:
    """One line that says what the record is about."""
    lengths = record["lengths"]
    name = f"pack {record['pack']}: " if record.get("pack") else ""
    documents, ranks = plural(len(lengths), "document"), plural(record["cp"], "rank")
    return f"{name}{documents}, {sum(lengths):,} tokens, on {ranks}, layout {record['layout']}"


def listed(ranks: Sequence[int]) -> str:
    """rank 1; ranks 0, 1 and 2; ranks 0, 1, 2 and 61 more."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named, others = (ranks[:3], f"{len(ranks) - 3:,} more") if len(ranks) > NAMED_RANKS else (ranks[:-1], ranks[-1])
    return f"ranks {', '.join(map(str, named))} and {others}"


def plural(count: int, noun: str) -> str:
    """1 rank, 2 ranks."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
