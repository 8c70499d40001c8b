"""What the mutants plant: for each fault a function that takes what stands in the package and returns the wrong one.

Programs of ranks are generators, and so are the wrong ones: every rank still takes part in every collective.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import deltaspan as ds
from deltaspan.plan import CHUNK, ChunkGrid, Links

ILL_RANK = 1
"""The rank of those faults that one rank has by itself."""

UNMERGED = SimpleNamespace(
    merge=lambda M, X, b: b,
    tell=lambda maps, arrived, reached, way: reached.index_copy_(0, way.arriving, arrived),
)
"""In a tier's place: what passes a map is lost."""

Fault = Callable[[Any], Any]


def dropped_rows(of: str) -> Fault:
    """For `fetch_rows`: the rows that arrive in collective `of` are taken for zeros."""

    def fault(fetch_rows: Callable) -> Callable:
        def wrong(name: str, *args: Any) -> Any:
            rows = yield from fetch_rows(name, *args)
            return [torch.zeros_like(x) for x in rows] if name == of else rows

        return wrong

    return fault


def swapped_summaries(to_owners: Callable) -> Callable:
    """For `all_to_all._to_owners`: the first summaries of the first two ranks that have any change places."""

    def wrong(name: str, seams: Any, counts: tuple[int, ...], *args: Any) -> Any:
        arrived = yield from to_owners(name, seams, counts, *args)
        if name == "summaries":
            a, b = [sum(counts[:rank]) for rank, count in enumerate(counts) if count][:2]
            arrived[[a, b]] = arrived[[b, a]]
        return arrived

    return wrong


def transposed_maps(merge: Callable) -> Callable:
    """For `merge`."""
    return lambda M, X, b: merge(M.mT, X, b)


def joined_documents(link: Callable) -> Callable:
    """For `layout.link`: the first fragment of a document follows the last one of the document before."""

    def wrong(num_documents: int, doc: np.ndarray, *columns: np.ndarray) -> tuple:
        chains, *_ = link(num_documents, doc, *columns)
        _, prev, next = link(1, np.zeros_like(doc), *columns)
        return chains, prev, next

    return wrong


