"""One rank's tables on its device, uploaded once, shared by every layer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from deltaspan.exchange import HaloRoute, Hop, Seams
from deltaspan.kernels.stages import Edges, Grid
from deltaspan.layout import Partition, halo_plan
from deltaspan.plan import Chains, chain_links, chunk_grid, crossings, ring_hops


@dataclass(frozen=True, eq=False)
class RankView:
    """What one rank knows of its partition. Index tensors are int64 on the device; fragments count in local order."""

    part: Partition
    rank: int
    tokens: int
    cu_seqlens: Tensor  # [fragments + 1] int32, local offsets
    position_ids: Tensor  # [tokens] int64, position within the document
    token_ids: Tensor  # [tokens], position within the pack

    grid: Grid
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
    n_through: tuple[int, ...]
    through: Tensor
    forward: Chains[Tensor]
    backward: Chains[Tensor]
    tokens: tuple[int, ...]
    part: Partition
    device: torch.device

    @property
    def order(self) -> Tensor:
        """[total] int64: the token in each place of all ranks' rows, rank after rank."""
        return self._whole[0]

    @property
    def place(self) -> Tensor:
        """[total] int64: its inverse."""
        return self._whole[1]

    @cached_property
    def _whole(self) -> list[Tensor]:
        """As long as the pack, and only `unshard` asks for it: made when it does."""
        order = np.concatenate([self.part.token_ids(rank) for rank in range(self.part.world_size)])
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return upload(self.device, [order, place])


def group_view(part: Partition, device: torch.device) -> GroupView:
    links = chain_links(part)
    through = np.flatnonzero(part.crossing_in[part.crossing_out])  # out numbers
    take = iter(upload(device, [through, *columns_of(links.forward), *columns_of(links.backward)])).__next__
    n_out, n_in, n_through = crossings(part)
    return GroupView(
        n_out=tuple(n_out.tolist()),
        n_in=tuple(n_in.tolist()),
        n_through=tuple(n_through.tolist()),
        through=take(),
        forward=chains_from(links.forward, take),
        backward=chains_from(links.backward, take),
        tokens=tuple(part.tokens(rank) for rank in range(part.world_size)),
        part=part,
        device=device,
    )


def rank_view(part: Partition, rank: int, group: GroupView, width: int, device: torch.device) -> RankView:
    own, table = part.rows(rank), part.table
    length, offset, start = (c[own] for c in (table.length, table.offset, table.local_start))
    tokens, grid, halo = part.tokens(rank), chunk_grid(part, rank), halo_plan(part, width, rank)
    arrays = {
        "cu_seqlens": np.append(start, tokens),
        "position_ids": np.arange(tokens) + np.repeat(offset - start, length),
        "token_ids": part.token_ids(rank),
        "empty_docs": np.flatnonzero(np.diff(part.chains().first) == 0)[: None if rank == 0 else 0],
        "own_through": np.flatnonzero(part.crossing_in[own][part.crossing_out[own]]),
        "start": start,
        "length": length,
        "chunk_start": grid.start,
        "chunk_length": grid.length,
        "history_row": halo.history_row,
        "following_row": halo.tail_row,
        "send_index": halo.send_index,
        "head_send_index": halo.head_send_index,
    }
    t = dict(zip(arrays, upload(device, list(arrays.values())), strict=True))
    take = t.pop
    quiet = not group.forward.steps or width == 1
    return RankView(
        part=part,
        rank=rank,
        tokens=tokens,
        cu_seqlens=take("cu_seqlens").int(),
        grid=Grid(tokens, take("chunk_start").int(), take("chunk_length").int()),
        edges=Edges(tokens, width, *map(take, ("start", "length", "history_row", "following_row"))),
        history=_route(take("send_index"), halo.send_counts, halo.recv_counts, quiet),
        following=_route(take("head_send_index"), halo.head_send_counts, halo.tail_recv_counts, quiet),
        seams=Seams(
            rank=rank,
            n_out=group.n_out,
            n_in=group.n_in,
            n_through=group.n_through,
            through=group.through,
            own_through=take("own_through"),
            forward=group.forward,
            backward=group.backward,
            make_hops=lambda: _hops(part, rank, device),
        ),
        **t,
    )


def _hops(part: Partition, rank: int, device: torch.device) -> tuple[tuple[Hop, ...], tuple[Hop, ...]]:
    both = ring_hops(part, rank)
    columns = iter(upload(device, [column for hops in both for hop in hops for column in hop[:4]]))
    return tuple(tuple(Hop(s == 0, *islice(columns, 4), *hop[4:]) for s, hop in enumerate(hops)) for hops in both)


def _route(send_index: Tensor, send_counts: np.ndarray, recv_counts: np.ndarray, none: bool) -> HaloRoute:
    return HaloRoute(send_index, tuple(send_counts.tolist()), tuple(recv_counts.tolist()), none)


def columns_of(chains: Chains[np.ndarray]) -> list[np.ndarray]:
    """Its arrays in the order in which `chains_from` takes them, uploaded."""
    return [*(column for step in chains.steps for column in step), chains.table, chains.starts, chains.wanted]


def chains_from(chains: Chains[np.ndarray], take: Callable[[], Tensor]) -> Chains[Tensor]:
    """The same on a device: steps as int64 indices, the rest int32."""
    steps = tuple((take(), take(), take()) for _ in chains.steps)
    return chains._replace(steps=steps, table=take().int(), starts=take().int(), wanted=take().int())


@torch.inference_mode(False)  # tables outlive whatever mode they are made in
def upload(device: torch.device, arrays: list[np.ndarray]) -> list[Tensor]:
    """Integer arrays as int64 tensors on the device, all in one copy that the host does not wait for."""
    if not arrays:
        return []
    whole = torch.from_numpy(np.concatenate([np.ravel(a).astype(np.int64, copy=False) for a in arrays]))
    if device.type == "cuda":
        whole = whole.pin_memory()
    whole = whole.to(device, non_blocking=True)
    return [x.view(a.shape) for x, a in zip(whole.split([a.size for a in arrays]), arrays, strict=True)]
