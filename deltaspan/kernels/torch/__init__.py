"""The torch tier: every stage in plain torch, on any device, with explicit gradients.

Operands are raised to FP32 (FP64 stays), all arithmetic happens there, and results are rounded once at the end. Chunks
are padded to 64 rows, so that no product depends on where a document ends.
"""

from torch import Tensor

from deltaspan.kernels.stages import Runs
from deltaspan.kernels.torch.adjoint import Adjoint, adjoint_prep, adjoint_summary, adjoint_walk
from deltaspan.kernels.torch.conv import activation_gradient, conv_gradients, convolve, preactivation
from deltaspan.kernels.torch.gradients import gradients
from deltaspan.kernels.torch.prep import Tape, prep
from deltaspan.kernels.torch.tapes import keep, kept_bytes, kept_tensors, restore
from deltaspan.kernels.torch.walk import States, chain, exit_states, merge, tell, transfer, walk, walk_ahead

__all__ = [
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
    "kept_tensors",
    "merge",
    "preactivation",
    "prep",
    "pull_back",
    "restore",
    "summaries",
    "tell",
    "transfer",
    "walk",
    "walk_ahead",
]


def summaries(tape: Tape, through: Runs, left: Runs, entry: Tensor) -> tuple[Tensor, Tensor]:
    """The maps of `through` and the exit states of `left`."""
    return transfer(tape, through), exit_states(tape, left, entry)


def pull_back(adjoint: Adjoint, runs: Runs, states: States, leaving: Tensor) -> tuple[Tensor | None, ...]:
    """The adjoint of every run's entry state from that of its exit state, `leaving`, and the gradients of operands."""
    entering, costates = adjoint_walk(adjoint, runs, leaving)
    return entering, *gradients(adjoint, states, costates)
