"""The Gated DeltaNet layer: knows the projections, gates and norms around the convolution and the op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deltaspan.op import Context, RecomputeHandle, causal_conv1d, chunk_gated_delta_rule, told_to_others

DECAY_RATE_RANGE = (1.0, 16.0)
TIME_STEP_RANGE = (1e-3, 1e-1)


class GatedDeltaNet(nn.Module):
    """One Gated DeltaNet layer over this rank's shard of a pack.

    Yang, Kautz, Hatamizadeh 2024 (arXiv:2412.06464), in the form of the published models:

        q, k, v = SiLU(causal_conv1d(q_proj x)), ... k_proj x, ... v_proj x        one halo exchange for the three
        q, k    = q / |q|, k / |k|                                                per head, in FP32
        g       = -exp(A_log) * softplus(a_proj x + dt_bias)                       natural-log decay, FP32
        beta    = sigmoid(b_proj x)                                               write strength, FP32
        o       = gated delta rule(q, k, v, g, beta)                              states cross ranks here
        y       = o_proj( RMSNorm(o) * SiLU(g_proj x) )                           the norm per value head

    Parameters carry the names and shapes of flash-linear-attention's layer, so that its checkpoints load. `A_log` and
    `dt_bias` are never narrower than FP32: a cast of the module (`.to(torch.bfloat16)`, `.half()`) moves them and
    leaves their values alone, because a decay rounded to eight bits changes what a layer remembers over 64k tokens.

    Every rank of the context's group calls the layer, in the same order, a rank without tokens too. Parameter
    gradients are this rank's partial sums: the training loop all-reduces (SUM) them over the group.

    Args:
        hidden_size: width of the model.
        num_heads: key heads H.
        num_v_heads: value heads HV, a multiple of H; value head j reads key head j // (HV // H). None means H.
        head_dim: K, channels of a key head.
        head_v_dim: V, channels of a value head. None means K.
        conv_size: taps of the convolution; the context's `conv_kernel_size` must be the same.
        norm_eps: epsilon of the output norm.
        device, dtype: of the projections, as for any torch module.

    Raises:
        ValueError: a size below 1, or HV no multiple of H.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_v_heads: int | None = None,
        head_dim: int = 128,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        *,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        head_v_dim = head_dim if head_v_dim is None else head_v_dim
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_v_heads": num_v_heads}
        sizes |= {"head_dim": head_dim, "head_v_dim": head_v_dim, "conv_size": conv_size}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if num_v_heads % num_heads:
            raise ValueError(f"num_v_heads must be a multiple of num_heads = {num_heads}, got {num_v_heads}")
        self.hidden_size, self.conv_size = hidden_size, conv_size
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.head_dim, self.head_v_dim = head_dim, head_v_dim

        key_dim, value_dim = num_heads * head_dim, num_v_heads * head_v_dim
        like = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, key_dim, bias=False, **like)
        self.k_proj = nn.Linear(hidden_size, key_dim, bias=False, **like)
        self.v_proj = nn.Linear(hidden_size, value_dim, bias=False, **like)
        self.a_proj = nn.Linear(hidden_size, num_v_heads, bias=False, **like)
        self.b_proj = nn.Linear(hidden_size, num_v_heads, bias=False, **like)
        self.g_proj = nn.Linear(hidden_size, value_dim, bias=False, **like)
        self.o_proj = nn.Linear(value_dim, hidden_size, bias=False, **like)
        self.q_conv1d = _conv_weight(key_dim, conv_size, **like)
        self.k_conv1d = _conv_weight(key_dim, conv_size, **like)
        self.v_conv1d = _conv_weight(value_dim, conv_size, **like)
        self.o_norm = GatedRMSNorm(head_v_dim, norm_eps, **like)
        # The only parameters of the layer itself, as `_apply` needs: all others belong to children.
        self.A_log = nn.Parameter(torch.empty(num_v_heads, device=device, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(num_v_heads, device=device, dtype=torch.float32))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws A uniform in [1, 16] and dt log-uniform in [1e-3, 0.1], so that softplus(dt_bias) is dt."""
        self.A_log.uniform_(*DECAY_RATE_RANGE).log_()
        low, high = (math.log(bound) for bound in TIME_STEP_RANGE)
        dt = torch.empty_like(self.dt_bias).uniform_(low, high).exp()
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    @told_to_others
    def forward(
        self,
        x: Tensor,
        ctx: Context,
        *,
        backend: str = "auto",
        recompute_handle: RecomputeHandle | None = None,
        **options: Any,
    ) -> Tensor:
        """Applies the layer to a shard.

        Args:
            x: [1, T, hidden_size], T = ctx.tokens, this rank's fragments in local order; T may be 0.
            ctx: the batch's context, shared by all layers.
            backend: "auto" or a tier's name, of the convolution and of the operation.
            recompute_handle: a `RecomputeHandle` of this layer's own, where the layer is checkpointed.
            options: of `chunk_gated_delta_rule`, such as save_mode or exchange.

        Returns:
            [1, T, hidden_size] in x's dtype (in autocast's under autocast).

        Raises:
            TypeError: ctx is no context.
            ValueError: x has another shape; ctx has another convolution width; A_log or dt_bias was narrowed;
                output_final_state=True, for the layer returns y alone.
        """
        if not isinstance(ctx, Context):
            raise TypeError(f"ctx must be a Context, from deltaspan.build_context, got {type(ctx).__name__}")
        for name in ("A_log", "dt_bias"):
            if getattr(self, name).element_size() < 4:
                raise ValueError(
                    f"{name} must stay fp32, got {getattr(self, name).dtype}: leave it out of mixed precision"
                )
        if ctx.rank is None:
            raise ValueError("ctx must be one rank's, of a process group or of none; got a simulated group's")
        needed = (1, ctx.tokens, self.hidden_size)
        if tuple(x.shape) != needed:
            raise ValueError(f"x must have shape [1, ctx.tokens, hidden_size] = {needed}, got {tuple(x.shape)}")
        if ctx.conv_kernel_size != self.conv_size:
            raise ValueError(f"ctx must have conv_kernel_size {self.conv_size}, got {ctx.conv_kernel_size}")
        if options.get("output_final_state"):
            raise ValueError(
                "output_final_state=True is not served by the layer, which returns y alone: call "
                "deltaspan.chunk_gated_delta_rule for the final state"
            )
        H, HV, K, V = self.num_heads, self.num_v_heads, self.head_dim, self.head_v_dim

        q, k, v = causal_conv1d(
            (self.q_proj(x), self.k_proj(x), self.v_proj(x)),  # [1, T, H*K], [1, T, H*K], [1, T, HV*V]
            tuple(conv.weight.squeeze(1) for conv in (self.q_conv1d, self.k_conv1d, self.v_conv1d)),
            ctx,
            activation="silu",
            backend=backend,
            recompute_handle=recompute_handle,
        )
        o, _ = chunk_gated_delta_rule(
            q.unflatten(-1, (H, K)),  # [1, T, H, K]
            k.unflatten(-1, (H, K)),
            v.unflatten(-1, (HV, V)),  # [1, T, HV, V]
            _at_least_fp32(self.a_proj(x)),  # [1, T, HV]
            _at_least_fp32(self.b_proj(x)),
            ctx,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            backend=backend,
            recompute_handle=recompute_handle,
            **options,
        )

        gate = self.g_proj(x).unflatten(-1, (HV, V))
        return self.o_proj(self.o_norm(o, gate).flatten(-2))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GatedDeltaNet:
        """Casts and moves (`to`, `half`, `cuda`, ...) all come through here; A_log and dt_bias only move."""
        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(lambda tensor: _never_narrowed(fn, tensor), recurse=False)


class GatedRMSNorm(nn.Module):
    """RMSNorm over one head's channels, times SiLU of a gate; FP32 inside, as the published models have it."""

    def __init__(self, channels: int, eps: float, **like: torch.device | torch.dtype | str | None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, **like))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate [..., V] -> [..., V] in x's dtype."""
        wide = _at_least_fp32(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return (normed * F.silu(_at_least_fp32(gate))).to(x.dtype)


def _conv_weight(channels: int, taps: int, **like: torch.device | torch.dtype | str | None) -> nn.Conv1d:
    """Holds a depthwise weight in the published shape [D, 1, W]; it is applied by the op that crosses ranks."""
    return nn.Conv1d(channels, channels, taps, groups=channels, bias=False, **like)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _never_narrowed(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    applied = fn(tensor)
    if applied.is_floating_point() and applied.element_size() < 4:
        return tensor.to(device=applied.device, dtype=torch.float32)
    return applied
