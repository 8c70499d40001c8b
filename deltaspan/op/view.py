"""One rank's tables on its device, uploaded once, shared by every layer."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deltaspan.exchange import HaloRoute, Hop, Seams
from deltaspan.kernels.stages import Edges, Grid, Runs
from deltaspan.layout import Partition, halo_plan
from deltaspan.plan import chain_links, chunk_grid, crossings, ring_hops, walk_order


@dataclass(frozen=True, eq=False)
class RankView:
    """What one rank knows of its partition. Index tensors are int64 on the device; fragments count in local order."""

    rank: int
    tokens: int
    fragments: int
    cu_seqlens: Tensor  # [fragments + 1] int32, local offsets
    position_ids: Tensor  # [tokens] int64, position within the document
    token_ids: Tensor  # [tokens], position within the pack

    grid: Grid
    every: Runs  # all fragments
    leaving: Runs  # the fragments that state leaves for another, [n_out]
    entered: Runs  # the fragments that state enters from another, [n_in]
    out_slots: Tensor  # [n_out], their places among all
    in_slots: Tensor  # [n_in]
    first_slots: Tensor  # fragments that begin a document, and their documents
    first_docs: Tensor
    last_slots: Tensor  # fragments that end a document, and their documents
    last_docs: Tensor
    empty_docs: Tensor  # documents without tokens, which rank 0 answers for
    seams: Seams

    edges: Edges  # fragment borders as the convolution sees them
    history: HaloRoute
    following: HaloRoute


@dataclass(frozen=True, eq=False)
class GroupView:
    """What all ranks know alike: the seams of the group, and the order of all ranks' rows."""

    n_out: tuple[int, ...]
    n_in: tuple[int, ...]
    forward: tuple
    backward: tuple
    tokens: tuple[int, ...]
    order: Tensor  # [total] int64, the token in each place of all ranks' rows, rank after rank
    place: Tensor  # [total] int64, its inverse


def group_view(part: Partition, device: torch.device) -> GroupView:
    links = chain_links(part)
    order = np.concatenate([part.token_ids(rank) for rank in range(part.world_size)])
    columns = [column for step in (*links.forward, *links.backward) for column in step]
    order, place, *columns = _upload(device, [order, np.argsort(order), *columns])
    next_column = iter(columns).__next__
    n_out, n_in = crossings(part)
    return GroupView(
        n_out=tuple(n_out.tolist()),
        n_in=tuple(n_in.tolist()),
        forward=tuple((next_column(), next_column()) for _ in links.forward),
        backward=tuple((next_column(), next_column(), next_column()) for _ in links.backward),
        tokens=tuple(part.tokens(rank) for rank in range(part.world_size)),
        order=order,
        place=place,
    )


def rank_view(part: Partition, rank: int, group: GroupView, width: int, device: torch.device) -> RankView:
    own, table, chains = part.rows(rank), part.table, part.chains()
    doc, length, offset, start = (c[own] for c in (table.doc, table.length, table.offset, table.local_start))
    crossing_out, crossing_in = part.crossing_out[own], part.crossing_in[own]
    tokens, grid, halo = part.tokens(rank), chunk_grid(part, rank), halo_plan(part, width, rank)
    slots = {"out": np.flatnonzero(crossing_out), "in": np.flatnonzero(crossing_in)}
    first, last = np.flatnonzero(~crossing_in & (length > 0)), np.flatnonzero(~crossing_out & (length > 0))
    walks = {"every": slice(None), "leaving": slots["out"], "entered": slots["in"]}
    walks = {name: walk_order(grid.first[which], grid.count[which]) for name, which in walks.items()}
    arrays = {
        "cu_seqlens": np.append(start, tokens),
        "position_ids": np.arange(tokens) + np.repeat(offset - start, length),
        "token_ids": part.token_ids(rank),
        "out_slots": slots["out"],
        "in_slots": slots["in"],
        "first_slots": first,
        "first_docs": doc[first],
        "last_slots": last,
        "last_docs": doc[last],
        "empty_docs": np.flatnonzero(np.diff(chains.first) == 0) if rank == 0 else doc[:0],
        "start": start,
        "length": length,
        "chunk_start": grid.start,
        "chunk_length": grid.length,
        "history_row": halo.history_row,
        "following_row": halo.tail_row,
        "send_index": halo.send_index,
        "head_send_index": halo.head_send_index,
    }
    for name, w in walks.items():
        columns = (w.order, np.argsort(w.order), w.first, w.first + w.count - 1)
        arrays |= {f"{name} {i}": column for i, column in enumerate(columns)}
    t = dict(zip(arrays, _upload(device, list(arrays.values())), strict=True))
    take = t.pop
    quiet = not group.forward or width == 1
    return RankView(
        rank=rank,
        tokens=tokens,
        fragments=len(length),
        cu_seqlens=take("cu_seqlens").int(),
        grid=Grid(tokens, take("chunk_start").int(), take("chunk_length").int()),
        edges=Edges(tokens, width, *map(take, ("start", "length", "history_row", "following_row"))),
        history=_route(take("send_index"), halo.send_counts, halo.recv_counts, quiet),
        following=_route(take("head_send_index"), halo.head_send_counts, halo.tail_recv_counts, quiet),
        seams=Seams(rank, group.n_out, group.n_in, group.forward, group.backward, lambda: _hops(part, rank, device)),
        **{name: Runs(*(take(f"{name} {i}") for i in range(4)), w.active) for name, w in walks.items()},
        **t,
    )


def _hops(part: Partition, rank: int, device: torch.device) -> tuple[tuple[Hop, ...], tuple[Hop, ...]]:
    both = ring_hops(part, rank)
    columns = iter(_upload(device, [column for hops in both for hop in hops for column in hop[:3]]))
    return tuple(
        tuple(Hop(s == 0, next(columns), next(columns), next(columns), *hop[3:]) for s, hop in enumerate(hops))
        for hops in both
    )


def _route(send_index: Tensor, send_counts: np.ndarray, recv_counts: np.ndarray, none: bool) -> HaloRoute:
    return HaloRoute(send_index, tuple(send_counts.tolist()), tuple(recv_counts.tolist()), none)


def _upload(device: torch.device, arrays: list[np.ndarray]) -> list[Tensor]:
    """Integer arrays as int64 tensors on the device, all in one copy that the host does not wait for."""
    whole = torch.from_numpy(np.concatenate([np.ravel(a).astype(np.int64, copy=False) for a in arrays]))
    if device.type == "cuda":
        whole = whole.pin_memory().to(device, non_blocking=True)
    return [x.view(a.shape) for x, a in zip(whole.split([a.size for a in arrays]), arrays, strict=True)]
