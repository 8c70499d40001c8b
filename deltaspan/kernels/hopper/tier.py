"""The stages on sm_90, as `kernels/stages.py` names them.

The backward of the convolution is the torch tier's, and so is what leads from the gradients of ready operands to those
of raw ones. Of its stages nothing is kept: a backward runs `prep` and the walk over states again.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from deltaspan.kernels.hopper.adjoint import adjoint as walked_back
from deltaspan.kernels.hopper.compose import chain, merge
from deltaspan.kernels.hopper.conv import convolve
from deltaspan.kernels.hopper.forward import forward
from deltaspan.kernels.hopper.gradients import gradients as of_chunks
from deltaspan.kernels.hopper.prep import Prepared
from deltaspan.kernels.hopper.prep import prep as prepared
from deltaspan.kernels.hopper.transfer import transfer as transferred
from deltaspan.kernels.stages import READY, Grid, Raw, Runs
from deltaspan.kernels.torch.conv import activation_gradient, conv_gradients, preactivation
from deltaspan.kernels.torch.inputs import raw_gradients, ready

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
    "exit_states",
    "gradients",
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
STATE = torch.float32  # the type of states, and of what is made ready


class Tape(NamedTuple):
    """A rank's operands in bf16, q and k ready or raw, and what prep made of them."""

    q: Tensor  # [T, H, 128]
    k: Tensor
    v: Tensor  # [T, HV, 128]
    g: Tensor  # [T, HV] in fp32 or bf16, ready or raw, and beta
    beta: Tensor
    made: Prepared
    grid: Grid
    scale: float
    raw: Raw


class States(NamedTuple):
    """What the gradients read of a walk."""

    state: Tensor  # S at every chunk's start [NC, HV, V, K] bf16


class Adjoint(NamedTuple):
    """A tape of ready q and k with the output's gradient."""

    tape: Tape
    do: Tensor  # [T, HV, 128] bf16
    given: tuple[Tensor, ...]  # q, k, v, g and beta as they were given
    raw: Raw  # and how


def prep(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, grid: Grid, *, scale: float, unit_keys: bool,
    raw: Raw = READY,
) -> Tape:  # fmt: skip
    """Prepares every chunk; q, k [T, H, 128], v [T, HV, 128] bf16, g and beta [T, HV], ready or raw."""
    assert unit_keys, "select refuses other keys"
    q, k, v, g, beta = *(_by_rows(x) for x in (q, k, v)), g.contiguous(), beta.contiguous()
    raw = raw._replace(**{name: x.contiguous() for name, x in raw._asdict().items() if isinstance(x, Tensor)})
    made = prepared(k, g, beta, grid.table, q=q, raw=raw)
    return Tape(q, k, v, g, beta, made, grid, scale, raw)


def summary(tape: Tape, runs: Runs, entry: Tensor) -> tuple[Tensor, Tensor]:
    """The affine map of each run: M [n, HV, 128, 128], and its exit state from `entry`, like it."""
    return transfer(tape, runs), exit_states(tape, runs, entry)


def exit_states(tape: Tape, runs: Runs, entry: Tensor) -> Tensor:
    """The exit state of each run from `entry`, [n, HV, 128, 128]."""
    return _walked(tape, runs, entry, output=False, exits=True)[1]


def transfer(tape: Tape, runs: Runs) -> Tensor:
    """The maps M [n, HV, 128, 128] alone."""
    return transferred(tape.k, tape.made, runs.table)


def walk(
    tape: Tape, runs: Runs, entry: Tensor, *, output: bool, exits: bool = True
) -> tuple[Tensor | None, Tensor | None, States | None]:
    """Walks every run from its true entry state: o [T, HV, 128], exit states like entry if anybody reads them. With
    output there are no states for the gradients."""
    o, exit, states = _walked(tape, runs, entry, output=output, states=not output, exits=exits)
    if o is not None:
        o[tape.grid.tokens :] = 0
    return o, exit, None if states is None else States(states)


