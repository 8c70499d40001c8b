"""The operation as users call it: with autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deltaspan.op.again import backward_again, forward_again
from deltaspan.op.arguments import Shards, as_autocast, batched, check_given, given_to, options_of
from deltaspan.op.context import Context
from deltaspan.op.forward import Forward, stages
from deltaspan.op.keeping import Keeping
from deltaspan.op.operands import Operands, squeeze, without_batch
from deltaspan.op.options import Options
from deltaspan.op.recompute import RULE, RecomputeHandle, Region, check_handle, surrounding, taken, unread
from deltaspan.op.saved import check_saved, saved_at_seams
from deltaspan.op.together import anchor, any_state_crosses
from deltaspan.plan import Cut


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
    A_log: Shards | None = None,
    dt_bias: Shards | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    unit_keys: bool = True,
    save_mode: str = "light",
    boundary_mode: str = "saved",
    save_transfer: bool = True,
    exchange: str = "all_to_all",
    backend: str = "auto",
    segments: Cut | None = None,
    reuse_recompute_tapes: str | bool = "auto",
    recompute_output: str = "auto",
    recompute_handle: RecomputeHandle | None = None,
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
        use_qk_l2norm_in_kernel: q and k are normalised here, x / sqrt(|x|^2 + 1e-6) for every head's row.
        use_gate_in_kernel: g is raw, and the decay -exp(A_log) softplus(g + dt_bias), with both [HV] in fp32, dt_bias
            None for none; g may have q's type. Their gradients are this rank's share of a sum over the group.
        use_beta_sigmoid_in_kernel: beta is raw, and the write strength its sigmoid, twice that with allow_neg_eigval.
        unit_keys: |k| <= 1 up to rounding and beta <= 2, which permits the decay-free inverse. A longer key
            (|k|^2 > 1.03) turns its document's outputs from there on into NaN. False: keys of any length.
        save_mode: "light" keeps states and maps at the seams, and the backward runs the stages again; "full" keeps what
            the stages left too.
        boundary_mode: "saved", or "replay", which keeps nothing in either save mode and exchanges once more in the
            backward.
        save_transfer: False keeps no maps: the backward forms them again and sends them where they are composed.
        exchange: "all_to_all", "ring" or "all_gather": how states cross ranks, with the same bits.
        backend: "auto" or a tier's name (`deltaspan.chosen_backend`).
        segments: into how many pieces each fragment is cut that are walked side by side, at most 64 and at most as many
            as the longest fragment has chunks; or the pieces' relative lengths, such as (2, 1, 2); None: as the
            context's rule plans for these heads.
        reuse_recompute_tapes: whether the recompute of a non-reentrant checkpoint hands what its stages leave to the
            backward; "auto": if nothing after it in the region saves a tensor, so that it is used at once.
        recompute_output: "auto" leaves the output out of a recompute where it is proven that nobody reads it; "always"
            computes it.
        recompute_handle: a `RecomputeHandle`, so that the recompute asks for no collective.
        workspace: None.

    Returns:
        o [1, T, HV, V] in v's type, with a batch axis if q has one; and the final states [N, HV, K, V], None if not
        asked for. A document's stands on the rank that holds its last token and is zero elsewhere (an empty document's,
        its initial state, on rank 0), so that a sum over the group replicates it.

    Raises:
        TypeError, ValueError: an argument that does not fit, before anything is sent.
    """
    options = options_of(
        ctx, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval, unit_keys=unit_keys,
        output_final_state=output_final_state, save_mode=save_mode, boundary_mode=boundary_mode,
        save_transfer=save_transfer, exchange=exchange, backend=backend, segments=segments,
        reuse_recompute_tapes=reuse_recompute_tapes, recompute_output=recompute_output, workspace=workspace,
    )  # fmt: skip
    check_handle(recompute_handle, options.keeps)
    if torch.is_autocast_enabled(ctx.device.type):
        q, k, v = (as_autocast(x, ctx.device) for x in (q, k, v))
    given = given_to(ctx, q, k, v, g, beta, initial_state, A_log, dt_bias)
    check_given(ctx, options, given)
    o, final = called(ctx, stages(ctx, given[0], options), options, recompute_handle, given)
    return ctx._unlisted(o), (ctx._unlisted(final) if output_final_state else None)


