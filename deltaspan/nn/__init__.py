"""Layers that take a context: whole modules for a model whose tokens are spread over ranks."""

from deltaspan.nn.gated_delta_net import GatedDeltaNet

__all__ = ["GatedDeltaNet"]
