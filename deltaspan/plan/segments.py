"""One rank's segments as flat integer tables, and the joints at which state passes from one to the next.

State leaves a segment where it goes on to the next one of the same fragment (a joint) or, at the end of a fragment, to
another fragment (a seam). The segments that it leaves are counted in their order by left numbers, those that it enters
by entered numbers.
"""

from typing import Generic, NamedTuple, TypeVar

import numpy as np

from deltaspan.layout import Partition
from deltaspan.plan.tables import by_step, chunk_grid


class SegmentTable(NamedTuple):
    """One rank's segments, int64, fragment by fragment; each has a chunk. Joint j follows segment joined[j]."""

    fragment: np.ndarray  # [S]
    first: np.ndarray  # [S], first chunk
    count: np.ndarray  # [S], chunks
    joined: np.ndarray  # [J], segments that state leaves for the next of their fragment
    left: np.ndarray  # [n_left], segments that state leaves
    entered: np.ndarray  # [n_entered], segments that it enters
    bridges: np.ndarray  # [B], segments of cut fragments that it enters and leaves: their maps carry it both ways


Index = TypeVar("Index")  # integers: np.ndarray here, a tensor where they are used


class Passage(NamedTuple, Generic[Index]):
    """How states pass a rank's joints in one direction, from the end of a fragment at which they arrive to the other.

    A segment has a map and an offset: far state = map x near state + offset. `steps` goes along all fragments side by
    side, those with more joints first, so that the fragments of a step are a prefix of the step's before.
    """

    steps: tuple[tuple[Index, Index, Index], ...]  # by step: rows of maps and of offsets, and the joints reached
    beyond: Index  # [J], number of each joint's far segment among those that are reached
    arriving: Index  # [n], numbers of the segments that the exchange reaches
    through: Index  # [t], joints of the fragments that it reaches
    source: Index  # [t], which arrival each of them passes on
    last_map: Index  # [m], rows of the segments from which fragments hand on to the exchange
    last_offset: Index  # [m]
    cut: Index  # [c], which of those [m] belong to fragments with a joint
    last_joint: Index  # [c], the joint before each of them


def segment_starts(count: np.ndarray, segments: int) -> np.ndarray:
    """[n_frag * segments + 1]: the chunk at which each segment starts, and the count of all chunks.

    count: chunks of each fragment, [n_frag]. Segment p of n chunks holds floor(p n / P) .. floor((p + 1) n / P).
    """
    first = np.cumsum(count) - count
    return np.append(first[:, None] + np.arange(segments) * count[:, None] // segments, count.sum())


def segment_table(part: Partition, rank: int, segments: int) -> SegmentTable:
    """Cuts every fragment of a rank into `segments` pieces of whole chunks, or as many as it has chunks."""
    starts = segment_starts(chunk_grid(part, rank).count, segments)
    count = np.diff(starts)
    held = np.flatnonzero(count)
    fragment = held // segments
    goes_on = np.zeros(len(held), dtype=bool)
    goes_on[:-1] = np.diff(fragment) == 0
    comes_on = np.roll(goes_on, 1)
    rows = part.rows(rank)
    left = goes_on | part.crossing_out[rows][fragment]
    entered = comes_on | part.crossing_in[rows][fragment]
    chosen = goes_on, left, entered, left & entered & (goes_on | comes_on)
    return SegmentTable(fragment, starts[held], count[held], *map(np.flatnonzero, chosen))


def passages(part: Partition, rank: int, table: SegmentTable) -> tuple[Passage, Passage]:
    """Forward: maps and offsets are counted by left numbers, and entered segments are reached. Backward: maps by the
    numbers of bridges (beyond them for a segment that is none), offsets by entered numbers, and left segments are
    reached.
    """
    own = part.rows(rank)
    fragments = np.arange(own.stop - own.start)
    left, entered, bridge = (_numbers(chosen, table) for chosen in (table.left, table.entered, table.bridges))
    first, last = (np.searchsorted(table.fragment, fragments, side) for side in ("left", "right"))
    out, come_in = np.flatnonzero(part.crossing_out[own]), np.flatnonzero(part.crossing_in[own])
    of_joint = table.fragment[table.joined]  # the fragment
    joints = np.bincount(of_joint, minlength=len(fragments))
    first_joint = np.cumsum(joints) - joints
    position = np.arange(len(of_joint)) - first_joint[of_joint]

    def passage(*, near, far, step, maps, offsets, reached, begin, arriving, end, leaving, end_joint) -> Passage:
        """near, far: the segments at each joint. begin, end: the segments at each fragment's ends, and which fragments
        are reached there by the exchange and hand on to it."""
        arrival = np.full(len(fragments), -1)
        arrival[arriving] = np.arange(len(arriving))
        through = np.flatnonzero(arrival[of_joint] >= 0)
        cut = np.flatnonzero(joints[leaving])
        return Passage(
            steps=by_step(of_joint, step, joints[of_joint], maps[near], offsets[near], np.arange(len(near))),
            beyond=reached[far],
            arriving=reached[begin[arriving]],
            through=through,
            source=arrival[of_joint[through]],
            last_map=maps[end[leaving]],
            last_offset=offsets[end[leaving]],
            cut=cut,
            last_joint=end_joint[leaving[cut]],
        )

    before, after = table.joined, table.joined + 1
    forward = passage(
        near=before, far=after, step=position, maps=left, offsets=left, reached=entered,
        begin=first, arriving=come_in, end=last - 1, leaving=out, end_joint=first_joint + joints - 1,
    )  # fmt: skip
    backward = passage(
        near=after, far=before, step=joints[of_joint] - 1 - position, maps=bridge, offsets=entered, reached=left,
        begin=last - 1, arriving=out, end=first, leaving=come_in, end_joint=first_joint,
    )  # fmt: skip
    return forward, backward


def _numbers(chosen: np.ndarray, table: SegmentTable) -> np.ndarray:
    """[S]: each segment's number among the chosen; their count for one that is not."""
    numbers = np.full(len(table.first), len(chosen))
    numbers[chosen] = np.arange(len(chosen))
    return numbers
