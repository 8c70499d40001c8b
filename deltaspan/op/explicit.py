"""Each direction of the operation by itself, without autograd."""

from typing import Any

import torch

from deltaspan.op.arguments import Shards, batched, check_given, given_to, options_of
from deltaspan.op.backward import Gradients, backward_program
from deltaspan.op.context import Context
from deltaspan.op.forward import forward_program, stages
from deltaspan.op.operands import check_like, without_batch
from deltaspan.op.options import Options
from deltaspan.op.saved import Saved, check_saved
from deltaspan.op.together import any_state_crosses


@any_state_crosses
@torch.no_grad()
def forward(
    q: Shards,
    k: Shards,
    v: Shards,
    g: Shards,
    beta: Shards,
    ctx: Context,
    *,
    initial_state: Shards | None = None,
    A_log: Shards | None = None,
    dt_bias: Shards | None = None,
    **options: Any,
) -> tuple[Shards, Shards | None, Saved | list[Saved] | None]:
    """`chunk_gated_delta_rule` without autograd, and with operands as they are, also under autocast.

    Its third result is what `backward` takes as `saved`; None with boundary_mode="replay", which keeps nothing.
    Options of a recompute (`reuse_recompute_tapes`, `recompute_output`) are refused but for their default, "auto".
    """
    options = _options(ctx, **options)
    given = given_to(ctx, q, k, v, g, beta, initial_state, A_log, dt_bias)
    check_given(ctx, options, given)
    ranks = [*map(without_batch, given)]
    tier = stages(ctx, ranks[0], options)
    done = ctx._transport.run(
        [
            forward_program(ctx, view, tier, x, options, keeps=options.keeps)
            for view, x in zip(ctx._views, ranks, strict=True)
        ]
    )
    final = ctx._unlisted([f.final_state for f in done]) if options.output_final_state else None
    saved = ctx._unlisted([f.saved.of_mode(options, f.tape).sealed() for f in done]) if options.keeps else None
    return ctx._unlisted(batched((f.o for f in done), [x.q for x in given])), final, saved


@any_state_crosses
@torch.no_grad()
def backward(
    q: Shards,
    k: Shards,
    v: Shards,
    g: Shards,
    beta: Shards,
    ctx: Context,
    do: Shards,
    *,
    dfinal_state: Shards | None = None,
    saved: Saved | list[Saved] | None = None,
    initial_state: Shards | None = None,
    A_log: Shards | None = None,
    dt_bias: Shards | None = None,
    **options: Any,
) -> Gradients | list[Gradients]:
    """The gradients of `forward` for do [1, T, HV, V] and dfinal_state [N, HV, K, V], with its operands and options.

    saved: what `forward` returned; None runs its summaries and exchange again, with the same bits.
    dfinal_state counts on the rank on which a document's final state stands.

    Returns:
        Gradients: dq, dk, dv in the operands' type, the rest fp32 (fp64 beside such operands), in their shapes; dq, dk
        and dv are views of one packed row where q, k and v are.

    Raises:
        TypeError, ValueError: an argument that does not fit, or a saved set of another call.
    """
    options = _options(ctx, **options)
    given = given_to(ctx, q, k, v, g, beta, initial_state, A_log, dt_bias)
    check_given(ctx, options, given)
    ranks = [*map(without_batch, given)]
    kept = ctx._listed("saved", saved) if saved is not None else [None] * len(ranks)
    dos = [check_like("do", t, x.v.shape, ctx.device) for t, x in zip(ctx._listed("do", do), ranks, strict=True)]
    dfinals = [
        None if t is None else check_like("dfinal_state", t, x.state_shape(ctx.part.num_documents), ctx.device)
        for t, x in zip(ctx._replicated("dfinal_state", dfinal_state), ranks, strict=True)
    ]
    tier = stages(ctx, ranks[0], options)
    for s, view, x in zip(kept, ctx._views, ranks, strict=True):
        check_saved(s, ctx, view.rank, options, x)
    done = ctx._transport.run(
        [
            backward_program(ctx, view, tier, x, options, *rest)
            for view, x, *rest in zip(ctx._views, ranks, dos, dfinals, kept, strict=True)
        ]
    )
    return ctx._unlisted([grads.like(x) for grads, x in zip(done, given, strict=True)])


def _options(ctx: Context, **given: Any) -> Options:
    """Those of a call, which no checkpoint computes again."""
    options = options_of(ctx, **given)
    for name in ("reuse_recompute_tapes", "recompute_output"):
        if (value := getattr(options, name)) != "auto":
            raise ValueError(
                f"{name} is for checkpoints under autograd: deltaspan.forward and backward take 'auto', got {value!r}"
            )
    return options
