"""The stages on sm_90, as `kernels/stages.py` names them, but for `gradients`, which is still to come.

The backward of the convolution is the torch tier's.
"""

from typing import NamedTuple

from torch import Tensor

from deltaspan.kernels.hopper.adjoint import adjoint as walked_back
from deltaspan.kernels.hopper.compose import chain, merge
from deltaspan.kernels.hopper.conv import convolve
from deltaspan.kernels.hopper.forward import forward
from deltaspan.kernels.hopper.prep import Prepared
from deltaspan.kernels.hopper.prep import prep as prepared
from deltaspan.kernels.hopper.transfer import transfer as transferred
from deltaspan.kernels.stages import READY, Grid, Raw, Runs
from deltaspan.kernels.torch.conv import activation_gradient, conv_gradients, preactivation

__all__ = [
    "KEPT_TENSORS",
    "Adjoint",
    "Tape",
    "activation_gradient",
    "adjoint_prep",
    "adjoint_summary",
    "adjoint_walk",
    "chain",
    "conv_gradients",
    "convolve",
    "keep",
    "kept_bytes",
    "merge",
    "preactivation",
    "prep",
    "summary",
    "transfer",
    "walk",
]

KEPT_TENSORS = 0


class Tape(NamedTuple):
    """A rank's operands in bf16, q and k ready or raw, and what prep made of them."""

    q: Tensor  # [T, H, 128]
    k: Tensor
    v: Tensor  # [T, HV, 128]
    made: Prepared
    grid: Grid
    scale: float


class Adjoint(NamedTuple):
    """A tape with the output's gradient."""

    tape: Tape
    do: Tensor  # [T, HV, 128] bf16


def prep(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, grid: Grid, *, scale: float, unit_keys: bool,
    raw: Raw = READY,
) -> Tape:  # fmt: skip
    """Prepares every chunk; q, k [T, H, 128], v [T, HV, 128] bf16, g and beta [T, HV], ready or raw."""
    assert unit_keys, "select refuses other keys"
    q, k, v = (_by_rows(x) for x in (q, k, v))
    raw = raw._replace(**{name: x.contiguous() for name, x in raw._asdict().items() if isinstance(x, Tensor)})
    made = prepared(k, g.contiguous(), beta.contiguous(), grid.table, q=q, raw=raw)
    return Tape(q, k, v, made, grid, scale)


def summary(tape: Tape, runs: Runs, entry: Tensor) -> tuple[Tensor, Tensor]:
    """The affine map of each run: M [n, HV, 128, 128], and its exit state from `entry`, like it."""
    _, exit = _walked(tape, runs, entry, output=False, exits=True)
    return transfer(tape, runs), exit


def transfer(tape: Tape, runs: Runs) -> Tensor:
    """The maps M [n, HV, 128, 128] alone."""
    return transferred(tape.k, tape.made, runs.table)


def walk(
    tape: Tape, runs: Runs, entry: Tensor, *, output: bool, exits: bool = True
) -> tuple[Tensor, Tensor | None, None]:
    """Walks every run from its true entry state: o [T, HV, 128], exit states like entry if anybody reads them."""
    o, exit = _walked(tape, runs, entry, output=output, exits=exits)
    if o is not None:
        o[tape.grid.tokens :] = 0
    return o, exit, None


def adjoint_prep(tape: Tape, do: Tensor) -> Adjoint:
    """Joins the output's gradient do [T, HV, 128] bf16 to a tape."""
    return Adjoint(tape, _by_rows(do))


def adjoint_summary(adjoint: Adjoint, runs: Runs, leaving: Tensor) -> Tensor:
    """The adjoint [n, HV, 128, 128] of each run's entry state, for the adjoint `leaving` [S, HV, 128, 128] of its exit
    state."""
    entering, _ = _walked_back(adjoint, runs, leaving, states=False)
    return entering


def adjoint_walk(adjoint: Adjoint, runs: Runs, leaving: Tensor) -> tuple[Tensor, Tensor]:
    """Walks every run back from the true adjoint [S, HV, 128, 128] of its exit state to that of its entry state; with D
    at the end of every chunk [NC, HV, V, K] bf16."""
    return _walked_back(adjoint, runs, leaving, states=True)


def keep(tape: Tape, states: None) -> tuple[Tensor, ...]:
    return ()


def kept_bytes(chunks: int, *, HV: int, K: int, V: int, state_size: int) -> int:
    return 0


def _walked(tape: Tape, runs: Runs, entry: Tensor, **what: bool) -> tuple[Tensor | None, Tensor | None]:
    operands = tape.q, tape.k, tape.v, tape.made, entry.contiguous(), runs.table, tape.scale
    return forward(*operands, halves=runs.halves, **what)


def _walked_back(adjoint: Adjoint, runs: Runs, leaving: Tensor, *, states: bool) -> tuple[Tensor, Tensor | None]:
    tape = adjoint.tape
    operands = tape.q, tape.k, adjoint.do, tape.made, leaving.contiguous(), runs.table, tape.scale
    return walked_back(*operands, states=states, halves=runs.halves)


def _by_rows(x: Tensor) -> Tensor:
    """As it is where the copy engine can read it: heads and channels dense, rows at multiples of 16 bytes."""
    dense = x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % 8 == 0 and x.stride(0) >= x.shape[1] * x.shape[2]
    return x if dense and x.storage_offset() % 8 == 0 else x.contiguous()
