"""The story: context, operation and convolution, each direction on one screen."""

from deltaspan.op.context import Context, build_context
from deltaspan.op.conv import causal_conv1d
from deltaspan.op.explicit import backward, forward
from deltaspan.op.function import chunk_gated_delta_rule
from deltaspan.op.packed import packed_qkv_views
from deltaspan.op.recompute import RecomputeHandle
from deltaspan.op.saved import Saved
from deltaspan.op.sizes import comm_bytes, saved_bytes
from deltaspan.op.together import told_to_others
from deltaspan.op.workspace import workspace_bytes

__all__ = [
    "Context",
    "RecomputeHandle",
    "Saved",
    "backward",
    "build_context",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "comm_bytes",
    "forward",
    "packed_qkv_views",
    "saved_bytes",
    "told_to_others",
    "workspace_bytes",
]