def adjoint_prep(tape: Tape, do: Tensor) -> Adjoint:
    """Joins the output's gradient do [T, HV, 128] bf16 to a tape. Raw q and k are made ready, in bf16, since the walk
    back and the gradients take them so."""
    made_ready = tape
    if tape.raw.l2norm:
        q, k, _, _ = ready(tape.q, tape.k, tape.g, tape.beta, Raw(l2norm=True), STATE)
        raw = tape.raw._replace(l2norm=False)
        operands = q.bfloat16(), k.bfloat16(), tape.v, tape.g, tape.beta
        made_ready = prep(*operands, tape.grid, scale=tape.scale, unit_keys=True, raw=raw)
    return Adjoint(made_ready, _by_rows(do), (tape.q, tape.k, tape.v, tape.g, tape.beta), tape.raw)


def adjoint_summary(adjoint: Adjoint, runs: Runs, leaving: Tensor) -> Tensor:
    """The adjoint [n, HV, 128, 128] of each run's entry state, for the adjoint `leaving` [S, HV, 128, 128] of its exit
    state."""
    entering, _ = _walked_back(adjoint, runs, leaving, states=False)
    return entering


def adjoint_walk(adjoint: Adjoint, runs: Runs, leaving: Tensor) -> tuple[Tensor, Tensor]:
    """Walks every run back from the true adjoint [S, HV, 128, 128] of its exit state to that of its entry state; with D
    at the end of every chunk [NC, HV, V, K] bf16."""
    return _walked_back(adjoint, runs, leaving, states=True)


def gradients(adjoint: Adjoint, states: States, costates: Tensor) -> tuple[Tensor | None, ...]:
    """dq, dk [T, H, 128], dv [T, HV, 128] bf16, dg, dbeta [T, HV] fp32, dA_log and ddt_bias [HV] fp32 or None, of the
    operands as they were given."""
    t, raw = adjoint.tape, adjoint.raw
    _, _, _, beta = ready(t.q, t.k, t.g, t.beta, Raw(sigmoid=raw.sigmoid, largest_beta=raw.largest_beta), STATE)
    operands = t.q, t.k, t.v, beta, adjoint.do, t.made, states.state, costates, t.grid.table, t.scale
    found = of_chunks(*operands, programs=_multiprocessors(t.q.device))
    for x in found:
        x[t.grid.tokens :] = 0
    dq, dk, dv, dg, dbeta = found
    if raw.l2norm:
        dq, dk = dq.float(), dk.float()
    dq, dk, *dgates = raw_gradients(adjoint.given, raw, dq, dk, dg, dbeta, t.grid.tokens)
    return dq.bfloat16(), dk.bfloat16(), dv, *dgates


def keep(tape: Tape, states: States | None) -> tuple[Tensor, ...]:
    return ()


def kept_bytes(chunks: int, *, HV: int, K: int, V: int, state_size: int) -> int:
    return 0


def _walked(tape: Tape, runs: Runs, entry: Tensor, **what: bool) -> tuple[Tensor | None, ...]:
    operands = tape.q, tape.k, tape.v, tape.made, entry.contiguous(), runs.table, tape.scale
    return forward(*operands, halves=runs.halves, **what)


def _walked_back(adjoint: Adjoint, runs: Runs, leaving: Tensor, *, states: bool) -> tuple[Tensor, Tensor | None]:
    tape = adjoint.tape
    operands = tape.q, tape.k, adjoint.do, tape.made, leaving.contiguous(), runs.table, tape.scale
    return walked_back(*operands, states=states, halves=runs.halves)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _by_rows(x: Tensor) -> Tensor:
    """As it is where the copy engine can read it: heads and channels dense, rows at multiples of 16 bytes."""
    dense = x.stride()[1:] == (x.shape[2], 1) and x.stride(0) % 8 == 0 and x.stride(0) >= x.shape[1] * x.shape[2]
    return x if dense and x.storage_offset() % 8 == 0 else x.contiguous()
