"""Which rank holds which tokens: a layout cuts the documents of a pack into fragments and hands them to ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from deltaspan.layout.fragments import Partition, Pieces
from deltaspan.layout.pack import Int64, Pack, Span, as_int, as_int64, as_list

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")


def partition(
    cu_seqlens: ArrayLike,
    world_size: int,
    layout: str = "contiguous",
    *,
    fragments: Sequence | None = None,
    cut_points: Sequence | None = None,
) -> Partition:
    """Assigns every token of a pack to one of `world_size` ranks.

    cu_seqlens: offsets of the documents, from 0, non-decreasing: ints, a numpy array or an integer CPU tensor [N + 1].
    layout:
        "contiguous"            the pack in W near-equal intervals, rank r holds interval r
        "zigzag"                the pack in 2W near-equal parts, rank r holds parts r and 2W - 1 - r
        "zigzag_per_document"   every document in 2W pieces, near-equal or cut at `cut_points[doc]` (2W + 1 offsets
                                from 0 to its length, non-decreasing), rank r holds pieces r and 2W - 1 - r of each
    fragments: an explicit table instead, (doc, offset, length) in one list per rank or (doc, offset, length, rank) in
        one flat list; within a rank in the order of (doc, offset). layout and cut_points are then ignored, and the
        layout reads "explicit".

    Raises ValueError, and TypeError for a wrong Python type, naming the argument, the value and what is accepted.
    """
    pack = Pack(cu_seqlens)
    world_size = as_int("world_size", world_size, minimum=1)
    if fragments is not None:
        return Partition(pack, world_size, "explicit", explicit(pack, world_size, fragments))
    if not isinstance(layout, str):
        raise TypeError(f"layout must be a string, got {layout!r}")
    if cut_points is not None and layout != "zigzag_per_document":
        raise ValueError(f"cut_points belong to the layout zigzag_per_document, got them with {layout!r}")
    if layout == "contiguous":
        return Partition(pack, world_size, layout, contiguous(pack, world_size))
    if layout == "zigzag":
        return Partition(pack, world_size, layout, zigzag(pack, world_size))
    if layout == "zigzag_per_document":
        return Partition(pack, world_size, layout, zigzag_per_document(pack, world_size, cut_points))
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")


def near_equal(total: int, n: int) -> tuple[Span, ...]:
    """`total` tokens in n intervals: each gets total // n, and the first total % n of them one more."""
    cuts = near_equal_cuts(as_int("total", total, minimum=0), as_int("n", n, minimum=1)).tolist()
    return tuple(map(Span, cuts[:-1], cuts[1:]))


def near_equal_cuts(total: int | Int64, n: int) -> Int64:
    """The n + 1 borders of `near_equal`, int64 [..., n + 1] for totals of shape [...]."""
    base, extra = np.divmod(np.expand_dims(total, -1), n)
    index = np.arange(n + 1)
    return index * base + np.minimum(index, extra)


def contiguous(pack: Pack, world_size: int) -> Pieces:
    """Rank r takes interval r of W."""
    return _cut_pack(pack, world_size)


def zigzag(pack: Pack, world_size: int) -> Pieces:
    """Rank r takes part r, then part 2W - 1 - r, of 2W."""
    part, *columns = _cut_pack(pack, 2 * world_size)
    rank = np.minimum(part, 2 * world_size - 1 - part)
    return _by_rank(Pieces(rank, *columns))


def _cut_pack(pack: Pack, n: int) -> Pieces:
    """The pack in n near-equal intervals cut at documents, all non-empty, in order; as rank stands the interval."""
    cuts = near_equal_cuts(pack.total_tokens, n)
    edges = np.union1d(cuts, pack.offsets)
    start = edges[:-1]
    interval = np.searchsorted(cuts, start, side="right") - 1  # of equal cuts the last: the interval with tokens
    doc = np.searchsorted(pack.offsets, start, side="right") - 1
    return Pieces(interval, doc, start - pack.offsets[doc], np.diff(edges))


def zigzag_per_document(pack: Pack, world_size: int, cut_points: Sequence | None = None) -> Pieces:
    """Rank r takes pieces r and 2W - 1 - r, of 2W, of every document, also when they are empty."""
    cuts = _read_cut_points(pack, world_size, cut_points)  # [documents, 2W + 1]
    rank = np.arange(world_size)
    piece = np.stack([rank, 2 * world_size - 1 - rank], axis=-1)[:, None, :]  # [ranks, 1, front and back]
    doc = np.arange(pack.num_documents)[None, :, None]
    offset = cuts[doc, piece]
    length = cuts[doc, piece + 1] - offset
    columns = np.broadcast_arrays(rank[:, None, None], doc, offset, length)  # [ranks, documents, 2]
    return Pieces(*(column.ravel() for column in columns))


def explicit(pack: Pack, world_size: int, fragments: Sequence) -> Pieces:
    """Each rank takes what the caller's table gives it, once the table is known to hold every token once."""
    pieces = _read_fragments(world_size, fragments)
    _check_fragments(pack, pieces)
    _check_cover(pack, pieces)
    return pieces


def _by_rank(pieces: Pieces) -> Pieces:
    """Rank after rank, keeping the order within each."""
    order = np.argsort(pieces.rank, kind="stable")
    return Pieces(*(column[order] for column in pieces))


