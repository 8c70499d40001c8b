"""From what users give to what programs take: one `Operands` for each rank that runs here, and back."""

from typing import Any

import torch
from torch import Tensor

from deltaspan.op.context import Context
from deltaspan.op.operands import NAMES, REQUIRED, Operands, check_operands
from deltaspan.op.options import Options, check_gate, check_segments

Shards = Tensor | list[Tensor]


def options_of(ctx: Context, **given: Any) -> Options:
    """The options of a call.

    Raises:
        TypeError, ValueError: as `Options.of`, and for a context that is none or a partition that cannot be cut so.
    """
    if not isinstance(ctx, Context):
        raise TypeError(f"ctx must be a Context, from deltaspan.build_context, got {type(ctx).__name__}")
    options = Options.of(**given)
    check_segments(options.segments, ctx.part)
    return options


def operands_of(
    ctx: Context,
    options: Options,
    q: Shards,
    k: Shards,
    v: Shards,
    g: Shards,
    beta: Shards,
    initial_state: Shards | None,
    A_log: Shards | None,
    dt_bias: Shards | None,
    *,
    autocast: bool = False,
) -> list[Operands]:
    """Checked, without the batch axis; q, k and v as autocast has them where it is asked for."""
    if autocast and torch.is_autocast_enabled(ctx.device.type):
        q, k, v = (_as_for_a_product(x, ctx.device) for x in (q, k, v))
    columns = [*map(ctx._listed, REQUIRED, (q, k, v, g, beta))]
    columns += map(ctx._replicated, NAMES[len(REQUIRED) :], (initial_state, A_log, dt_bias))
    for _, a, b in zip(ctx._views, *columns[-2:], strict=True):
        check_gate(options, a, b)
    return [
        check_operands(
            *row,
            raw_g=options.use_gate_in_kernel,
            raw_beta=options.use_beta_sigmoid_in_kernel,
            tokens=view.tokens,
            padded=ctx.part.world_size == 1,
            documents=ctx.part.num_documents,
            device=ctx.device,
        )
        for view, *row in zip(ctx._views, *columns, strict=True)
    ]


def _as_for_a_product(x: Any, device: torch.device) -> Any:
    """An operand is cast as for a matrix product: all but FP64, to the type that it names."""
    if isinstance(x, list):
        return [_as_for_a_product(shard, device) for shard in x]
    if not isinstance(x, Tensor):
        return x
    cast = x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device.type)) if cast else x


def batched(ctx: Context, outputs: Any, q: Shards) -> Shards:
    """Outputs [T, HV, V] with a batch axis where q has one."""
    given = ctx._listed("q", q)
    return ctx._unlisted([o.unsqueeze(0) if x.dim() == 4 else o for o, x in zip(outputs, given, strict=True)])
