"""The operation as users call it: with autograd, or each direction by itself."""

from typing import Any

import torch
from torch import Tensor

from deltaspan.op.backward import Gradients, backward_program
from deltaspan.op.context import Context
from deltaspan.op.forward import forward_program
from deltaspan.op.operands import Operands, check_like, check_operands
from deltaspan.op.options import Options, check_segments
from deltaspan.op.saved import Saved, check_saved
from deltaspan.op.together import anchor, any_state_crosses

Shards = Tensor | list[Tensor]


@any_state_crosses
def chunk_gated_delta_rule(
    q: Shards,
    k: Shards,
    v: Shards,
    g: Shards,
    beta: Shards,
    ctx: Context,
    *,
    scale: float | None = None,
    initial_state: Shards | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    unit_keys: bool = True,
    save_mode: str = "light",
    boundary_mode: str = "saved",
    save_transfer: bool = True,
    exchange: str = "all_to_all",
    backend: str = "auto",
    segments: int | None = None,
    reuse_recompute_tapes: str | bool = "auto",
    recompute_output: str = "auto",
    recompute_handle: Any = None,
    workspace: Any = None,
) -> tuple[Shards, Shards | None]:
    """The gated delta rule over this rank's tokens, as if one rank held the whole pack. Differentiable.

        S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - (exp(g_t) S_(t-1))^T k_t))^T        o_t = scale S_t^T q_t

    from the initial state at every document's start (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464). With a process
    group this is a collective, and so is its backward: every rank calls it, also one without tokens. With a
    SimulatedGroup operands and results are lists, one entry a rank. Under context parallelism the results want a
    gradient wherever gradients are recorded, so that all ranks have a backward where one has.

    Args:
        q, k: [1, T, H, K], bf16, fp16, fp32 or fp64, T this rank's tokens in local order.
        v: [1, T, HV, V], the same type; HV a multiple of H, value head j reads key head j // (HV // H).
        g: [1, T, HV], fp32 (or fp64 beside such operands): natural-log decay; below -1000 it counts as -1000.
        beta: [1, T, HV], fp32 or bf16: write strength, in [0, 1], or [0, 2] with negative eigenvalues.
            The leading axis of 1 may be left out. On one rank buffers may be longer than the pack: zero output there.
            Under autocast q, k and v are cast as for a matrix product.
        ctx: of `build_context`.
        scale: of the output; None means K ** -0.5.
        initial_state: [N, HV, K, V], fp32, one a document, given alike on every rank; its gradient is this rank's share
            of a sum over the group.
        output_final_state: also return the final states.
        unit_keys: |k| <= 1 up to rounding and beta <= 2, which permits the decay-free inverse. A longer key
            (|k|^2 > 1.03) turns its document's outputs from there on into NaN. False: keys of any length.
        backend: "auto" or a tier's name (`deltaspan.chosen_backend`).
        segments: into how many pieces each fragment is cut that are walked side by side, at most 64 and at most as many
            as the longest fragment has chunks; None: as the context's rule plans for these heads.

    The other options are accepted with the values that this release serves (see the README) and refused otherwise.

    Returns:
        o [1, T, HV, V] in v's type, with a batch axis if q has one; and the final states [N, HV, K, V], None if not
        asked for. A document's stands on the rank that holds its last token and is zero elsewhere (an empty document's,
        its initial state, on rank 0), so that a sum over the group replicates it.

    Raises:
        TypeError, ValueError: an argument that does not fit, before anything is sent.
    """
    options = _options(
        ctx,
        scale=scale, unit_keys=unit_keys, output_final_state=output_final_state, backend=backend,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel, A_log=A_log,
        dt_bias=dt_bias, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        save_mode=save_mode, boundary_mode=boundary_mode, save_transfer=save_transfer, exchange=exchange,
        segments=segments, reuse_recompute_tapes=reuse_recompute_tapes, recompute_output=recompute_output,
        recompute_handle=recompute_handle, workspace=workspace,
    )  # fmt: skip
    ranks = [_as_autocast(x) for x in _operands(ctx, q, k, v, g, beta, initial_state)]
    flat = [t for x in ranks for t in x]
    results = _GatedDeltaRule.apply(ctx, options, anchor(ctx), *flat)
    o, final = results[: len(ranks)], results[len(ranks) :]
    return _batched(ctx, o, q), (ctx._unlisted(final) if output_final_state else None)


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
    **options: Any,
) -> tuple[Shards, Shards | None, Saved | list[Saved]]:
    """`chunk_gated_delta_rule` without autograd, and with operands as they are, also under autocast.

    Its third result is what `backward` takes as `saved`.
    """
    options = _options(ctx, **options)
    ranks = _operands(ctx, q, k, v, g, beta, initial_state)
    done = ctx._transport.run(
        [forward_program(ctx, view, x, options) for view, x in zip(ctx._views, ranks, strict=True)]
    )
    final = ctx._unlisted([f.final_state for f in done]) if options.output_final_state else None
    return _batched(ctx, [f.o for f in done], q), final, ctx._unlisted([f.saved for f in done])


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
    **options: Any,
) -> Gradients | list[Gradients]:
    """The gradients of `forward` for do [1, T, HV, V] and dfinal_state [N, HV, K, V], with its operands and options.

    saved: what `forward` returned; None runs its summaries and exchange again, with the same bits.
    dfinal_state counts on the rank on which a document's final state stands.

    Returns:
        Gradients: dq, dk, dv in the operands' type, the rest fp32 (fp64 beside such operands), in their shapes.

    Raises:
        TypeError, ValueError: an argument that does not fit, or a saved set of another call.
    """
    options = _options(ctx, **options)
    ranks = _operands(ctx, q, k, v, g, beta, initial_state)
    kept = ctx._listed("saved", saved) if saved is not None else [None] * len(ranks)
    dos = [check_like("do", t, x.v.shape, ctx.device) for t, x in zip(ctx._listed("do", do), ranks, strict=True)]
    dfinals = [
        None if t is None else check_like("dfinal_state", t, x.state_shape(ctx.part.num_documents), ctx.device)
        for t, x in zip(ctx._replicated("dfinal_state", dfinal_state), ranks, strict=True)
    ]
    for s, x in zip(kept, ranks, strict=True):
        check_saved(s, ctx, options, x)
    done = ctx._transport.run(
        [
            backward_program(ctx, view, x, options, *rest)
            for view, x, *rest in zip(ctx._views, ranks, dos, dfinals, kept, strict=True)
        ]
    )
    operands = zip(*(ctx._listed("", t) for t in (q, k, v, g, beta)), strict=True)
    return ctx._unlisted(
        [
            Gradients(*(grad.reshape(t.shape) for grad, t in zip(grads, given, strict=False)), *grads[len(given) :])
            for grads, given in zip(done, operands, strict=True)
        ]
    )


