"""From what users give to what programs take: one `Operands` for each rank that runs here, and back."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from deltaspan.op.context import Context
from deltaspan.op.operands import AXES, NAMES, Operands, check_operands
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


def given_to(
    ctx: Context,
    q: Shards,
    k: Shards,
    v: Shards,
    g: Shards,
    beta: Shards,
    initial_state: Shards | None,
    A_log: Shards | None,
    dt_bias: Shards | None,
) -> list[Operands]:
    """What users give, rank by rank, unchecked and with its batch axis."""
    if not ctx._simulated:
        return [Operands(q, k, v, g, beta, initial_state, A_log, dt_bias)]
    columns = [*map(ctx._listed, AXES, (q, k, v, g, beta))]
    columns += map(ctx._replicated, NAMES[len(AXES) :], (initial_state, A_log, dt_bias))
    return list(map(Operands, *columns))


def check_given(ctx: Context, options: Options, given: list[Operands]) -> None:
    """Raises TypeError or ValueError for operands that do not fit the call, each other or the context."""
    for x in given:
        check_gate(options, x.A_log, x.dt_bias)
    for view, x in zip(ctx._views, given, strict=True):
        check_operands(
            x,
            raw_g=options.use_gate_in_kernel,
            raw_beta=options.use_beta_sigmoid_in_kernel,
            tokens=view.tokens,
            padded=ctx.part.world_size == 1,
            documents=ctx.part.num_documents,
            device=ctx.device,
        )


def as_autocast(x: Any, device: torch.device) -> Any:
    """Under autocast an operand is cast as for a matrix product: all but FP64, to the type that it names."""
    if isinstance(x, list):
        return [as_autocast(shard, device) for shard in x]
    cast = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device.type)) if cast else x


def batched(outputs: Iterable[Tensor], qs: Iterable[Tensor]) -> list[Tensor]:
    """Outputs [T, HV, V] with a batch axis where q has one: in place, since they are new, and the same from a node."""
    return [o.unsqueeze_(0) if q.dim() == 4 else o for o, q in zip(outputs, qs, strict=True)]
