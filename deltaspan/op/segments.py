"""One rank's segments on its device: what is walked side by side, and where state comes from and goes to."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from deltaspan.kernels.stages import Runs
from deltaspan.op.view import RankView, chains_from, columns_of, upload
from deltaspan.plan import (
    ChunkGrid,
    Passage,
    WalkOrder,
    chunk_grid,
    in_halves,
    passages,
    segment_table,
    walk_order,
    walked_ahead,
)


@dataclass(frozen=True, eq=False)
class Segments:
    """The cut of one rank's fragments for one count of value heads. Index tensors are int64 on the device."""

    count: int  # S
    every: Runs  # all segments
    early: Runs | None  # those that are walked while states cross, counted as among all
    late: Runs | None  # and the others
    left: Runs  # those that state leaves for another, [n_left]
    entered: Runs  # those that it enters from another, [n_entered]
    through: Runs  # those that it enters and leaves, [n_through]
    left_slots: Tensor  # [n_left], their places among all
    entered_slots: Tensor  # [n_entered]
    bridges: Tensor  # [B], those of cut fragments among the segments that state goes through
    first_slots: Tensor  # segments that begin a document, and their documents
    first_docs: Tensor
    last_slots: Tensor  # segments that end a document, and their documents
    last_docs: Tensor
    forward: Passage[Tensor]
    backward: Passage[Tensor]
    linked: bool  # whether state passes between segments of this rank, or between any ranks of the group

    def bridging(self, M: Tensor) -> Tensor:
        """Of the maps [n_through, HV, K, K] those of bridges: without a copy where that is all."""
        return M if len(M) == len(self.bridges) else M[self.bridges]


def cut(view: RankView, segments: int, hv: int, sm_count: int, *, beside: bool = False) -> Segments:
    """The segments of a rank that cuts each of its fragments into so many, or as many as it has chunks.

    beside: whether some may be walked while states cross.
    """
    part, device = view.part, view.cu_seqlens.device
    table = segment_table(part, view.rank, segments)
    doc = part.table.doc[part.rows(view.rank)][table.fragment]
    inside = np.arange(len(table.first))
    first, last = np.setdiff1d(inside, table.entered), np.setdiff1d(inside, table.left)
    ways = passages(part, view.rank, table)
    chosen = {"every": inside, "left": table.left, "entered": table.entered, "through": table.through}
    ahead = walked_ahead(part, view.rank, table, hv=hv, sm_count=sm_count) if beside else inside < 0
    divided = ahead.any() and not ahead.all()
    if divided:
        chosen |= {"early": inside[ahead], "late": inside[~ahead]}
    walks = {name: walk_order(table.first[which], table.count[which]) for name, which in chosen.items()}
    arrays = {
        "left_slots": table.left,
        "entered_slots": table.entered,
        "bridges": np.searchsorted(table.through, table.bridges),
        "first_slots": first,
        "first_docs": doc[first],
        "last_slots": last,
        "last_docs": doc[last],
    }
    grid = chunk_grid(part, view.rank)
    columns = [
        c for name, w in walks.items() for c in _run_columns(w, chosen[name], grid, places=name in ("early", "late"))
    ]
    columns += [c for way in ways for c in (*columns_of(way.chains), *way[2:])]
    tensors = iter(upload(device, [*arrays.values(), *columns]))
    take = tensors.__next__
    halves = {name: in_halves(w.count.tolist(), hv, sm_count) for name, w in walks.items()}
    indices = {name: take() for name in arrays}
    runs = {
        name: Runs(take(), take(), take(), take(), take(), take().int(), w.active, halves[name])
        for name, w in walks.items()
    }
    if not divided:
        runs |= {"early": runs["every"], "late": None} if ahead.any() else {"early": None, "late": runs["every"]}
    return Segments(
        count=len(table.first),
        linked=bool(ways[0].chains.steps) or not view.seams.none,
        **indices,
        **runs,
        **{name: _passage(way, take) for name, way in zip(("forward", "backward"), ways, strict=True)},
    )


def _run_columns(w: WalkOrder, which: np.ndarray, grid: ChunkGrid, *, places: bool) -> tuple[np.ndarray, ...]:
    """Of `Runs`, for the segments `which` in walking order; places: whether they are counted by their places among
    all."""
    last, slots = w.first + w.count - 1, which[w.order]
    order = slots if places else w.order
    tokens = grid.start[w.first], grid.start[last] + grid.length[last]
    return order, slots, np.argsort(w.order), w.first, last, np.stack([*tokens, w.first, slots, order], axis=1)


def _passage(way: Passage[np.ndarray], take: Callable[[], Tensor]) -> Passage[Tensor]:
    return Passage(chains_from(way.chains, take), way.reached, *(take() for _ in way[2:]))
