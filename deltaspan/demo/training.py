"""The training loop that one rank runs: the same lines on four ranks and on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import deltaspan as ds
from deltaspan.demo.corpus import IGNORED_LABEL, TextPack
from deltaspan.demo.model import ByteLanguageModel
from deltaspan.demo.settings import DemoSettings


@dataclass
class RankOutcome:
    """What one rank saw, step by step; losses and gradients are the group's."""

    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    first_gradients: dict[str, np.ndarray] = field(default_factory=dict)


def initial_model(settings: DemoSettings) -> ByteLanguageModel:
    """The model before its first step, drawn on the CPU from the seed: alike on every rank."""
    torch.manual_seed(settings.seed)
    return ByteLanguageModel(settings.shape)


def train(
    settings: DemoSettings,
    packs: list[TextPack],
    group: dist.ProcessGroup | None,
    device: torch.device,
    on_step: Callable[[int, float], None],
) -> RankOutcome:
    """Trains from the seed, one pack a step, on this rank's share of every pack.

    Args:
        settings: the run's.
        packs: one whole pack a step, the same on every rank.
        group: the context-parallel group, or None for one rank.
        device: this rank's.
        on_step: called after every step with its number and loss.
    """
    ranks = group.size() if group is not None else 1
    model = initial_model(settings).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    outcome = RankOutcome()
    for step, pack in enumerate(packs):
        part = ds.partition(pack.cu_seqlens, ranks, layout=settings.layout)
        ctx = ds.build_context(part, group, device=device, conv_kernel_size=settings.shape.conv_size)
        tokens = ctx.shard(pack.tokens.to(device))  # [1, T]
        labels = ctx.shard(pack.labels.to(device))  # [1, T], shifted on the whole pack, so that none looks past a seam

        logits = model(tokens, ctx)  # [1, T, 256]
        total = F.cross_entropy(logits[0], labels[0], ignore_index=IGNORED_LABEL, reduction="sum")
        share = total / pack.predicted  # this rank's share of the loss: the divisor is the group's count
        optimizer.zero_grad()
        share.backward()
        loss = sum_over_group(model, share.detach(), group)
        if step == 0:
            outcome.first_gradients = {name: p.grad.cpu().numpy().copy() for name, p in model.named_parameters()}
        optimizer.step()

        sent, received = bytes_per_step(settings, ctx)
        outcome.losses.append(loss)
        outcome.tokens.append(ctx.tokens)
        outcome.sent.append(sent)
        outcome.received.append(received)
        on_step(step, loss)
    return outcome


def sum_over_group(model: nn.Module, share: Tensor, group: dist.ProcessGroup | None) -> float:
    """All-reduces every gradient, and the loss, in one flat FP32 buffer; returns the group's loss."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([share.reshape(1), *(gradient.reshape(-1) for gradient in gradients)])
    if group is not None:
        dist.all_reduce(flat, group=group)
        pieces = flat[1:].split([gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))
    return flat[0].item()


def bytes_per_step(settings: DemoSettings, ctx: ds.Context) -> tuple[int, int]:
    """What this rank hands to the exchanges of one step, and gets from them, over all layers and both directions."""
    shape = settings.shape
    heads = {"H": shape.key_heads, "HV": shape.value_heads, "K": shape.head_dim, "V": shape.head_dim}
    per_layer = ds.comm_bytes(ctx, **heads, dtype=torch.float32).values()
    sent, received = (shape.layers * sum(side) for side in zip(*per_layer, strict=True))
    return sent, received
