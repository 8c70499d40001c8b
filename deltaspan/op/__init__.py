"""The story: context, operation and convolution, each direction on one screen."""

from deltaspan.op.context import Context, build_context
from deltaspan.op.conv import causal_conv1d
from deltaspan.op.function import backward, chunk_gated_delta_rule, forward
from deltaspan.op.saved import Saved
from deltaspan.op.sizes import comm_bytes, saved_bytes
from deltaspan.op.together import told_to_others

__all__ = [
    "Context",
    "Saved",
    "backward",
    "build_context",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "comm_bytes",
    "forward",
    "saved_bytes",
    "told_to_others",
]
