"""A partition: the fragments of a pack that each rank holds, as columns for bulk work and as tuples to read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deltaspan.layout.neighbours import Chains, link
from deltaspan.layout.pack import Int64, Pack, as_int, expand_spans, read_only


class Fragment(NamedTuple):
    """Tokens [offset, offset + length) of one document, held by a rank as one piece; it may be empty.

    prev, next: (rank, slot) of the document's non-empty fragments before and after it, None at an end of the
    document and for an empty fragment. The slot counts a rank's fragments in local order.
    """

    doc: int
    offset: int
    length: int
    prev: tuple[int, int] | None
    next: tuple[int, int] | None


class Pieces(NamedTuple):
    """Fragments of all ranks as int64 columns [fragments], rank after rank, within a rank in local order."""

    rank: Int64
    doc: Int64
    offset: Int64
    length: Int64


@dataclass(frozen=True, slots=True, eq=False)
class FragmentTable:
    """All fragments of a partition as read-only int64 columns [fragments], rank after rank in local order."""

    rank: Int64
    slot: Int64  # position among the rank's fragments
    doc: Int64
    offset: Int64  # of the first token within the document
    length: Int64  # in tokens, may be 0
    start: Int64  # global index of the first token
    local_start: Int64  # index of the first token within the rank's shard
    prev: Int64  # row of the document's fragment before it in this table, -1 if none
    next: Int64  # row of the one after it

    def __len__(self) -> int:
        return self.rank.size


class Partition:
    """An immutable assignment of every token of a pack to one rank, made by `partition`. Equal by value, picklable.

    pack, world_size, layout    what was partitioned; cu_seqlens, num_documents and total_tokens are the pack's
    table                       all fragments as columns
    longest                     tokens of the longest fragment
    rank_rows                   int64 [world_size + 1]; rank r owns the table's rows rank_rows[r]:rank_rows[r + 1]
    crossing_in, crossing_out   bool [fragments]: has a predecessor, a successor (one on the same rank counts)

    A plain class, no tuple or dataclass, so that walks over a module's inputs pass it on as one opaque leaf.
    """

    __slots__ = (
        "_chains",
        "_fragments",
        "crossing_in",
        "crossing_out",
        "layout",
        "longest",
        "pack",
        "rank_rows",
        "table",
        "world_size",
    )

    def __init__(self, pack: Pack, world_size: int, layout: str, pieces: Pieces) -> None:
        rank, doc, offset, length = pieces
        rank_rows = np.searchsorted(rank, np.arange(world_size + 1))
        start = pack.offsets[doc] + offset
        chains, prev, next = link(pack.num_documents, doc, start, length)
        slot = np.arange(rank.size) - rank_rows[rank]
        tokens_before = np.concatenate(([0], np.cumsum(length)))  # [fragments + 1], in rows before each
        local_start = tokens_before[:-1] - tokens_before[rank_rows[rank]]
        columns = (rank, slot, doc, offset, length, start, local_start, prev, next)

        fields = {
            "pack": pack,
            "world_size": world_size,
            "layout": layout,
            "table": FragmentTable(*map(read_only, columns)),
            "rank_rows": read_only(rank_rows),
            "crossing_in": read_only(prev >= 0),
            "crossing_out": read_only(next >= 0),
            "longest": int(length.max(initial=0)),
            "_chains": chains,
            "_fragments": None,
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Partition is immutable, {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Partition is immutable, {name} cannot be deleted")

    @property
    def cu_seqlens(self) -> tuple[int, ...]:
        return self.pack.cu_seqlens

    @property
    def num_documents(self) -> int:
        return self.pack.num_documents

    @property
    def total_tokens(self) -> int:
        return self.pack.total_tokens

    @property
    def fragments(self) -> tuple[tuple[Fragment, ...], ...]:
        """Per rank, its fragments in local order. Built when first asked for; bulk work reads `table`."""
        if self._fragments is None:
            table = self.table
            names = [*zip(table.rank.tolist(), table.slot.tolist(), strict=True), None]  # names[-1] is "no neighbour"
            columns = (table.doc, table.offset, table.length, table.prev, table.next)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            all_ranks = [Fragment(d, o, n, names[before], names[after]) for d, o, n, before, after in rows]
            per_rank = tuple(tuple(all_ranks[self.rows(rank)]) for rank in range(self.world_size))
            object.__setattr__(self, "_fragments", per_rank)
        return self._fragments

    def chains(self) -> Chains:
        """The non-empty fragments of each document in the order of its tokens."""
        return self._chains

    def rows(self, rank: int) -> slice:
        """The rows of `table` that `rank` owns."""
        if as_int("rank", rank, minimum=0) >= self.world_size:
            raise ValueError(f"rank must be below the world size {self.world_size}, got {rank}")
        return slice(int(self.rank_rows[rank]), int(self.rank_rows[rank + 1]))

    def tokens(self, rank: int) -> int:
        """Number of tokens that `rank` holds."""
        return int(self.table.length[self.rows(rank)].sum())

    def token_ids(self, rank: int) -> Int64:
        """Global index of each local token, int64 [tokens(rank)]."""
        rows = self.rows(rank)
        start = self.table.start[rows]
        return expand_spans(start, start + self.table.length[rows])[1]

    def digest(self) -> bytes:
        """SHA-256 of all that the ranks of a group must agree on; the same on every machine."""
        head = (self.layout, self.world_size, self.num_documents, len(self.table))
        sha = hashlib.sha256(repr(head).encode())
        for column in (self.pack.offsets, *self._pieces()):
            sha.update(column.astype("<i8").tobytes())
        return sha.digest()

    def _pieces(self) -> Pieces:
        return Pieces(self.table.rank, self.table.doc, self.table.offset, self.table.length)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Partition):
            return NotImplemented
        same_head = (self.pack, self.world_size, self.layout) == (other.pack, other.world_size, other.layout)
        return same_head and all(map(np.array_equal, self._pieces(), other._pieces()))

    def __hash__(self) -> int:
        return hash((self.pack, self.world_size, self.layout))

    def __reduce__(self) -> tuple:
        return Partition, (self.pack, self.world_size, self.layout, self._pieces())

    def __repr__(self) -> str:
        return (
            f"<Partition {self.layout}: {self.total_tokens} tokens in {self.num_documents} documents, "
            f"{len(self.table)} fragments on {self.world_size} ranks>"
        )
