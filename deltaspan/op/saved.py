"""What a forward keeps for its backward, and the states at a rank's edges that both directions start from."""

from dataclasses import dataclass

from torch import Tensor

from deltaspan.op.context import Context
from deltaspan.op.operands import Operands
from deltaspan.op.options import Options
from deltaspan.op.segments import Segments
from deltaspan.op.view import RankView


@dataclass(frozen=True, eq=False)
class Saved:
    """Save mode `light`: what came from other ranks; all else is computed again from the operands. Read-only."""

    context: Context
    options: Options
    shapes: tuple
    entry: Tensor  # [n_entered, HV, K, V], true states at the start of the segments that state enters
    maps: Tensor  # [B, HV, K, K], of the segments that pass it on inside a fragment
    kept: Tensor  # of the forward's exchange, what the backward's needs: maps, as received or its own

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.entry, self.maps, self.kept


def check_saved(saved: object, context: Context, options: Options, x: Operands) -> None:
    """Raises unless `saved` is None, or was kept by a forward of the same context, shapes and options."""
    if saved is None:
        return
    if not isinstance(saved, Saved):
        raise TypeError(f"saved must be what forward returned as its third result, got {type(saved).__name__}")
    if saved.context is not context:
        raise ValueError("saved was kept by a forward with another context")
    if saved.shapes != shapes(x):
        raise ValueError(f"saved was kept by a forward with operands {saved.shapes}, got {shapes(x)}")
    if saved.options != options:
        raise ValueError(f"saved was kept by a forward with {saved.options}, got {options}")


def shapes(x: Operands) -> tuple:
    return tuple((tuple(t.shape), t.dtype) for t in x if t is not None)


def start_states(cut: Segments, x: Operands) -> Tensor:
    """[S, HV, K, V]: the initial state where a document begins, zero elsewhere."""
    states = x.q.new_zeros(x.state_shape(cut.count), dtype=x.state_type)
    if x.initial_state is not None:
        states[cut.first_slots] = x.initial_state[cut.first_docs].to(states.dtype)
    return states


def final_states(view: RankView, cut: Segments, x: Operands, exit: Tensor, documents: int) -> Tensor:
    """[N, HV, K, V]: the exit state where a document ends on this rank, zero for all others; an empty document's is its
    initial state, on rank 0."""
    final = exit.new_zeros(documents, *exit.shape[1:])
    final[cut.last_docs] = exit[cut.last_slots]
    if x.initial_state is not None:
        final[view.empty_docs] = x.initial_state[view.empty_docs].to(final.dtype)
    return final


def end_adjoints(cut: Segments, x: Operands, dfinal_state: Tensor | None) -> Tensor:
    """[S, HV, K, V]: the final state's gradient where a document ends on this rank, zero elsewhere."""
    adjoints = start_states(cut, x._replace(initial_state=None))
    if dfinal_state is not None:
        adjoints[cut.last_slots] = dfinal_state[cut.last_docs].to(adjoints.dtype)
    return adjoints


def initial_gradient(
    view: RankView, cut: Segments, x: Operands, entering: Tensor, dfinal_state: Tensor | None
) -> Tensor | None:
    """[N, HV, K, V]: this rank's share of the initial state's gradient, None if there is no initial state."""
    if x.initial_state is None:
        return None
    gradient = entering.new_zeros(x.initial_state.shape)
    gradient[cut.first_docs] = entering[cut.first_slots]
    if dfinal_state is not None:
        gradient[view.empty_docs] = dfinal_state[view.empty_docs].to(gradient.dtype)
    return gradient
