"""The backward of one rank, as a program: the forward's walk again, then the adjoint's the other way round."""

from typing import NamedTuple

from torch import Tensor

from deltaspan.exchange import Program, adjoint_maps, carry_adjoints, fold, spread
from deltaspan.op.context import Context
from deltaspan.op.forward import common, enter, prepare, stages
from deltaspan.op.operands import Operands
from deltaspan.op.options import Options
from deltaspan.op.saved import Saved, end_adjoints, initial_gradient, start_states
from deltaspan.op.view import RankView


class Gradients(NamedTuple):
    """Gradients of a call's inputs, None where an input was not given."""

    dq: Tensor  # [1, T, H, K], summed over the value heads that read the key head
    dk: Tensor  # [1, T, H, K]
    dv: Tensor  # [1, T, HV, V]
    dg: Tensor  # [1, T, HV]
    dbeta: Tensor  # [1, T, HV]
    dinitial_state: Tensor | None = None  # [N, HV, K, V], this rank's share of a sum over the group
    dA_log: Tensor | None = None
    ddt_bias: Tensor | None = None


def backward_program(
    ctx: Context,
    view: RankView,
    x: Operands,
    options: Options,
    do: Tensor,
    dfinal_state: Tensor | None,
    saved: Saved | None,
) -> Program[Gradients]:
    """One rank's backward; all ranks of the group run theirs. Without `saved` the forward's exchange is run again."""
    tier = stages(ctx, options)
    cut = ctx._cut(view, x.v.shape[1], options.segments)
    tape = prepare(tier, view, x, options)
    if saved is None:
        entry, saved = yield from enter(ctx, view, cut, x, options, tape)
    else:
        entry = start_states(cut, x)
        entry[cut.entered_slots] = saved.entry
    _, _, states = tier.walk(tape, cut.every, entry, output=False)

    adjoint = tier.adjoint_prep(tape, do)
    leaving = end_adjoints(cut, x, dfinal_state)
    d = tier.adjoint_summary(adjoint, cut.entered, leaving[cut.entered_slots])
    folded = fold(tier.merge, cut.backward, adjoint_maps(saved.maps), d)
    whole = saved.kept, folded.last_offsets
    arrived = yield from carry_adjoints(options.exchange, view.seams, tier.merge, *whole, common(x, options))
    leaving[cut.left_slots] = spread(tier.merge, cut.backward, folded, arrived)
    entering, costates = tier.adjoint_walk(adjoint, cut.every, leaving)
    return Gradients(*tier.gradients(adjoint, states, costates), initial_gradient(view, cut, x, entering, dfinal_state))
