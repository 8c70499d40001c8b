"""The demo's judge: the same model in float64 on one device, written again in plain torch over the reference op.

It shares parameters with the trained model, and no code: neither the layer, nor the op, nor a partition.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from deltaspan.demo.corpus import IGNORED_LABEL
from deltaspan.demo.model import NORM_EPS, ModelShape
from deltaspan.reference import causal_conv1d, chunked_gated_delta_rule


def loss_and_gradients(
    parameters: dict[str, Tensor], shape: ModelShape, tokens: Tensor, labels: Tensor, cu_seqlens: list[int]
) -> tuple[float, dict[str, Tensor]]:
    """The mean cross entropy of one pack, and its gradient by every parameter.

    Args:
        parameters: the model's, by name; copied to float64.
        shape: the model's sizes.
        tokens, labels: [1, T] int64, the whole pack; labels of IGNORED_LABEL do not count.
        cu_seqlens: offsets of the documents in the pack.

    Returns:
        the loss, and float64 gradients by the parameters' names.
    """
    wide = {name: value.detach().cpu().double().requires_grad_() for name, value in parameters.items()}
    logits = _logits(wide, shape, tokens[0], torch.tensor(cu_seqlens))
    loss = F.cross_entropy(logits, labels[0], ignore_index=IGNORED_LABEL, reduction="mean")
    return loss.item(), dict(zip(wide, torch.autograd.grad(loss, list(wide.values())), strict=True))


def _logits(p: dict[str, Tensor], shape: ModelShape, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
    """tokens [T] -> logits [T, 256]."""
    x = p["embedding.weight"][tokens]
    for i in range(shape.layers):
        prefix = f"layers.{i}."
        layer = {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}
        x = x + _gated_delta_net(layer, shape, _rms_norm(x, p[f"norms.{i}.weight"]), cu_seqlens)
    return _rms_norm(x, p["final_norm.weight"]) @ p["head.weight"].T


def _gated_delta_net(p: dict[str, Tensor], shape: ModelShape, x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """x [T, hidden] -> [T, hidden]: arXiv:2412.06464, figure 1 (right), as the published models have it."""
    tokens, d = x.shape[0], shape.head_dim

    def convolved(name: str) -> Tensor:
        rows = x @ p[f"{name}_proj.weight"].T
        return causal_conv1d(rows, p[f"{name}_conv1d.weight"][:, 0], cu_seqlens, activation="silu").view(tokens, -1, d)

    q, k, v = convolved("q"), convolved("k"), convolved("v")  # [T, H, K], [T, H, K], [T, HV, V]
    q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    g = -p["A_log"].exp() * F.softplus(x @ p["a_proj.weight"].T + p["dt_bias"])  # [T, HV]
    beta = torch.sigmoid(x @ p["b_proj.weight"].T)  # [T, HV]
    o, _ = chunked_gated_delta_rule(q, k, v, g, beta, cu_seqlens)  # [T, HV, V]
    gate = F.silu((x @ p["g_proj.weight"].T).view(tokens, -1, d))
    return (_rms_norm(o, p["o_norm.weight"]) * gate).flatten(1) @ p["o_proj.weight"].T


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + NORM_EPS).sqrt() * weight