def foreign_key_heads(gradients: Callable) -> Callable:
    """For `gradients`: value head j's share of dq goes to key head j % H instead of j // (HV // H)."""

    def wrong(adjoint: Any, *walked: Any) -> tuple:
        q, k, *others = adjoint.tape.operands
        H, HV = q.shape[1], others[0].shape[1]
        apart = (x.float().repeat_interleave(HV // H, dim=1) for x in (q, k))
        tape = adjoint.tape._replace(operands=(*apart, *others))
        dq = gradients(adjoint._replace(tape=tape), *walked)[0].unflatten(1, (HV // H, H)).sum(1).to(q.dtype)
        return dq, *gradients(adjoint, *walked)[1:]

    return wrong


def forgotten_entry_states(backward_program: Callable) -> Callable:
    """For `backward_program`: one rank walks from zero where it was to walk from the states that it had received."""

    def wrong(ctx: ds.Context, view: Any, *args: Any) -> Any:
        *args, saved = args
        if view.rank == ILL_RANK and saved is not None:
            saved = dataclasses.replace(saved, entry=torch.zeros_like(saved.entry))
        return backward_program(ctx, view, *args, saved)

    return wrong


def next_owners_heads(to_homes: Callable) -> Callable:
    """For `all_to_all._to_homes`: what the owners answer is put where the next owner's heads belong."""

    def wrong(name: str, seams: Any, counts: tuple[int, ...], tiles: Tensor, HV: int, about: str) -> Any:
        answers = yield from to_homes(name, seams, counts, tiles, HV, about)
        return answers.roll(-(-HV // len(counts)), dims=1)

    return wrong


def late_cut(chunk_grid: Callable) -> Callable:
    """For `chunk_grid`: where two fragments of one rank meet, one more token is counted to the first."""

    def wrong(part: ds.Partition, rank: int) -> ChunkGrid:
        own = part.rows(rank)
        length, start = part.table.length[own].copy(), part.table.local_start[own].copy()
        for slot in range(1, len(length)):
            if length[slot - 1] % CHUNK and length[slot] % CHUNK > 1:  # so that both keep their chunks
                length[slot - 1 : slot + 1] += 1, -1
                start[slot] += 1
        return chunk_grid(_Cut(_Columns(length, start)), rank)

    return wrong


@dataclasses.dataclass
class _Columns:
    length: np.ndarray
    local_start: np.ndarray


@dataclasses.dataclass
class _Cut:
    """As much of a partition as `chunk_grid` reads, of one rank."""

    table: _Columns

    def rows(self, rank: int) -> slice:
        return slice(None)


def unmasked_rows(to_chunks: Callable) -> Callable:
    """For `to_chunks`: rows behind the end of a fragment's last chunk keep the token that was read to fill them."""
    return lambda x, grid, dtype: x[grid.token_of_row].to(dtype).transpose(1, 2)


def first_fragment_first(chain_links: Callable) -> Callable:
    """For `chain_links`: adjoints pass a document's seams from its begin to its end."""

    def wrong(part: ds.Partition) -> Links:
        links = chain_links(part)
        behind = {int(out): row for rows, _, outs in links.backward.steps for out, row in zip(outs, rows, strict=True)}
        steps = ((np.array([behind[int(i)] for i in out]), entered, out) for out, _, entered in links.forward.steps)
        return links._replace(backward=links.backward._replace(steps=tuple(steps)))

    return wrong


def neighbours_decay(prep: Callable) -> Callable:
    """For `prep`: every head decays as the one before it."""
    return lambda q, k, v, g, *args, **options: prep(q, k, v, g.roll(1, dims=1), *args, **options)


def former_batch(rank_view: Callable) -> Callable:
    """For `rank_view`: tables of a pack as long, whose documents had come in the opposite order."""

    def wrong(part: ds.Partition, *args: Any) -> Any:
        cu_seqlens = [part.total_tokens - offset for offset in reversed(part.cu_seqlens)]
        return rank_view(ds.partition(cu_seqlens, part.world_size, layout=part.layout), *args)

    return wrong


def rank_order(gather_tokens: Callable) -> Callable:
    """For `gather_tokens`: all ranks' tokens one rank after another, as they arrive."""
    return lambda x, counts, place: gather_tokens(x, counts, torch.arange(len(place), device=place.device))


def own_share_alone(scatter_gradient: Callable) -> Callable:
    """For `scatter_gradient`: a rank's gradient of the whole counts for its own tokens only."""

    def wrong(whole: Tensor, rank: int, counts: tuple[int, ...], order: Tensor) -> Any:
        yield from scatter_gradient(whole, rank, counts, order)
        return whole[order].split(counts)[rank]

    return wrong


def rounded_summaries(carry_states: Callable) -> Callable:
    """For `carry_states`: what crosses ranks goes through bf16."""

    def wrong(exchange: str, seams: Any, affine: Any, M: Tensor, b: Tensor, about: str) -> Any:
        return carry_states(exchange, seams, affine, *(x.bfloat16().to(x.dtype) for x in (M, b)), about)

    return wrong


def unmerged_hops(carry_states: Callable) -> Callable:
    """For `ring.carry_states`: a fragment passes on its own state without the one that reached it."""
    return lambda seams, affine, *args: carry_states(seams, UNMERGED, *args)


def masked_by_zero(to_tokens: Callable) -> Callable:
    """For `to_tokens`: every token gets zero times the sum of all, which is nothing unless there is a NaN."""

    def wrong(*args: Any) -> Tensor:
        rows = to_tokens(*args)
        return rows + 0 * rows.sum()

    return wrong


def unheard_final_gradients(backward_program: Callable) -> Callable:
    """For `backward_program`: one rank takes the gradients of final states for zero."""

    def wrong(ctx: ds.Context, view: Any, *args: Any) -> Any:
        *args, dfinal, saved = args
        return backward_program(ctx, view, *args, None if view.rank == ILL_RANK else dfinal, saved)

    return wrong


def nothing_through(spread: Callable) -> Callable:
    """For `spread`: what the exchange brings to a fragment stays in the segment that it reaches."""
    return lambda affine, *args: spread(UNMERGED, *args)


def unfolded_maps(fold: Callable) -> Callable:
    """For `fold`: the map of a whole fragment is that of its last segment."""

    def wrong(affine: Any, way: Any, maps: Tensor, offsets: Tensor | None) -> Any:
        folded = fold(affine, way, maps, offsets)
        if not way.chains.steps:
            return folded
        rows, _, places = (torch.cat(column) for column in zip(*way.chains.steps, strict=True))
        of_place = rows.new_zeros(way.chains.places).index_copy_(0, places, rows)
        return folded._replace(last_maps=maps[of_place[way.handed]])

    return wrong


def steps_from_the_end(passages: Callable) -> Callable:
    """For `passages`: the first and the last of equally many joints change places in the forward."""

    def wrong(*args: Any) -> tuple:
        forward, backward = passages(*args)
        steps = list(forward.chains.steps)
        if len(steps) > 1 and len(steps[0][0]) == len(steps[-1][0]):
            steps[0], steps[-1] = (*steps[-1][:2], steps[0][2]), (*steps[0][:2], steps[-1][2])
        return forward._replace(chains=forward.chains._replace(steps=tuple(steps))), backward

    return wrong
