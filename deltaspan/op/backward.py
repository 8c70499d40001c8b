"""The backward of one rank, as a program: the forward's walk again, then the adjoint's the other way round."""

from typing import Any, NamedTuple

from torch import Tensor

from deltaspan.exchange import Beside, Program, carry_adjoints, fold, spread
from deltaspan.op.context import Context
from deltaspan.op.forward import arrive, common, prepare, raw, scale, set_out
from deltaspan.op.operands import Operands
from deltaspan.op.options import Options
from deltaspan.op.packed import into_one_row
from deltaspan.op.saved import Saved, end_adjoints, initial_gradient, joined, start_states
from deltaspan.op.segments import Segments
from deltaspan.op.view import RankView


class Gradients(NamedTuple):
    """Gradients of a call's inputs, None where an input was not given."""

    dq: Tensor  # [1, T, H, K], summed over the value heads that read the key head
    dk: Tensor  # [1, T, H, K]
    dv: Tensor  # [1, T, HV, V]
    dg: Tensor  # [1, T, HV]
    dbeta: Tensor  # [1, T, HV]
    dinitial_state: Tensor | None = None  # [N, HV, K, V], this rank's share of a sum over the group
    dA_log: Tensor | None = None  # [HV], this rank's share of a sum over the group
    ddt_bias: Tensor | None = None  # [HV], the same

    def like(self, given: Operands) -> "Gradients":
        """With the batch axes of the operands, as views."""
        pairs = zip(self, given, strict=True)
        return Gradients(*[d.unsqueeze(0) if d is not None and x.dim() > d.dim() else d for d, x in pairs])


def backward_program(
    ctx: Context,
    view: RankView,
    tier: Any,
    x: Operands,
    options: Options,
    do: Tensor,
    dfinal_state: Tensor | None,
    saved: Saved | None,
) -> Program[Gradients]:
    """One rank's backward; all ranks of the group run theirs. Without `saved` the forward's exchange is run again.

    Each tensor of `saved` is let go of at its last reader here, so that it does not stand beside what comes after.
    """
    cut = ctx._cut(view, x.v.shape[1], options.segments)
    if saved is not None and saved.tape:
        operands = x.q, x.k, x.v, x.g, x.beta
        tape, states = tier.restore(saved.tape, *operands, view.grid, scale=scale(x, options), raw=raw(x, options))
    else:
        tape, states = prepare(tier, view, x, options), None
    if states is None:
        if saved is None:
            underway = yield from set_out(tier, view, cut, x, options, tape, beside=False)
            entry, saved = yield from arrive(tier, ctx, view, cut, x, options, underway)
            del underway
        else:
            entry = joined(saved.entry, start_states(cut, x))
        _, _, states = tier.walk(tape, cut.every, entry, output=False, exits=False)
        del entry

    maps, whole, kept = _transfers(tier, cut, tape, saved) if cut.linked else (None, None, None)
    del saved
    adjoint = tier.adjoint_prep(tape, do)
    del tape
    leaving = final = end_adjoints(cut, x, dfinal_state)
    if cut.linked:
        d = tier.adjoint_summary(adjoint, cut.entered, final)
        folded = fold(tier, cut.backward, maps.mT, d)
        arrived, crosses = folded.last_offsets, not view.seams.none
        sent = (options.exchange, view.seams, tier, kept, whole, arrived, common(x, options)) if crosses else ()
        del maps, kept, whole, d
        if crosses:
            crossing = yield Beside(carry_adjoints, sent, True)
            del sent, arrived
            states = tier.walk_ahead(adjoint, cut.every, states)
            arrived = yield crossing
            del crossing
        leaving = joined(spread(tier, cut.backward, folded, arrived), final)
        del folded, arrived
    entering, dq, dk, dv, dg, dbeta, *dgate = tier.pull_back(adjoint, cut.every, states, leaving)
    dinitial = initial_gradient(view, cut, x, entering, dfinal_state)
    return Gradients(*into_one_row(x, dq, dk, dv), dg, dbeta, dinitial, *dgate)


def _transfers(tier: Any, cut: Segments, tape: Any, saved: Saved) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Maps of the segments within cut fragments; and of whole fragments, unless the exchange has kept what it needs,
    which is the third."""
    if saved.kept is not None:
        return saved.maps, None, saved.kept
    M = tier.transfer(tape, cut.through)  # as in the forward: side by side with others bits may depend on them
    return cut.bridging(M), fold(tier, cut.forward, M, None).last_maps, None
