"""The short causal convolution in front of the operation, across the fragments of a document."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltaspan.exchange import Program, fetch_rows
from deltaspan.kernels import select
from deltaspan.op.context import Context
from deltaspan.op.operands import check_tensor, check_type, squeeze
from deltaspan.op.recompute import CONVOLUTION, RecomputeHandle, check_handle
from deltaspan.op.together import anchor, any_row_crosses
from deltaspan.op.view import RankView

ACTIVATIONS = ("silu", None)


class Filter(NamedTuple):
    """One tensor and its taps."""

    x: Tensor  # [T, D]
    weight: Tensor  # [D, W], the last tap reads the token itself
    bias: Tensor | None  # [D]


@any_row_crosses
def causal_conv1d(
    x: Any,
    weight: Any,
    ctx: Context,
    *,
    bias: Any = None,
    activation: str | None = "silu",
    initial_state: None = None,
    output_final_state: bool = False,
    backend: str = "auto",
    recompute_handle: RecomputeHandle | None = None,
) -> Any:
    """Depthwise causal convolution within every document, as if one rank held the whole pack. Differentiable.

        y[t] = act(sum_k weight[:, k] x[t - W + 1 + k] + bias), with zeros before a document

    Summed in fp32 (fp64 beside such operands) in the order of the taps: on one tier, the same bits for every layout.
    The forward of bf16, fp16 and fp32 rows with up to 8 taps is one kernel on devices of compute capability 9.0 with
    Triton; all else is plain torch, and so is every backward, which forms the sums again. With a
    process group a collective in both directions. With a SimulatedGroup operands and results are lists, one entry a
    rank; weight and bias may also be given once for all.

    Args:
        x: [1, T, D], T this rank's tokens; or a tuple of such, whose rows travel in one exchange. The batch axis may be
            left out.
        weight: [D, W] with W the context's `conv_kernel_size`; a tuple beside a tuple. Its gradient, like the bias's,
            is this rank's share of a sum over the group.
        bias: [D] or None; a tuple beside a tuple.
        activation: "silu" or None.
        backend: a tier's name: "hopper" is the kernel, "torch" does without, and "auto" is the kernel where it serves.
        recompute_handle: a `RecomputeHandle`, so that a checkpoint's recompute asks for no collective.

    Returns:
        y like x, in its type.

    Raises:
        TypeError, ValueError: an argument that does not fit, before anything is sent.
    """
    if not isinstance(ctx, Context):
        raise TypeError(f"ctx must be a Context, from deltaspan.build_context, got {type(ctx).__name__}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, got {activation!r}")
    for name, value, served in (
        ("initial_state", initial_state, None), ("output_final_state", output_final_state, False),
    ):  # fmt: skip
        if value is not served:
            raise ValueError(f"{name} is not served by this release, which serves {served!r}")
    check_handle(recompute_handle)
    shards, weights, biases = ctx._listed("x", x), ctx._replicated("weight", weight), ctx._replicated("bias", bias)
    ranks = [
        _check(ctx, view, *_as_tuples(*given)) for view, *given in zip(ctx._views, shards, weights, biases, strict=True)
    ]
    flat = [t for filters in ranks for f in filters for t in f]
    tiers = [_tier(ctx, backend, filters) for filters in ranks]
    results = iter(_CausalConv1d.apply(ctx, activation, tiers, len(ranks[0]), recompute_handle, anchor(ctx), *flat))
    outputs = [
        tuple(next(results).reshape(t.shape) for t in (shard if isinstance(shard, tuple) else (shard,)))
        for shard in shards
    ]
    return ctx._unlisted([y if isinstance(shard, tuple) else y[0] for y, shard in zip(outputs, shards, strict=True)])


def forward_program(
    tier: Any, view: RankView, filters: list[Filter], activation: str | None, history: list[Tensor] | None = None
) -> Program[tuple]:
    """One rank's convolutions: outputs [T, D], and the history rows [received, D] that its backward reads.

    history: what an earlier run of the same forward received, which then is not fetched again.
    """
    if history is None:
        history = yield from fetch_rows("halo", view.history, [f.x for f in filters])
    return [
        tier.convolve(f.x, h, f.weight, f.bias, view.edges, activation) for f, h in zip(filters, history, strict=True)
    ], history


def backward_program(
    tier: Any,
    view: RankView,
    filters: list[Filter],
    activation: str | None,
    history: list[Tensor],
    dys: list[Tensor],
) -> Program[list[tuple[Tensor, Tensor, Tensor]]]:
    """One rank's dx, dweight and dbias of each; a token's gradient also gathers from the fragments that read it."""
    pre = [tier.preactivation(f.x, h, f.weight, f.bias, view.edges) for f, h in zip(filters, history, strict=True)]
    dpre = [tier.activation_gradient(p, activation, dy) for p, dy in zip(pre, dys, strict=True)]
    following = yield from fetch_rows("halo_gradient", view.following, dpre)
    return [
        tier.conv_gradients(f.x, h, f.weight, d, later, view.edges)
        for f, h, d, later in zip(filters, history, dpre, following, strict=True)
    ]


class _CausalConv1d(torch.autograd.Function):
    """All ranks that run here at once, `count` filters each, one rank's after another's."""

    @staticmethod
    def forward(
        fn: Any,
        ctx: Context,
        activation: str | None,
        tiers: list[Any],
        count: int,
        handle: RecomputeHandle | None,
        anchor: Tensor | None,
        *flat: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ranks = _by_rank(flat, count)
        entry = handle.find(CONVOLUTION) if handle is not None else None
        problem = ctx, activation, [(f.x.shape, f.x.dtype) for filters in ranks for f in filters]
        if entry is not None and (entry[0][0] is not ctx or entry[0][1:] != problem[1:]):
            raise ValueError(
                "recompute_handle was filled by a convolution with another context, activation or operands"
            )
        received = [None] * len(ranks) if entry is None else entry[1]
        done = ctx._transport.run(
            [
                forward_program(tier, view, filters, activation, history)
                for tier, view, filters, history in zip(tiers, ctx._views, ranks, received, strict=True)
            ]
        )
        if handle is not None and entry is None:
            handle.entries[CONVOLUTION] = problem, [history for _, history in done]
        fn.context, fn.activation, fn.tiers, fn.count, fn.given = ctx, activation, tiers, count, len(flat)
        fn.save_for_backward(*flat, *(h for _, history in done for h in history))
        return tuple(y for outputs, _ in done for y in outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @any_row_crosses
    def backward(fn: Any, *grads: Tensor) -> tuple:
        ctx, n, tensors = fn.context, fn.count, fn.saved_tensors
        ranks, history = _by_rank(tensors[: fn.given], n), tensors[fn.given :]
        done = ctx._transport.run(
            [
                backward_program(
                    tier, view, filters, fn.activation, history[i * n : (i + 1) * n], grads[i * n : (i + 1) * n]
                )
                for i, (tier, view, filters) in enumerate(zip(fn.tiers, ctx._views, ranks, strict=True))
            ]
        )
        gradients = (
            t if x is not None else None
            for filters, by_filter in zip(ranks, done, strict=True)
            for f, of_filter in zip(filters, by_filter, strict=True)
            for x, t in zip(f, of_filter, strict=True)
        )
        return None, None, None, None, None, None, *gradients


def _by_rank(flat: tuple, count: int) -> list[list[Filter]]:
    filters = [Filter(*flat[i : i + 3]) for i in range(0, len(flat), 3)]
    return [filters[i : i + count] for i in range(0, len(filters), count)]


def _as_tuples(x: Any, weight: Any, bias: Any) -> tuple[tuple, tuple, tuple]:
    if not isinstance(x, tuple):
        return (x,), (weight,), (bias,)
    if not x:
        raise ValueError("x must be a tensor or a tuple of some, got ()")
    bias = (None,) * len(x) if bias is None else bias
    for name, value in (("weight", weight), ("bias", bias)):
        if not isinstance(value, tuple) or len(value) != len(x):
            raise ValueError(f"{name} must be a tuple of {len(x)} beside a tuple of {len(x)} tensors x")
    return x, weight, bias


def _check(ctx: Context, view: RankView, xs: tuple, weights: tuple, biases: tuple) -> list[Filter]:
    filters = []
    for x, weight, bias in zip(xs, weights, biases, strict=True):
        for name, t in (("x", x), ("weight", weight), ("bias", bias)):
            if not (name == "bias" and t is None):
                check_tensor(name, t, ctx.device)
                check_type(name, t.dtype)
        x = squeeze(x, "x", 2)
        if x.dtype != xs[0].dtype:
            raise ValueError(f"x must be of one type, all of a tuple alike; got {xs[0].dtype} and {x.dtype}")
        if len(x) != view.tokens and not (ctx.part.world_size == 1 and len(x) > view.tokens):
            raise ValueError(f"x has {len(x)} tokens, but the context gives this rank {view.tokens}")
        for name, t, shape in (("weight", weight, (x.shape[1], ctx.conv_kernel_size)), ("bias", bias, (x.shape[1],))):
            if t is not None and tuple(t.shape) != shape:
                raise ValueError(
                    f"{name} must have shape {shape}, x's channels and the context's taps, got {tuple(t.shape)}"
                )
        filters.append(Filter(x, weight, bias))
    return filters


def _tier(ctx: Context, backend: str, filters: list[Filter]) -> Any:
    """The tier that serves these. Raises ValueError if the one that is asked for does not."""
    dtype, taps = filters[0].x.dtype, ctx.conv_kernel_size
    return select.tier(select.chosen_for_convolution(backend, device=ctx.device, dtype=dtype, taps=taps))
