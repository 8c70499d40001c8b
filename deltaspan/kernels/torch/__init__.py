"""The torch tier: every stage in plain torch, on any device, with explicit gradients.

Operands are raised to FP32 (FP64 stays), all arithmetic happens there, and results are rounded once at the end. Chunks
are padded to 64 rows, so that no product depends on where a document ends.
"""

from deltaspan.kernels.torch.adjoint import adjoint_prep, adjoint_summary, adjoint_walk
from deltaspan.kernels.torch.conv import activation_gradient, conv_gradients, convolve, preactivation
from deltaspan.kernels.torch.gradients import gradients
from deltaspan.kernels.torch.prep import prep
from deltaspan.kernels.torch.tapes import KEPT_TENSORS, keep, kept_bytes, restore
from deltaspan.kernels.torch.walk import chain, merge, summary, transfer, walk

__all__ = [
    "KEPT_TENSORS",
    "activation_gradient",
    "adjoint_prep",
    "adjoint_summary",
    "adjoint_walk",
    "chain",
    "conv_gradients",
    "convolve",
    "gradients",
    "keep",
    "kept_bytes",
    "merge",
    "preactivation",
    "prep",
    "restore",
    "summary",
    "transfer",
    "walk",
]
