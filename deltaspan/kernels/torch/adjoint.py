"""The adjoint of the state from chunk to chunk, backwards; it needs no state.

With D the adjoint of the state at a chunk's end:    dU = r (K D) + scale (E o P)^T dO,    P = tril(Q K^T)
                                                     D <- gamma D + scale (a Q)^T dO - w^T dU
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltaspan.kernels.stages import Runs
from deltaspan.kernels.torch.chunks import full_precision, to_chunks
from deltaspan.kernels.torch.prep import Tape
from deltaspan.kernels.torch.walk import taken


class Adjoint(NamedTuple):
    """A tape with the output's gradient."""

    tape: Tape
    do: Tensor  # [NC, HV, 64, V]
    inner: Tensor  # scale (E o P)^T dO [NC, HV, 64, V]


class Costates(NamedTuple):
    """What the gradients read of an adjoint walk."""

    costate: Tensor  # D at each chunk's end [NC, HV, K, V]
    dupdate: Tensor  # dU [NC, HV, 64, V]


@full_precision()
def adjoint_prep(tape: Tape, do: Tensor) -> Adjoint:
    """Joins the output's gradient do [T, HV, V] to a tape."""
    do = torch.where(tape.broken, torch.nan, to_chunks(do, tape.grid, tape.q.dtype))  # as loud as the output
    return Adjoint(tape, do, (tape.scale * tape.decay * tape.qk).mT @ do)


@full_precision()
def adjoint_summary(adjoint: Adjoint, runs: Runs, leaving: Tensor) -> Tensor:
    """The adjoint [n, HV, K, V] of each run's entry state, for the adjoint `leaving` [E, HV, K, V] of its exit state.

    The map is affine with the forward's M transposed: M^T (what is added to `leaving`) + the result.
    """
    return _walk_back(adjoint, runs, leaving, None)


@full_precision()
def adjoint_walk(adjoint: Adjoint, runs: Runs, leaving: Tensor) -> tuple[Tensor, Costates]:
    """Walks every run back from the true adjoint [E, HV, K, V] of its exit state to that of its entry state."""
    chunks = adjoint.do.shape[0]
    costates = Costates(leaving.new_empty(chunks, *leaving.shape[1:]), adjoint.do.new_empty(adjoint.do.shape))
    return _walk_back(adjoint, runs, leaving, costates), costates


def _walk_back(adjoint: Adjoint, runs: Runs, leaving: Tensor, costates: Costates | None) -> Tensor:
    tape, D = adjoint.tape, taken(leaving, runs.leavings)
    for step, n in enumerate(runs.active):
        c = runs.last[:n] - step
        dU = tape.rk[c] @ D[:n] + adjoint.inner[c]
        if costates is not None:
            costates.costate[c], costates.dupdate[c] = D[:n], dU
        D[:n] = tape.gamma[c] * D[:n] + tape.read[c].mT @ adjoint.do[c] - tape.w[c].mT @ dU
    return D[runs.inverse]
