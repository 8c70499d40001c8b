"""The forward of one rank, as a program: what it computes, and where it meets the other ranks."""

from typing import Any, NamedTuple

from torch import Tensor

from deltaspan.exchange import Beside, Folded, Program, carry_states, fold, spread
from deltaspan.kernels import select
from deltaspan.kernels.stages import Raw, Runs
from deltaspan.op.context import Context
from deltaspan.op.operands import Operands
from deltaspan.op.options import RAW, Options
from deltaspan.op.saved import Saved, final_states, joined, shapes, start_states
from deltaspan.op.segments import Segments
from deltaspan.op.view import RankView


class Forward(NamedTuple):
    o: Tensor | None  # [T, HV, V]
    final_state: Tensor | None  # [N, HV, K, V]
    saved: Saved | None  # all that a backward may want; what of it is kept is the caller's to say
    tape: tuple[Tensor, ...]  # what the backward reads again of the stages


def forward_program(
    ctx: Context,
    view: RankView,
    tier: Any,
    x: Operands,
    options: Options,
    entered: Saved | None = None,
    *,
    output: bool = True,
    keeps: bool = True,
) -> Program[Forward]:
    """One rank's forward; all ranks of the group run theirs.

    entered: what an earlier run of the same forward kept, which then is not exchanged again.
    Without `output` o is None; without `keeps`, for a run that nobody will lead back, `saved` may be.
    """
    cut = ctx._cut(view, x.v.shape[1], options.segments)
    read_once = output and not keeps and view.seams.none
    tape = prepare(tier, view, x, options, only=(cut.every, cut.through) if read_once else None)
    walked = {"output": output, "exits": options.output_final_state}
    if entered is None:
        underway = yield from set_out(tier, view, cut, x, options, tape, beside=cut.early is not None)
        begun = None if cut.early is None else tier.walk(tape, cut.early, underway.entry, **walked)
        entry, saved = yield from arrive(tier, ctx, view, cut, x, options, underway, keeps=keeps)
        del underway  # and with it maps, before the walk
        o, exit, states = tier.walk(tape, cut.late, entry, begun=begun, **walked)
    else:
        entry, saved = joined(entered.entry, start_states(cut, x)), entered
        o, exit, states = tier.walk(tape, cut.every, entry, **walked)
    final = final_states(view, cut, x, exit, ctx.part.num_documents) if options.output_final_state else None
    return Forward(o, final, saved, tier.keep(tape, states) if keeps else ())


class Underway(NamedTuple):
    """States that come to a rank."""

    initial: Tensor  # [first, HV, K, V], of documents that begin here, or of none
    maps: Tensor | None = None  # [n_through, HV, K, K]
    folded: Folded | None = None
    crossing: Any = None  # None where none crosses ranks

    @property
    def entry(self) -> Tensor:
        """As a walk of `early` segments takes states: nothing has arrived, and nothing is to arrive at those."""
        reached = None if self.folded is None else self.folded.offsets
        return self.initial if reached is None else joined(reached, self.initial)


def set_out(
    tier: Any, view: RankView, cut: Segments, x: Operands, options: Options, tape: Any, *, beside: bool
) -> Program[Underway]:
    """Sends what this rank's segments make of states; beside: with something to do until `arrive`."""
    initial = start_states(cut, x)
    if not cut.linked:
        return Underway(initial)
    M, b = tier.summaries(tape, cut.through, cut.left, initial)
    folded = fold(tier, cut.forward, M, b)
    if view.seams.none:  # in the whole group: nobody asks for a collective
        return Underway(initial, M, folded)
    sent = options.exchange, view.seams, tier, folded.last_maps, folded.last_offsets, common(x, options)
    crossing = yield Beside(carry_states, sent, beside)
    return Underway(initial, M, folded, crossing)


def arrive(
    tier: Any, ctx: Context, view: RankView, cut: Segments, x: Operands, options: Options, underway: Underway,
    *, keeps: bool = True,
) -> Program[tuple[Tensor, Saved | None]]:  # fmt: skip
    """The true entry states as walks take them, and what the exchange's way back needs, if anybody does."""
    initial, M, folded, crossing = underway
    if not cut.linked:
        nothing = initial.new_empty(0, *initial.shape[1:])
        maps = nothing.new_empty(0, x.v.shape[1], x.k.shape[2], x.k.shape[2])
        return initial, Saved(ctx, view.rank, options, shapes(x), nothing, maps, nothing) if keeps else None
    arrived, kept = (folded.last_offsets,) * 2 if crossing is None else (yield crossing)
    entered = spread(tier, cut.forward, folded, arrived)
    entry = joined(entered, initial)
    return entry, Saved(ctx, view.rank, options, shapes(x), entered, cut.bridging(M), kept) if keeps else None


def prepare(tier: Any, view: RankView, x: Operands, options: Options, only: tuple[Runs, Runs] | None = None) -> Any:
    given = {"scale": scale(x, options), "unit_keys": options.unit_keys, "raw": raw(x, options), "only": only}
    return tier.prep(x.q, x.k, x.v, x.g, x.beta, view.grid, **given)


def scale(x: Operands, options: Options) -> float:
    return x.k.shape[2] ** -0.5 if options.scale is None else options.scale


def raw(x: Operands, options: Options) -> Raw:
    """Which operands come as projections gave them."""
    largest = 2.0 if options.allow_neg_eigval else 1.0
    return Raw(options.use_qk_l2norm_in_kernel, x.A_log, x.dt_bias, options.use_beta_sigmoid_in_kernel, largest)


def common(x: Operands, options: Options) -> str:
    """What the ranks of a group must have in common beside the shapes of states, for none would notice by itself."""
    given = "no initial state" if x.initial_state is None else "an initial state"
    heads = f"{x.v.shape[1]} heads of {x.q.dtype}".replace("torch.", "")
    named = ("scale", "unit_keys", "save_transfer")
    raw = [name for name in RAW if getattr(options, name)]
    return ", ".join([heads, *(f"{name} {getattr(options, name)}" for name in named), *raw, given])


def stages(ctx: Context, x: Operands, options: Options) -> Any:
    """The tier that serves a call, whose operands may have batch axes. Raises ValueError if the one that is asked for
    does not."""
    (H, K), (HV, V) = x.k.shape[-2:], x.v.shape[-2:]
    shaping = {"scale": options.scale, "unit_keys": options.unit_keys}
    return select.stages(options.backend, ctx.device, dtype=x.q.dtype, K=K, V=V, group=HV // H, **shaping)
