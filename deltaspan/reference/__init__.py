"""The truth: what the operator and the convolution compute, in float64, by code that shares nothing with theirs."""

from deltaspan.reference.chunked import HeadSlab, chunked_gated_delta_rule, head_slabs
from deltaspan.reference.convolution import causal_conv1d
from deltaspan.reference.recurrent import recurrent_gated_delta_rule

__all__ = ["HeadSlab", "causal_conv1d", "chunked_gated_delta_rule", "head_slabs", "recurrent_gated_delta_rule"]
