"""The Hopper tier through the public calls: bf16 packs of its head dim, and what all ranks make of them."""

import torch
from torch import Tensor

import deltaspan as ds
from tests.op.support import Pack, draw, listed, unlisted

# Roundings of the state, of what is written and of A to bf16, 2^-9 each chunk: FLA and FlashQLA err 3.5e-3 to 4e-3.
BF16 = 4.5e-3


def drawn(
    rng: torch.Generator, lengths: list[int], device: str, decay: str = "moderate", H: int = 2, HV: int = 6
) -> Pack:  # fmt: skip
    pack = draw(rng, lengths, H=H, HV=HV, K=128, V=128, decay=decay).to(torch.bfloat16)
    return pack._replace(**{name: getattr(pack, name).to(device) for name in pack._fields[1:]})


def run(pack: Pack, ctx: ds.Context, **options) -> tuple[Tensor, Tensor]:
    """o and final states of the whole pack."""
    operands = [unlisted(ctx, listed(ctx, ctx.shard(x))) for x in pack[1:6]]
    o, final, _ = ds.forward(
        *operands, ctx, initial_state=pack.initial_state, output_final_state=True, backend="hopper", **options
    )
    whole = torch.full_like(pack.v, torch.nan)
    for rank, shard in enumerate(listed(ctx, o)):
        whole[:, torch.from_numpy(ctx.part.token_ids(rank)).to(shard.device)] = shard
    return whole, sum(listed(ctx, final))


def relative(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()
