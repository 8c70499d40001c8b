"""One rank's segments as flat integer tables, and the joints at which state passes from one to the next.

State leaves a segment where it goes on to the next one of the same fragment (a joint) or, at the end of a fragment, to
another fragment (a seam). The segments that it leaves are counted in their order by left numbers, those that it enters
by entered numbers.
"""

from typing import Generic, NamedTuple

import numpy as np

from deltaspan.layout import Partition
from deltaspan.plan.cuts import Cut, count_of, segment_starts
from deltaspan.plan.tables import Chains, Index, chains_of, chunk_grid


class SegmentTable(NamedTuple):
    """One rank's segments, int64, fragment by fragment; each has a chunk. Joint j follows segment joined[j]."""

    fragment: np.ndarray  # [S]
    first: np.ndarray  # [S], first chunk
    count: np.ndarray  # [S], chunks
    joined: np.ndarray  # [J], segments that state leaves for the next of their fragment
    left: np.ndarray  # [n_left], segments that state leaves
    entered: np.ndarray  # [n_entered], segments that it enters
    through: np.ndarray  # [n_through], segments that it enters and leaves: nobody reads the map of any other
    bridges: np.ndarray  # [B], those of cut fragments: their maps carry it both ways


class Passage(NamedTuple, Generic[Index]):
    """How states pass a rank's joints in one direction, from the end of a fragment at which they arrive to the other.

    Far state = map x near state + offset. The first segment of a fragment has no map if nothing reaches the fragment.
    The chains go along the segments of every fragment; their places are first the numbers of the segments that are
    reached, then one for each fragment that hands on to the exchange. There are none where no fragment is cut.
    """

    chains: Chains[Index]
    in_place: bool  # whether the chains put what is composed with an offset where that was
    composes: bool  # False if they leave all offsets as and where they are: of one member each, for segments
    reached: int  # segments that state reaches
    arriving: Index  # [n], numbers of those that the exchange reaches
    through: Index  # [t], numbers of those behind the joints of the fragments that it reaches
    source: Index  # [t], which arrival each of them has to be told
    handed: Index  # [h], places of the fragments that hand on to the exchange what it brought them


def segment_table(part: Partition, rank: int, cut: Cut) -> SegmentTable:
    """Cuts every fragment of a rank into pieces of whole chunks; those that would have none are left out."""
    starts = segment_starts(chunk_grid(part, rank).count, cut)
    count = np.diff(starts)
    held = np.flatnonzero(count)
    fragment = held // count_of(cut)
    goes_on = np.zeros(len(held), dtype=bool)
    goes_on[:-1] = np.diff(fragment) == 0
    comes_on = np.roll(goes_on, 1)
    rows = part.rows(rank)
    left = goes_on | part.crossing_out[rows][fragment]
    entered = comes_on | part.crossing_in[rows][fragment]
    chosen = goes_on, left, entered, left & entered, left & entered & (goes_on | comes_on)
    return SegmentTable(fragment, starts[held], count[held], *map(np.flatnonzero, chosen))


def passages(part: Partition, rank: int, table: SegmentTable) -> tuple[Passage, Passage]:
    """Forward: maps are counted among those of segments that state goes through, offsets by left numbers, and entered
    segments are reached. Backward: maps by the numbers of bridges, offsets by entered numbers, and left segments are
    reached. A segment at whose near end nothing arrives has no map, and its row means nothing.
    """
    own = part.rows(rank)
    fragments = np.arange(own.stop - own.start)
    left, entered = (numbers(chosen, table) for chosen in (table.left, table.entered))
    through, bridge = (
        np.minimum(numbers(chosen, table), max(len(chosen) - 1, 0)) for chosen in (table.through, table.bridges)
    )
    first, last = (np.searchsorted(table.fragment, fragments, side) for side in ("left", "right"))
    out, come_in = np.flatnonzero(part.crossing_out[own]), np.flatnonzero(part.crossing_in[own])
    of_joint = table.fragment[table.joined]  # the fragment
    joints = np.bincount(of_joint, minlength=len(fragments))
    first_joint = np.cumsum(joints) - joints
    position = np.arange(len(of_joint)) - first_joint[of_joint]

    def passage(*, near, far, step, maps, offsets, reached, begin, arriving, end, leaving) -> Passage:
        """near, far: the segments at each joint. begin, end: the segments at each fragment's ends, and which fragments
        are reached there by the exchange, so that their composed maps are wanted, and hand on to it."""
        arrival = np.full(len(fragments), -1)
        arrival[arriving] = np.arange(len(arriving))
        behind = np.flatnonzero(arrival[of_joint] >= 0)
        count = len(near) + len(arriving)
        ends = leaving if len(near) else leaving[:0]
        segment = np.append(near, end[ends])
        chains = chains_of(
            np.append(of_joint, ends), np.append(step, joints[ends]), maps[segment], offsets[segment],
            np.append(reached[far], count + np.arange(len(ends))), wanted=arrival >= 0, places=count + len(ends),
        )  # fmt: skip
        handed = count + np.flatnonzero(arrival[ends] >= 0)
        of_behind = reached[far[behind]], arrival[of_joint[behind]]
        _, offset, place = chains.table.T
        in_place = len(place) == chains.places == count and np.array_equal(offset, place)
        composes = not in_place or len(chains.steps) > 1
        return Passage(chains, in_place, composes, count, reached[begin[arriving]], *of_behind, handed)

    before, after = table.joined, table.joined + 1
    forward = passage(
        near=before, far=after, step=position, maps=through, offsets=left, reached=entered,
        begin=first, arriving=come_in, end=last - 1, leaving=out,
    )  # fmt: skip
    backward = passage(
        near=after, far=before, step=joints[of_joint] - 1 - position, maps=bridge, offsets=entered, reached=left,
        begin=last - 1, arriving=out, end=first, leaving=come_in,
    )  # fmt: skip
    return forward, backward


def numbers(chosen: np.ndarray, table: SegmentTable) -> np.ndarray:
    """[S]: each segment's number among the chosen; their count for one that is not."""
    numbers = np.full(len(table.first), len(chosen))
    numbers[chosen] = np.arange(len(chosen))
    return numbers