def called(
    ctx: Context, tier: Any, options: Options, handle: RecomputeHandle | None, given: list[Operands]
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Outputs and final states by rank, from checked operands as they were given, with what autograd needs."""
    recorded = torch.is_grad_enabled() and (ctx.part.world_size > 1 or any(_wants_gradient(x) for x in given))
    if recorded or _transformed():
        region = surrounding() if recorded else None
        flat = [anchor(ctx), *(t for x in given for t in x)]
        results = _GatedDeltaRule.apply(ctx, tier, options, handle, region, *flat)
        return results[: len(given)], results[len(given) :]
    done = _run(ctx, tier, options, handle, [*map(without_batch, given)], keeps=False)
    o, final = zip(*(f[:2] for f in done), strict=True)
    return batched(o, [x.q for x in given]), final


def _wants_gradient(x: Operands) -> bool:
    return any([t is not None and t.requires_grad for t in x])


def _transformed() -> bool:
    """Whether operands may carry derivatives that no gradient mode tells of, which the node then refuses."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _run(
    ctx: Context,
    tier: Any,
    options: Options,
    handle: RecomputeHandle | None,
    ranks: Sequence[Operands],
    *,
    output: bool = True,
    keeps: bool = True,
) -> list[Forward]:
    """The forwards of all ranks that run here, and what a handle is told of them, or tells of an earlier run."""
    entered = handle.find(RULE) if handle is not None else None
    for saved, view, x in zip(entered or (), ctx._views, ranks, strict=False):
        check_saved(saved, ctx, view.rank, options, x, argument="recompute_handle")
    asked = handle is not None and entered is None
    done = ctx._transport.run(
        [
            forward_again(ctx, view, tier, x, options, kept, output=output, keeps=keeps or asked)
            for view, x, kept in zip(ctx._views, ranks, entered or [None] * len(ranks), strict=True)
        ]
    )
    if asked:
        handle.entries[RULE] = [f.saved.of_mode(options).sealed() for f in done]
    return done


class _GatedDeltaRule(torch.autograd.Function):
    """All ranks that run here at once: one rank's operands after another's, each as `Operands`."""

    @staticmethod
    def forward(
        fn: Any,
        ctx: Context,
        tier: Any,
        options: Options,
        handle: RecomputeHandle | None,
        region: Region | None,
        anchor: Tensor | None,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """flat: the operands as they were given. Batch axes are taken off here and put on here, where that makes no
        nodes."""
        given = _by_rank(flat)
        ranks = [*map(without_batch, given)]
        seams = [
            saved_at_seams(view, ctx._cut(view, x.v.shape[1], options.segments), options)
            for view, x in zip(ctx._views, ranks, strict=True)
        ]
        tape = tier.kept_tensors(options.use_qk_l2norm_in_kernel)
        keeping = Keeping.of(options, region, flat, seams, tape)
        done = _run(ctx, tier, options, handle, ranks, output=keeping.output)
        fn.context, fn.tier, fn.options, fn.given, fn.keeping = ctx, tier, options, len(flat), keeping
        fn.templates = keeping.templates(options, done)
        fn.save_for_backward(*flat, *keeping.tensors(done))
        fn.set_materialize_grads(False)
        outputs = [unread(x.v) if f.o is None else f.o for f, x in zip(done, ranks, strict=True)]
        return *batched(outputs, [x.q for x in given]), *(f.final_state for f in done if f.final_state is not None)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @any_state_crosses
    def backward(fn: Any, *grads: Tensor | None) -> tuple:
        ctx, tensors = fn.context, taken(fn)
        given, kept = _by_rank(tensors[: fn.given]), fn.keeping.restore(fn.templates, tensors[fn.given :])
        del tensors
        ranks, W = [*map(without_batch, given)], len(given)
        done = ctx._transport.run(
            [
                backward_again(
                    ctx, view, fn.tier, x, fn.options,
                    torch.zeros_like(x.v) if grads[i] is None else squeeze(grads[i], "o's gradient", 3),
                    grads[W + i] if fn.options.output_final_state else None,
                    [kept.pop(0)],
                )
                for i, (view, x) in enumerate(zip(ctx._views, ranks, strict=True))
            ]
        )  # fmt: skip
        return *[None] * 6, *(grad for g, x in zip(done, given, strict=True) for grad in g.like(x))


def _by_rank(flat: Sequence[Tensor | None]) -> list[Operands]:
    n = len(Operands._fields)
    return [Operands(*flat[i : i + n]) for i in range(0, len(flat), n)]
