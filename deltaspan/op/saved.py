"""What a forward keeps for its backward, and the states at a rank's edges that both directions start from."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from deltaspan.op.context import Context
from deltaspan.op.operands import Operands
from deltaspan.op.options import Options
from deltaspan.op.segments import Segments
from deltaspan.op.view import RankView

SHAPING = tuple(f.name for f in fields(Options) if f.name not in ("reuse_recompute_tapes", "recompute_output"))
"""Options that shape what is kept or computed from it."""


@dataclass(frozen=True, eq=False)
class Saved:
    """What came from other ranks and other segments, and in save mode `full` what the stages read again. Read-only."""

    context: Context
    rank: int
    options: Options
    shapes: tuple
    entry: Tensor | None  # [n_entered, HV, K, V], true states at the start of the segments that state enters
    maps: Tensor | None = None  # [B, HV, K, K], of the segments that pass it on inside a fragment
    kept: Tensor | None = None  # of the forward's exchange, what the backward's needs: maps, as received or its own
    tape: tuple[Tensor, ...] = ()  # what the tier keeps of its stages
    versions: tuple[int, ...] = ()  # of the tensors, so that a change is noticed

    @property
    def boundary(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.entry, self.maps, self.kept) if t is not None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.boundary, *self.tape

    def of_mode(self, options: Options, tape: tuple[Tensor, ...] = ()) -> "Saved":
        """What is kept of it, and of what the stages left. Without save_transfer maps are formed again in the backward,
        and sent again where others compose them."""
        maps, kept = (self.maps, self.kept) if options.save_transfer else (None, None)
        tape = tape if options.save_mode == "full" else ()
        return Saved(self.context, self.rank, self.options, self.shapes, self.entry, maps, kept, tape)

    def holding(self, boundary: dict[str, Tensor | None], tape: tuple[Tensor, ...]) -> "Saved":
        """The same with other tensors, or without some."""
        entry, maps, kept = (boundary.get(name, getattr(self, name)) for name in ("entry", "maps", "kept"))
        return Saved(self.context, self.rank, self.options, self.shapes, entry, maps, kept, tape)

    def __deepcopy__(self, memo: dict) -> "Saved":
        return self

    def sealed(self) -> "Saved":
        """To be noticed if it is changed."""
        return replace(self, versions=_versions(self.tensors))


def saved_at_seams(view: RankView, cut: Segments, options: Options) -> tuple[str, ...]:
    """By their names, the tensors of a rank's `boundary` that are kept and may hold something: what the exchange keeps
    counts wherever anything crosses in the group."""
    maps = options.save_transfer
    held = {
        "entry": cut.entered.order.shape[0], "maps": maps and cut.bridges.shape[0], "kept": maps and not view.seams.none
    }  # fmt: skip
    return tuple([name for name, holds in held.items() if holds and options.keeps])


def check_saved(
    saved: object, context: Context, rank: int, options: Options, x: Operands, argument: str = "saved"
) -> None:
    """Raises unless `saved` is None, or was kept by a forward of the same context, rank, shapes and options, and is as
    it was."""
    if saved is None:
        return
    if not isinstance(saved, Saved):
        raise TypeError(f"{argument} must be what forward returned as its third result, got {type(saved).__name__}")
    if saved.context is not context:
        raise ValueError(f"{argument} was kept by a forward with another context")
    if saved.rank != rank:
        raise ValueError(f"{argument} was kept by the forward of rank {saved.rank}, and given to rank {rank}")
    if saved.shapes != shapes(x):
        name, had, got = next(row for row in zip(x._fields, saved.shapes, shapes(x), strict=True) if row[1] != row[2])
        had, got = ("none" if s is None else f"{tuple(s[0])} in {s[1]}" for s in (had, got))
        raise ValueError(f"{argument} was kept by a forward with another {name}: {had}, got {got}")
    if other := [name for name in SHAPING if getattr(saved.options, name) != getattr(options, name)]:
        had, got = (", ".join(f"{n}={getattr(o, n)!r}" for n in other) for o in (saved.options, options))
        raise ValueError(f"{argument} was kept by a forward with {had}, got {got}")
    if saved.versions != _versions(saved.tensors):
        raise ValueError(f"{argument} holds a tensor that was changed in place since the forward")


def shapes(x: Operands) -> tuple:
    return tuple(None if t is None else (t.shape, t.dtype) for t in x)


def _versions(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(0 if t.is_inference() else t._version for t in tensors)  # those of inference mode are not counted


def start_states(cut: Segments, x: Operands) -> Tensor:
    """[first, HV, K, V]: the initial states of documents that begin here; of none where none is given."""
    return _of_documents(x, x.initial_state, cut.first_docs)


def end_adjoints(cut: Segments, x: Operands, dfinal_state: Tensor | None) -> Tensor:
    """[last, HV, K, V]: the final state's gradients of documents that end here; of none where none is given."""
    return _of_documents(x, dfinal_state, cut.last_docs)


def _of_documents(x: Operands, states: Tensor | None, docs: Tensor) -> Tensor:
    if states is None:
        return x.q.new_empty(x.state_shape(0), dtype=x.state_type)
    return states.index_select(0, docs).to(x.state_type)


def joined(passed: Tensor, ends: Tensor) -> Tensor:
    """What a walk of all segments takes: states that passed from one to another, and behind them those at ends."""
    return torch.cat([passed, ends]) if ends.shape[0] else passed


def final_states(view: RankView, cut: Segments, x: Operands, exit: Tensor, documents: int) -> Tensor:
    """[N, HV, K, V]: the exit state where a document ends on this rank, zero for all others; an empty document's is its
    initial state, on rank 0."""
    final = exit.new_zeros(documents, *exit.shape[1:])
    final[cut.last_docs] = exit[cut.last_slots]
    if x.initial_state is not None:
        final[view.empty_docs] = x.initial_state[view.empty_docs].to(final.dtype)
    return final


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
