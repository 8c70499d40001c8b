"""A partition as the flat integer tables that kernels and exchange read.

Chunks are counted over a rank's fragments in local order; crossing fragments are counted over the whole group,
rank by rank in local order, once for those that are left (out numbers) and once for those that are entered (in
numbers).
"""

from typing import NamedTuple

import numpy as np

from deltaspan.layout import Partition

CHUNK = 64


class ChunkGrid(NamedTuple):
    """One rank's chunks, int64: chunk c covers local tokens start[c] .. start[c] + length[c]."""

    start: np.ndarray  # [NC]
    length: np.ndarray  # [NC], 1 to 64
    first: np.ndarray  # [n_frag], first chunk of each fragment
    count: np.ndarray  # [n_frag], its chunks; 0 for an empty fragment


class WalkOrder(NamedTuple):
    """Runs of chunks that are walked side by side, longest first, so that the active ones are always a prefix."""

    order: np.ndarray  # [S], the runs in walking order
    first: np.ndarray  # [S], first chunk, in walking order
    count: np.ndarray  # [S], chunks, in walking order, never rising
    active: tuple[int, ...]  # by step, how many runs still have a chunk


class Links(NamedTuple):
    """The seams that state crosses, step by step along every document's chain of fragments.

    Step s of `forward` holds link s of every chain that has one, as (out numbers, in numbers); step s of `backward`
    holds link s from the chain's end, as (out numbers, in numbers, out numbers of the fragments entered there).
    The chains with more links come first, so that the chains of a step are a prefix of the step's before.
    """

    forward: tuple[tuple[np.ndarray, np.ndarray], ...]
    backward: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]


def chunk_grid(part: Partition, rank: int) -> ChunkGrid:
    """Cuts a rank's fragments into chunks of 64 tokens; every fragment begins a chunk."""
    rows = part.rows(rank)
    length, start = part.table.length[rows], part.table.local_start[rows]
    count = -(-length // CHUNK)
    first = np.cumsum(count) - count
    inside = np.arange(count.sum()) - np.repeat(first, count)
    return ChunkGrid(
        start=np.repeat(start, count) + CHUNK * inside,
        length=np.minimum(CHUNK, np.repeat(length, count) - CHUNK * inside),
        first=first,
        count=count,
    )


def walk_order(first: np.ndarray, count: np.ndarray) -> WalkOrder:
    """The order in which runs of chunks, given by first chunk and count, are walked side by side."""
    order = np.argsort(-count, kind="stable")
    steps = int(count.max(initial=0))
    active = np.searchsorted(-count[order], -np.arange(steps), side="left")
    return WalkOrder(order, first[order], count[order], tuple(active.tolist()))


def chain_links(part: Partition) -> Links:
    """Every seam between two fragments of a document, in the order in which states pass it."""
    table = part.table
    out_number = np.cumsum(part.crossing_out) - 1
    in_number = np.cumsum(part.crossing_in) - 1
    chains = part.chains()
    # one link for each fragment with a successor, in the order of the pack
    linked = part.crossing_out[chains.rows]
    rows = chains.rows[linked]
    chain = np.repeat(np.arange(part.num_documents), np.diff(chains.first))[linked]
    links = np.bincount(chain, minlength=part.num_documents)
    position = np.arange(len(rows)) - np.repeat(np.cumsum(links) - links, links)
    total = links[chain]
    successor = table.next[rows]
    out, entered = out_number[rows], in_number[successor]

    def by_step(step: np.ndarray, *columns: np.ndarray) -> tuple:
        if not len(step):
            return ()
        order = np.lexsort((chain, -total, step))
        cuts = np.cumsum(np.bincount(step))[:-1]
        return tuple(zip(*(np.split(column[order], cuts) for column in columns), strict=True))

    return Links(
        forward=by_step(position, out, entered),
        backward=by_step(total - 1 - position, out, entered, out_number[successor]),
    )
