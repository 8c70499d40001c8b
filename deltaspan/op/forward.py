"""The forward of one rank, as a program: what it computes, and where it meets the other ranks."""

from typing import Any, NamedTuple

from torch import Tensor

from deltaspan.exchange import Program, carry_states, fold, spread
from deltaspan.kernels import select
from deltaspan.op.context import Context
from deltaspan.op.operands import Operands
from deltaspan.op.options import Options
from deltaspan.op.saved import Saved, final_states, shapes, start_states
from deltaspan.op.segments import Segments
from deltaspan.op.view import RankView


class Forward(NamedTuple):
    o: Tensor  # [T, HV, V]
    final_state: Tensor | None  # [N, HV, K, V]
    saved: Saved


def forward_program(ctx: Context, view: RankView, x: Operands, options: Options) -> Program[Forward]:
    """One rank's forward; all ranks of the group run theirs."""
    tier = stages(ctx, options)
    cut = ctx._cut(view, x.v.shape[1], options.segments)
    tape = prepare(tier, view, x, options)
    entry, saved = yield from enter(ctx, view, cut, x, options, tape)
    o, exit, _ = tier.walk(tape, cut.every, entry, output=True)
    final = final_states(view, cut, x, exit, ctx.part.num_documents) if options.output_final_state else None
    return Forward(o, final, saved)


def enter(
    ctx: Context, view: RankView, cut: Segments, x: Operands, options: Options, tape: Any
) -> Program[tuple[Tensor, Saved]]:
    """The true entry state of every segment, [S, HV, K, V], and what to keep for the backward."""
    tier = stages(ctx, options)
    entry = start_states(cut, x)
    M, b = tier.summary(tape, cut.left, entry[cut.left_slots])
    folded = fold(tier.merge, cut.forward, M, b)
    whole = folded.last_maps, folded.last_offsets
    arrived, kept = yield from carry_states(options.exchange, view.seams, tier.merge, *whole, common(x, options))
    entry[cut.entered_slots] = entered = spread(tier.merge, cut.forward, folded, arrived)
    return entry, Saved(ctx, options, shapes(x), entered, M[cut.bridges], kept)


def prepare(tier: Any, view: RankView, x: Operands, options: Options) -> Any:
    scale = x.k.shape[2] ** -0.5 if options.scale is None else options.scale
    return tier.prep(x.q, x.k, x.v, x.g, x.beta, view.grid, scale=scale, unit_keys=options.unit_keys)


def common(x: Operands, options: Options) -> str:
    """What the ranks of a group must have in common beside the shapes of states, for none would notice by itself."""
    given = "no initial state" if x.initial_state is None else "an initial state"
    heads = f"{x.v.shape[1]} heads of {x.q.dtype}".replace("torch.", "")
    return f"{heads}, scale {options.scale}, unit_keys {options.unit_keys}, {given}"


def stages(ctx: Context, options: Options) -> Any:
    return select.tier(select.chosen_backend(options.backend, device=ctx.device))