def _read_cut_points(pack: Pack, world_size: int, cut_points: Sequence | None) -> Int64:
    """Borders of the 2W pieces of every document, [documents, 2W + 1]."""
    lengths, borders = np.diff(pack.offsets), 2 * world_size + 1
    if cut_points is None:
        return near_equal_cuts(lengths, 2 * world_size)
    rows = [as_int64(f"cut_points[{doc}]", cuts) for doc, cuts in enumerate(as_list("cut_points", cut_points))]
    if len(rows) != pack.num_documents:
        raise ValueError(f"cut_points must hold one list for each of {pack.num_documents} documents, got {len(rows)}")
    for doc, row in enumerate(rows):
        rises = row.size == borders and row[0] == 0 and row[-1] == lengths[doc] and (np.diff(row) >= 0).all()
        if not rises:
            raise ValueError(
                f"cut_points[{doc}] must be {borders} offsets (2 * world_size + 1) that rise from 0 to the document's "
                f"length {lengths[doc]} and never fall, got {row.size}: {np.array2string(row, threshold=20)}"
            )
    return np.array(rows, dtype=np.int64).reshape(len(rows), borders)


def _read_fragments(world_size: int, fragments: Sequence) -> Pieces:
    """Columns of an explicit table in either form, as they stand."""
    items = [as_list(f"fragments[{i}]", item) for i, item in enumerate(as_list("fragments", fragments))]
    entry = next((item[0] for item in items if item), None)  # a number in a flat table, a record in one per rank
    if not items or (entry is not None and not isinstance(entry, list | tuple) and np.ndim(entry) == 0):
        doc, offset, length, rank = _read_records("fragments", items, ("doc", "offset", "length", "rank")).T
        pieces = Pieces(rank, doc, offset, length)
        _refuse(pieces, (rank < 0) | (rank >= world_size), f"the world size is {world_size}")
        return _by_rank(pieces)
    if len(items) != world_size:
        raise ValueError(f"fragments must hold one list for each of {world_size} ranks, got {len(items)}")
    tables = [_read_records(f"fragments[{rank}]", item, ("doc", "offset", "length")) for rank, item in enumerate(items)]
    rank = np.repeat(np.arange(world_size), [len(table) for table in tables])
    return Pieces(rank, *np.concatenate(tables).T)


def _read_records(name: str, records: list, fields: tuple[str, ...]) -> Int64:
    """[len(records), len(fields)]"""
    for i, record in enumerate(records):
        if len(as_list(f"{name}[{i}]", record)) != len(fields):
            raise ValueError(f"{name}[{i}] must be ({', '.join(fields)}), got {record!r}")
    return as_int64(name, records, ndim=2) if records else np.empty((0, len(fields)), dtype=np.int64)


def _check_fragments(pack: Pack, pieces: Pieces) -> None:
    """Each fragment lies within its document, and each rank's fragments stand in the order of (doc, offset)."""
    rank, doc, offset, length = pieces
    _refuse(pieces, (doc < 0) | (doc >= pack.num_documents), f"the pack has {pack.num_documents} documents")
    _refuse(pieces, (offset < 0) | (length < 0), "neither offset nor length may be negative")
    _refuse(pieces, length > np.diff(pack.offsets)[doc] - offset, "the document is shorter")
    start = pack.offsets[doc] + offset
    falls = (np.diff(rank) == 0) & ((np.diff(doc) < 0) | ((np.diff(doc) == 0) & (np.diff(start) < 0)))
    _refuse(pieces, np.append(False, falls), "it comes after a later one; a rank's order is that of (doc, offset)")


def _refuse(pieces: Pieces, bad: np.ndarray, reason: str) -> None:
    if bad.any():
        rank, doc, offset, length = (column[bad.argmax()] for column in pieces)
        raise ValueError(f"fragments: rank {rank} is given (doc {doc}, offset {offset}, length {length}), but {reason}")


def _check_cover(pack: Pack, pieces: Pieces) -> None:
    """The non-empty fragments, in global order, begin where the one before ends, from token 0 to the last."""
    start = pack.offsets[pieces.doc] + pieces.offset
    filled = np.flatnonzero(pieces.length)
    rows = filled[np.argsort(start[filled], kind="stable")]
    begins = np.append(start[rows], pack.total_tokens)
    reached = np.append(0, start[rows] + pieces.length[rows])
    wrong = begins != reached
    if not wrong.any():
        return
    at = int(wrong.argmax())
    low, high = sorted((int(begins[at]), int(reached[at])))
    doc = int(np.searchsorted(pack.offsets, low, side="right")) - 1
    document = pack.document(doc)
    if begins[at] > reached[at]:
        tokens = Span(low - document.start, min(high, document.stop) - document.start)
        raise ValueError(f"fragments: tokens {tokens} of document {doc} ({len(document)} tokens) belong to no rank")
    high = min(high, int(reached[at + 1]))
    tokens = Span(low - document.start, high - document.start)
    one, other = pieces.rank[rows[at - 1 : at + 1]]
    raise ValueError(f"fragments: tokens {tokens} of document {doc} are given twice, to ranks {one} and {other}")
