"""What a chain of ranks loses: states cross in fp32's accuracy, and would not with maps of TF32's.

Operands by which nothing but maps counts. Keys have few bits and are orthogonal within a chunk, and beta is 2 at every
token that a state passes in: A and A^T K are without rounding, every chunk reflects half of the directions and maps
stay orthogonal, full of numbers of ever more bits. Without decay nothing that was lost fades. Tokens of the first
segment of a document write nothing (beta 0), so it passes on its initial state to the bit; v is zero wherever state
leaves, so no walk adds its own bf16 roundings to what crosses. The truth is a product of reflections.
"""

import functools

import pytest
import torch
from torch import Tensor

import deltaspan as ds
from deltaspan.kernels import select
from deltaspan.plan import chunk_grid, segment_table
from tests.op.hopper import drawn
from tests.op.support import Pack

# Documents, ranks and layout of the adversarial rows.
ROWS = {
    "A1": ([65536], 8, "contiguous"),
    "A2": ([53248, 12288], 8, "contiguous"),
    "A3": ([9001, 20000, 7, 36528], 4, "zigzag_per_document"),
    "A4": ([32749, 64, 1, 32722], 8, "contiguous"),
}
UNIT = torch.tensor([5.0, 5, 3, 1, 1, 1, 1, 1]) / 8
ROTATION = torch.eye(8) - 2 * torch.outer(UNIT, UNIT)  # orthogonal, of numbers of five bits


def reflecting(rng: torch.Generator, pack: Pack, part: ds.Partition, segments: int) -> tuple[Pack, dict[int, Tensor]]:
    """The pack with such operands, and the true state at the start of every segment that state enters, by its token."""
    wanted, chunks = {}, []
    reflects, passes_on = torch.zeros(part.total_tokens, dtype=torch.bool), torch.zeros(part.total_tokens, dtype=bool)
    for rank in range(part.world_size):
        tokens, grid, table = part.token_ids(rank), chunk_grid(part, rank), segment_table(part, rank, segments)
        starts, lengths = grid.start.tolist(), grid.length.tolist()
        chunks += [(int(tokens[start]), length) for start, length in zip(starts, lengths, strict=True)]
        first, count = table.first.tolist(), table.count.tolist()
        own = [torch.from_numpy(tokens[starts[c] : starts[c + n - 1] + lengths[c + n - 1]])
               for c, n in zip(first, count, strict=True)]  # fmt: skip
        wanted |= {int(own[s][0]): None for s in table.entered}
        for s in table.entered:
            reflects[own[s]] = True
        for s in table.left:
            passes_on[own[s]] = True
    pack.g.zero_()
    pack.beta.copy_(torch.where(reflects, 2.0, torch.where(passes_on, 0.0, pack.beta[0, :, 0].cpu()))[None, :, None])
    pack.v[:, passes_on] = 0
    state = pack.initial_state[0].double().cpu()
    k = torch.zeros(part.total_tokens, 1, 128)
    for first, length in sorted(chunks):
        if first in pack.cu_seqlens:
            state = pack.initial_state[pack.cu_seqlens[:-1].index(first)].double().cpu()
        if first in wanted:
            wanted[first] = state
        shuffled = [torch.randperm(n, generator=rng) for n in (8, 64, 128)]
        keys = torch.block_diag(*[ROTATION[shuffled[0][:4]]] * 16)[shuffled[1][:length]][
            :, shuffled[2]
        ]  # half of space
        k[first : first + length, 0] = keys
        if reflects[first]:
            state = state - 2 * keys.double().T @ (keys.double() @ state)
    return pack._replace(k=k[None].to(pack.k)), wanted


def worst(pack: Pack, truth: dict[int, Tensor], ctx: ds.Context, segments: int) -> float:
    """The largest relative error of a state that enters a segment."""
    operands = (ctx.shard(x) for x in pack[1:6])
    given = {"initial_state": pack.initial_state, "segments": segments, "backend": "hopper"}
    *_, saved = ds.forward(*operands, ctx, **given)
    errors = []
    for rank, of in enumerate(saved):
        grid, table = chunk_grid(ctx.part, rank), segment_table(ctx.part, rank, segments)
        tokens = ctx.part.token_ids(rank)[grid.start[table.first[table.entered]]]
        for token, state in zip(tokens.tolist(), of.entry.double().cpu(), strict=True):
            errors.append(((state - truth[token]).norm() / truth[token].norm()).item())
    return max(errors)


@pytest.mark.parametrize("row", ROWS)
def test_states_cross_ranks_in_fp32(
    hopper: str, rng: torch.Generator, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows in their size on a GPU, and a sixty-fourth of it on the emulator."""
    lengths, world_size, layout = ROWS[row]
    if hopper == "cpu":
        lengths = [-(-n // 64) for n in lengths]
    tier = select.tier("hopper")
    transferred = tier.transferred
    for segments in (1,) if hopper == "cpu" else (1, 3):
        pack = drawn(rng, lengths, hopper, H=1, HV=1)
        part = ds.partition(pack.cu_seqlens, world_size, layout)
        pack, truth = reflecting(rng, pack, part, segments)
        ctx = ds.build_context(part, ds.SimulatedGroup(world_size), device=hopper)
        # two fp16 numbers have 22 bits; a chunk rounds a map some four times, without a preferred sign
        budget = 2.0**-20 * (sum(lengths) / 64) ** 0.5
        assert worst(pack, truth, ctx, segments) < budget
        with monkeypatch.context() as control:
            control.setattr(tier, "transferred", functools.partial(transferred, terms=1))
            assert worst(pack, truth, ctx, segments) > 10 * budget  # of 11 bits, as TF32
