"""Who precedes and who follows each fragment within its document, and which tokens a convolution needs of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deltaspan.layout.pack import Int64, as_int, expand_spans, read_only

if TYPE_CHECKING:
    from deltaspan.layout.fragments import Partition


@dataclass(frozen=True, slots=True, eq=False)
class Chains:
    """Each document's non-empty fragments in the order of its tokens; one after another, the pack in global order.

    rows: int64 [non-empty fragments], rows of the fragment table; first: int64 [num_documents + 1]. The chain of
    document d is rows[first[d]:first[d + 1]].
    """

    rows: Int64
    first: Int64

    def of(self, doc: int) -> Int64:
        """Table rows of one document's chain."""
        return self.rows[self.first[doc] : self.first[doc + 1]]


def link(num_documents: int, doc: Int64, start: Int64, length: Int64) -> tuple[Chains, Int64, Int64]:
    """Chains of all documents, and for each fragment the table rows of its predecessor and successor, -1 if none.

    doc, start (first global token), length: int64 [fragments]. Empty fragments belong to no chain.
    """
    filled = np.flatnonzero(length)
    rows = filled[np.argsort(start[filled])]  # non-empty fragments never start at the same token
    first = np.zeros(num_documents + 1, dtype=np.int64)
    np.cumsum(np.bincount(doc[rows], minlength=num_documents), out=first[1:])

    left, right = rows[:-1], rows[1:]
    joined = doc[left] == doc[right]
    prev, next = np.full_like(start, -1), np.full_like(start, -1)
    prev[right[joined]] = left[joined]
    next[left[joined]] = right[joined]
    return Chains(read_only(rows), read_only(first)), prev, next


@dataclass(frozen=True, slots=True, eq=False)
class HaloPlan:
    """What one rank sends and receives so that a causal convolution of kernel size `width` sees across fragments.

    Forward, a fragment needs the width - 1 tokens of its document before it (its history); backward, the gradients
    of the width - 1 tokens after it (its tail). Each comes from whichever rank owns the token, this rank included.
    A received pool is grouped by source rank, inside by slot of the receiving fragment, then by token; a sent one by
    destination rank, inside in the order of the receiver. All arrays are int64, read-only; W is the world size.
    """

    history_row: Int64  # [n_frag, width - 1] row of the received pool for token offset - (width - 1) + k, -1 none
    recv_counts: Int64  # [W] rows from each rank
    send_index: Int64  # [sum(send_counts)] local tokens, in the order sent
    send_counts: Int64  # [W] rows for each rank

    tail_row: Int64  # [n_frag, width - 1] row of the received pool for token offset + length + k, -1 none
    tail_recv_counts: Int64  # [W]
    head_send_index: Int64  # [sum(head_send_counts)] local tokens whose gradient rows go out, in the order sent
    head_send_counts: Int64  # [W]


def halo_plan(part: Partition, width: int, rank: int) -> HaloPlan:
    """The halo exchange of one rank for a causal convolution of kernel size `width` >= 1 (1 needs no halo).

    A fragment shorter than the halo is reached across: the tokens may come from several fragments and ranks.
    Raises ValueError for a width below 1 or a rank outside the partition.
    """
    halo = as_int("width", width, minimum=1) - 1
    own = part.rows(rank)
    own = own.start + np.flatnonzero(part.table.length[own])
    everyone = part.chains().rows
    plan = (
        *_receive(part, rank, halo, _history(part, own, halo)),
        *_send(part, own, _history(part, everyone, halo)),
        *_receive(part, rank, halo, _tail(part, own, halo)),
        *_send(part, own, _tail(part, everyone, halo)),
    )
    return HaloPlan(*(read_only(array) for array in plan))


class _Wanted(NamedTuple):
    """Fragment rows[i] wants the global tokens [start[i], stop[i]); column k of its halo stands for first[i] + k."""

    rows: Int64
    first: Int64
    start: Int64
    stop: Int64


def _history(part: Partition, rows: Int64, halo: int) -> _Wanted:
    """The last `halo` tokens before each fragment that lie within its document."""
    stop = part.table.start[rows]
    first = stop - halo
    return _Wanted(rows, first, np.maximum(first, part.pack.offsets[part.table.doc[rows]]), stop)


def _tail(part: Partition, rows: Int64, halo: int) -> _Wanted:
    """The first `halo` tokens after each fragment that lie within its document."""
    first = part.table.start[rows] + part.table.length[rows]
    return _Wanted(rows, first, first, np.minimum(first + halo, part.pack.offsets[part.table.doc[rows] + 1]))


def _receive(part: Partition, rank: int, halo: int, wanted: _Wanted) -> tuple[Int64, Int64]:
    """Rows of the pool that `rank` receives, int64 [n_frag, halo], and how many come from each rank, int64 [W].

    wanted: by the rank's own non-empty fragments in local order.
    """
    table, chain = part.table, part.chains().rows
    fragment, token = expand_spans(wanted.start, wanted.stop)
    owner = chain[np.searchsorted(table.start[chain], token, side="right") - 1]
    source = table.rank[owner]
    pool_row = np.empty_like(token)
    pool_row[np.argsort(source, kind="stable")] = np.arange(token.size)  # stable: slot, then token, within a source

    own = part.rows(rank)
    rows = np.full((own.stop - own.start, halo), -1)
    rows[table.slot[wanted.rows[fragment]], token - wanted.first[fragment]] = pool_row
    return rows, np.bincount(source, minlength=part.world_size)


def _send(part: Partition, own: Int64, wanted: _Wanted) -> tuple[Int64, Int64]:
    """Local tokens that a rank sends, in order, and how many go to each rank, int64 [W].

    own: the rank's non-empty fragments. wanted: by every non-empty fragment in global order, so that both its starts
    and its stops ascend, and those who want a token of one fragment are neighbours.
    """
    table = part.table
    start, stop = table.start[own], table.start[own] + table.length[own]
    provider, consumer = expand_spans(
        np.searchsorted(wanted.stop, start, side="right"), np.searchsorted(wanted.start, stop, side="left")
    )
    pair, token = expand_spans(
        np.maximum(start[provider], wanted.start[consumer]), np.minimum(stop[provider], wanted.stop[consumer])
    )
    sender, receiver = own[provider[pair]], wanted.rows[consumer[pair]]
    order = np.lexsort((token, receiver))  # rows of the table ascend by rank, then slot
    local_token = table.local_start[sender] + token - table.start[sender]
    return local_token[order], np.bincount(table.rank[receiver], minlength=part.world_size)