class _GatedDeltaRule(torch.autograd.Function):
    """All ranks that run here at once: one rank's operands after another's, each as `Operands`."""

    @staticmethod
    def forward(fn: Any, ctx: Context, options: Options, anchor: Tensor, *flat: Tensor | None) -> tuple[Tensor, ...]:
        ranks = _by_rank(flat)
        done = ctx._transport.run(
            [forward_program(ctx, view, x, options) for view, x in zip(ctx._views, ranks, strict=True)]
        )
        fn.context, fn.options, fn.count = ctx, options, len(flat)
        fn.save_for_backward(*flat, *(t for f in done for t in f.saved.tensors))
        fn.shapes = [f.saved.shapes for f in done]
        fn.set_materialize_grads(False)
        return *(f.o for f in done), *(f.final_state for f in done if f.final_state is not None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @any_state_crosses
    def backward(fn: Any, *grads: Tensor | None) -> tuple:
        ctx, tensors = fn.context, fn.saved_tensors
        ranks, kept = _by_rank(tensors[: fn.count]), tensors[fn.count :]
        W, n = len(ranks), len(kept) // len(ranks)
        done = ctx._transport.run(
            [
                backward_program(
                    ctx, view, x, fn.options,
                    torch.zeros_like(x.v) if grads[i] is None else grads[i],
                    grads[W + i] if fn.options.output_final_state else None,
                    Saved(ctx, fn.options, fn.shapes[i], *kept[n * i : n * i + n]),
                )
                for i, (view, x) in enumerate(zip(ctx._views, ranks, strict=True))
            ]
        )  # fmt: skip
        return None, None, None, *(grad for g in done for grad in g[: len(Operands._fields)])


def _options(ctx: Context, **given: Any) -> Options:
    if not isinstance(ctx, Context):
        raise TypeError(f"ctx must be a Context, from deltaspan.build_context, got {type(ctx).__name__}")
    options = Options.of(**given)
    check_segments(options.segments, ctx.part)
    return options


def _operands(
    ctx: Context, q: Shards, k: Shards, v: Shards, g: Shards, beta: Shards, initial_state: Shards | None
) -> list[Operands]:
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    columns = [ctx._listed(name, x) for name, x in named.items()]
    initial = ctx._replicated("initial_state", initial_state)
    return [
        check_operands(
            *row,
            tokens=view.tokens,
            padded=ctx.part.world_size == 1,
            documents=ctx.part.num_documents,
            device=ctx.device,
        )
        for view, *row in zip(ctx._views, *columns, initial, strict=True)
    ]


def _as_autocast(x: Operands) -> Operands:
    """Under autocast q, k and v are cast as for a matrix product: all but FP64, to the type that it names."""
    device = x.q.device.type
    if not torch.is_autocast_enabled(device) or x.q.dtype == torch.float64:
        return x
    narrow = torch.get_autocast_dtype(device)
    return x._replace(q=x.q.to(narrow), k=x.k.to(narrow), v=x.v.to(narrow))


def _by_rank(flat: tuple) -> list[Operands]:
    n = len(Operands._fields)
    return [Operands(*flat[i : i + n]) for i in range(0, len(flat), n)]


def _batched(ctx: Context, outputs: Any, q: Shards) -> Shards:
    given = ctx._listed("q", q)
    return ctx._unlisted([o.unsqueeze(0) if x.dim() == 4 else o for o, x in zip(outputs, given, strict=True)])
