"""A partition as the flat integer tables that kernels and exchange read.

Chunks are counted over a rank's fragments in local order; crossing fragments are counted over the whole group,
rank by rank in local order, once for those that are left (out numbers) and once for those that are entered (in
numbers).
"""

from typing import Generic, NamedTuple, TypeVar

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


Index = TypeVar("Index")  # integers: np.ndarray here, a tensor where they are used


class Chains(NamedTuple, Generic[Index]):
    """Affine maps to be composed one after another, along chains side by side, those with more members first.

    A member is a row of maps, a row of offsets, and the place for what is composed up to it, that one included. It
    stands twice: step by step, so that the chains of a step are a prefix of the step's before, and chain by chain.
    """

    steps: tuple[tuple[Index, Index, Index], ...]  # by step: map rows, offset rows, places
    table: Index  # [n, 3], the same chain by chain
    starts: Index  # [chains + 1], each chain's first member
    wanted: Index  # [chains], 1 where composed maps are wanted beside composed offsets
    maps: bool  # whether any are
    places: int  # how many there are; some may be for others to fill


class Links(NamedTuple):
    """The seams that state crosses, along every document's chain of fragments.

    forward: maps and offsets by out number, of the fragments that are left, and places by in number, of those entered.
    backward, from a chain's end: maps by out number, of the fragments entered; offsets by in number, of the same; and
    places by out number, of those left. What nothing enters from beyond has no map: there the row means nothing.
    """

    forward: Chains[np.ndarray]
    backward: Chains[np.ndarray]


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


def crossings(part: Partition) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fragments that state leaves, that it enters, and that it does both, counted by rank: three int64 arrays [W]."""
    return tuple(
        np.add.reduceat(np.append(column, 0).astype(np.int64), part.rank_rows[:-1]) * (np.diff(part.rank_rows) > 0)
        for column in (part.crossing_out, part.crossing_in, part.crossing_out & part.crossing_in)
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
    successor = table.next[rows]
    out, entered = out_number[rows], in_number[successor]

    return Links(
        forward=chains_of(chain, position, out, out, entered),
        backward=chains_of(chain, links[chain] - 1 - position, out_number[successor], entered, out),
    )


def chains_of(
    chain: np.ndarray,
    step: np.ndarray,
    maps: np.ndarray,
    offsets: np.ndarray,
    place: np.ndarray,
    *,
    wanted: np.ndarray | None = None,
    places: int | None = None,
) -> Chains[np.ndarray]:
    """Chains from their members [n], in any order: whose each is, its step there, and the member.

    wanted: by number of a chain, whether its composed maps are; places: how many, if more than members.
    """
    members = np.bincount(chain)
    side_by_side = np.lexsort((chain, -members[chain], step))
    one_by_one = np.lexsort((step, chain, -members[chain]))
    columns = np.stack([maps, offsets, place], axis=1)
    cuts = np.cumsum(np.bincount(step))[:-1]
    steps = [tuple(np.ascontiguousarray(rows.T)) for rows in np.split(columns[side_by_side], cuts)] if len(step) else []
    heads = chain[one_by_one][step[one_by_one] == 0]  # the chains, in their order
    flags = np.zeros(len(heads), dtype=np.int64) if wanted is None else wanted[heads].astype(np.int64)
    return Chains(
        steps=tuple(steps),
        table=columns[one_by_one],
        starts=np.append(0, np.cumsum(members[heads])),
        wanted=flags,
        maps=bool(flags.any()),
        places=len(place) if places is None else places,
    )


class RingHop(NamedTuple):
    """One rank's part in one step of the ring; numbers are local, in the order of rows sent or arriving."""

    source: np.ndarray  # [sent], fragments whose state goes one link on
    source_in: np.ndarray  # [sent], what the step before reached in the same fragments; meaningless in the first
    through: np.ndarray  # [sent], the same fragments among those that state enters and leaves; meaningless there too
    target: np.ndarray  # [received], fragments that are reached
    send_counts: tuple[int, ...]  # [W]
    recv_counts: tuple[int, ...]


def ring_hops(part: Partition, rank: int) -> tuple[list[RingHop], list[RingHop]]:
    """The steps of `chain_links` as one rank sees them: forward from out numbers to in numbers, backward the
    reverse."""
    n_out, n_in = (np.cumsum(np.append(0, counts)) for counts in crossings(part)[:2])
    links = chain_links(part)
    own = part.rows(rank)
    through = np.flatnonzero(part.crossing_in[own][part.crossing_out[own]]) + n_out[rank]

    def hop(source: tuple, source_in: tuple, target: tuple, out: np.ndarray) -> RingHop:
        (sources, source_base), (entered, entered_base), (targets, target_base) = source, source_in, target
        sender = np.searchsorted(source_base, sources, side="right") - 1
        receiver = np.searchsorted(target_base, targets, side="right") - 1
        sent = np.flatnonzero(sender == rank)
        sent = sent[np.argsort(receiver[sent], kind="stable")]
        arriving = np.flatnonzero(receiver == rank)
        arriving = arriving[np.argsort(sender[arriving], kind="stable")]
        return RingHop(
            sources[sent] - source_base[rank],
            entered[sent] - entered_base[rank],
            np.searchsorted(through, out[sent]),
            targets[arriving] - target_base[rank],
            tuple(np.bincount(receiver[sent], minlength=part.world_size).tolist()),
            tuple(np.bincount(sender[arriving], minlength=part.world_size).tolist()),
        )

    forward, backward = links.forward.steps, links.backward.steps
    reached = [step[2] for step in (*forward[:1], *forward)]
    return (
        [hop((out, n_out), (reached[s][: len(out)], n_in), (i, n_in), out) for s, (out, _, i) in enumerate(forward)],
        [hop((i, n_in), (entered_out, n_out), (out, n_out), entered_out) for entered_out, i, out in backward],
    )
