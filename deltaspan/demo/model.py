"""The demo's model: bytes in, the next byte's logits out, two Gated DeltaNet layers between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from deltaspan.nn import GatedDeltaNet

if TYPE_CHECKING:
    from deltaspan.op import Context

BYTES = 256
NORM_EPS = 1e-6


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model; HV is a multiple of H."""

    hidden: int = 128
    layers: int = 2
    key_heads: int = 2
    value_heads: int = 4
    head_dim: int = 32
    conv_size: int = 4


class ByteLanguageModel(nn.Module):
    """Embedding, pre-norm residual GDN layers, norm, head; runs on one rank's shard of a pack."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.hidden)
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden, eps=NORM_EPS) for _ in range(shape.layers))
        self.layers = nn.ModuleList(
            GatedDeltaNet(
                shape.hidden,
                shape.key_heads,
                shape.value_heads,
                shape.head_dim,
                conv_size=shape.conv_size,
                norm_eps=NORM_EPS,
            )
            for _ in range(shape.layers)
        )
        self.final_norm = nn.RMSNorm(shape.hidden, eps=NORM_EPS)
        self.head = nn.Linear(shape.hidden, BYTES, bias=False)

    def forward(self, tokens: Tensor, ctx: Context) -> Tensor:
        """tokens [1, T] int64, this rank's -> logits [1, T, 256]."""
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), ctx, backend="torch")  # in fp32, of small heads
        return self.head(self.final_norm(x))
