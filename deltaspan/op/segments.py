"""One rank's segments on its device: what is walked side by side, and where state comes from and goes to."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from deltaspan.kernels.stages import Runs
from deltaspan.op.view import RankView, chains_from, columns_of, upload
from deltaspan.plan import (
    ChunkGrid,
    Cut,
    Passage,
    WalkOrder,
    chunk_grid,
    numbers,
    passages,
    segment_table,
    soonest_division,
    soonest_pair,
    walk_order,
    walked_ahead,
)


@dataclass(frozen=True, eq=False)
class Segments:
    """The cut of one rank's fragments for one count of value heads. Index tensors are int64 on the device."""

    count: int  # S
    every: Runs  # all segments: from states that enter them, and behind those initial ones; backwards alike
    early: Runs | None  # those that are walked while states cross, counted as among all: from states within fragments
    late: Runs  # and the others, from such as `every`
    left: Runs  # those that state leaves for another, [n_left]; these and the next ones start from initial states alone
    entered: Runs  # those that it enters from another, [n_entered]
    through: Runs  # those that it enters and leaves, [n_through]
    bridges: Tensor  # [B], those of cut fragments among the segments that state goes through
    first_slots: Tensor  # segments that begin a document, in the order of their initial states, and their documents
    first_docs: Tensor
    last_slots: Tensor  # segments that end a document, and their documents
    last_docs: Tensor
    forward: Passage[Tensor]
    backward: Passage[Tensor]
    linked: bool  # whether state passes between segments of this rank, or between any ranks of the group
    recordings: dict[tuple, Any] = field(default_factory=dict)  # of runs over them, as `again` has it

    def bridging(self, M: Tensor) -> Tensor:
        """Of the maps [n_through, HV, K, K] those of bridges: without a copy where that is all."""
        return M if M.shape[0] == self.bridges.shape[0] else M[self.bridges]


def cut(view: RankView, segments: Cut, hv: int, sm_count: int, *, beside: bool = False) -> Segments:
    """The segments of a rank that cuts each of its fragments into these, or into as many as it has chunks for.

    beside: whether some may be walked while states cross.
    """
    part, device = view.part, view.cu_seqlens.device
    table = segment_table(part, view.rank, segments)
    doc = part.table.doc[part.rows(view.rank)][table.fragment]
    inside = np.arange(len(table.first))
    first, last = np.setdiff1d(inside, table.entered), np.setdiff1d(inside, table.left)
    known = numbers(first, table), numbers(last, table)  # before anything has come from other segments
    true = tuple(np.argsort(np.append(*both)) for both in ((table.entered, first), (table.left, last)))
    ways = passages(part, view.rank, table)
    rows = {"every": true, "late": true, "early": true if ways[0].chains.steps else known}
    chosen = {"every": inside, "left": table.left, "entered": table.entered, "through": table.through}
    ahead = walked_ahead(part, view.rank, table, hv=hv, sm_count=sm_count) if beside else inside < 0
    if ahead.any():
        chosen |= {"early": inside[ahead], "late": inside[~ahead]}
    walks = {name: walk_order(table.first[which], table.count[which]) for name, which in chosen.items()}
    arrays = {
        "bridges": np.searchsorted(table.through, table.bridges),
        "first_slots": first,
        "first_docs": doc[first],
        "last_slots": last,
        "last_docs": doc[last],
    }
    grid = chunk_grid(part, view.rank)
    named = {name: which if name in rows else np.arange(len(which)) for name, which in chosen.items()}
    columns = [
        column
        for name, w in walks.items()
        for column in _run_columns(w, chosen[name], named[name], *rows.get(name, known), grid)
    ]
    columns += [c for way in ways for c in (*columns_of(way.chains), *way[4:])]
    tensors = iter(upload(device, [*arrays.values(), *columns]))
    take = tensors.__next__
    indices = {name: take() for name in arrays}
    runs = {
        name: Runs(
            *(take() for _ in range(6)), take().int(), take().int(), w.active,
            len(inside) if name in rows else len(w.order), *_whole(w, sm_count),
        )
        for name, w in walks.items()
    }  # fmt: skip
    runs = {"early": None, "late": runs["every"]} | runs
    return Segments(
        count=len(table.first),
        linked=bool(ways[0].chains.steps) or not view.seams.none,
        **indices,
        **runs,
        **{name: _passage(way, take) for name, way in zip(("forward", "backward"), ways, strict=True)},
    )


def _run_columns(
    w: WalkOrder, which: np.ndarray, named: np.ndarray, entries: np.ndarray, leavings: np.ndarray, grid: ChunkGrid
) -> tuple[np.ndarray, ...]:
    """Of `Runs`, for the segments `which`, by the numbers that they are named by, from the rows of all segments."""
    last, order, given = w.first + w.count - 1, named[w.order], (entries[which[w.order]], leavings[which[w.order]])
    tokens = grid.start[w.first], grid.start[last] + grid.length[last]
    tables = (np.stack([*tokens, w.first, rows, order], axis=1) for rows in given)
    return order, np.argsort(w.order), *given, w.first, last, *tables


def _whole(w: WalkOrder, sm_count: int) -> tuple[Callable[[int], int], Callable[[int], tuple[int, int]]]:
    """`Runs.whole` and `Runs.pair`."""
    runs = Counter(w.count.tolist()).items()

    def walks(heads: int) -> list[tuple[int, int]]:
        return [(n, heads * count) for n, count in runs]

    return (
        cache(lambda heads: soonest_division(walks(heads), sm_count).whole),
        cache(lambda heads: soonest_pair(walks(heads), sm_count)[1:]),
    )


def _passage(way: Passage[np.ndarray], take: Callable[[], Tensor]) -> Passage[Tensor]:
    return Passage(chains_from(way.chains, take), *way[1:4], *(take() for _ in way[4:]))
