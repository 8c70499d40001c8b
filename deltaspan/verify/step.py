"""One training step of a case: the op, the convolution and a round trip of tokens, forward and backward, on any group;
and the same step by the float64 oracle."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from deltaspan.reference import causal_conv1d, recurrent_gated_delta_rule
from deltaspan.verify.cases import CONVOLUTIONS, KEYS, SEGMENTS, STATES, TAIL, WAYS, Case, Inputs, Way, draw

Results = dict[str, Tensor]

OUTPUTS = ("o", "final_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
CONVOLUTION = ("y", "dx", "dweight", "dbias")
# All of these are by token, but for
PER_DOCUMENT = ("final_state", "dinitial_state")  # [N, ...]
PER_PARAMETER = ("dweight", "dbias")  # [D, ...]


def on_context(case: Case, inputs: Inputs, ctx: ds.Context) -> list[Results]:
    """The step: for every rank that runs here, its shard of each result, on the CPU."""
    parts = operation(case, inputs, ctx), _convolution(case, inputs, ctx), _round_trip(inputs, ctx)
    return [_on_cpu(op | conv | trip) for op, conv, trip in zip(*parts, strict=True)]


def of_process(case: Case, group: dist.ProcessGroup, device: str = "cpu") -> Results:
    """The step of one rank of a real group."""
    ctx = _build(case, case.partition(), group, device)
    (results,) = on_context(case, draw(case), ctx)
    return results


def context(case: Case, device: str, world_size: int | None = None) -> ds.Context:
    """Without processes: one rank has no group, several are simulated."""
    part = case.partition(world_size)
    group = ds.SimulatedGroup(part.world_size) if part.world_size > 1 else None
    return _build(case, part, group, device)


def _build(case: Case, part: ds.Partition, group: Any, device: str) -> ds.Context:
    rule, sm_count = SEGMENTS[case.segments]
    taps = CONVOLUTIONS[case.conv].width
    return ds.build_context(part, group, device=device, conv_kernel_size=taps, p_rule=rule, sm_count=sm_count)


def operation(case: Case, inputs: Inputs, ctx: ds.Context) -> list[Results]:
    """The op's part: in the case's way, by its exchange."""
    x, way = operands(case, inputs, ctx), WAYS[case.way]
    results = _explicitly(x, ctx, keep=not way.again) if way.explicit else _by_autograd(x, ctx, way)
    return [_on_cpu(row) for row in results]


class Operands(NamedTuple):
    """The op's operands and the gradients of its outputs, by rank that runs here."""

    tensors: list[list[Tensor]]  # q, k, v, g, beta
    initial_state: list[Tensor | None]
    do: list[Tensor]
    dfinal_state: list[Tensor | None]
    options: dict[str, Any]


def operands(case: Case, inputs: Inputs, ctx: ds.Context) -> Operands:
    """This context's shards, each a leaf of autograd."""
    ranks = len(listed(ctx, ctx.tokens))
    return Operands(
        tensors=[_leaves(_shards(ctx, x)) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)],
        initial_state=_replicas(ctx, inputs.initial_state, ranks),
        do=_shards(ctx, inputs.do),
        dfinal_state=_replicas(ctx, inputs.dfinal_state, ranks),
        options={
            "unit_keys": KEYS[case.keys].unit_keys,
            "output_final_state": STATES[case.states],
            "exchange": case.exchange,
            **WAYS[case.way].options,
        },
    )


def listed(ctx: ds.Context, value: Any) -> list:
    """One entry for each rank that runs here, as a simulated group has it."""
    return value if ctx.rank is None else [value]


def given(ctx: ds.Context, values: list) -> Any:
    """The opposite: what a call with this context takes."""
    return values if ctx.rank is None else values[0]


def _by_autograd(x: Operands, ctx: ds.Context, way: Way) -> list[dict[str, Tensor | None]]:
    columns, ranks = [*x.tensors, x.initial_state], len(x.do)
    handle = ds.RecomputeHandle() if way.handle else None

    def call(*leaves: Tensor | None) -> tuple[Tensor | None, ...]:
        """Outputs and final states by rank, from `columns` one after another."""
        *tensors, initial = (list(leaves[i : i + ranks]) for i in range(0, len(leaves), ranks))
        of_call = x._replace(tensors=tensors, initial_state=initial)
        tensors, initial, _, _ = _given_all(ctx, of_call)
        o, final = ds.chunk_gated_delta_rule(*tensors, ctx, initial_state=initial, recompute_handle=handle, **x.options)
        return *listed(ctx, o), *_final_by_rank(ctx, final, x)

    leaves = [t for column in columns for t in column]
    results = call(*leaves) if way.checkpoint is None else checkpoint(call, *leaves, **way.checkpoint)
    roots = [(t, grad) for t, grad in zip(results, x.do + x.dfinal_state, strict=True) if t is not None]
    torch.autograd.backward(*map(list, zip(*roots, strict=True)))
    gradients = [[None if t is None else t.grad for t in column] for column in columns]
    rows = zip(results[:ranks], results[ranks:], *gradients, strict=True)
    return [dict(zip((*OUTPUTS, *GRADIENTS), row, strict=True)) for row in rows]


def _explicitly(x: Operands, ctx: ds.Context, keep: bool) -> list[dict[str, Tensor | None]]:
    """By `ds.forward` and `ds.backward`; keep: whether the one hands what it kept to the other."""
    tensors, initial, do, dfinal = _given_all(ctx, x)
    o, final, saved = ds.forward(*tensors, ctx, initial_state=initial, **x.options)
    gradients = ds.backward(
        *tensors, ctx, do, dfinal_state=dfinal, saved=saved if keep else None, initial_state=initial, **x.options
    )
    rows = zip(listed(ctx, o), _final_by_rank(ctx, final, x), listed(ctx, gradients), strict=True)
    return [{"o": o, "final_state": final} | {n: getattr(grads, n) for n in GRADIENTS} for o, final, grads in rows]


def _given_all(ctx: ds.Context, x: Operands) -> tuple[list, Any, Any, Any]:
    """q, k, v, g and beta, initial_state, do and dfinal_state, as a call with this context takes them."""
    states = (None if column[0] is None else given(ctx, column) for column in (x.initial_state, x.dfinal_state))
    initial, dfinal = states
    return [given(ctx, t) for t in x.tensors], initial, given(ctx, x.do), dfinal


def _final_by_rank(ctx: ds.Context, final: Any, x: Operands) -> list[Tensor | None]:
    return [None] * len(x.do) if final is None else listed(ctx, final)


def _convolution(case: Case, inputs: Inputs, ctx: ds.Context) -> list[Results]:
    xs = [tuple(row) for row in zip(*(_leaves(_shards(ctx, x)) for x in inputs.x), strict=True)]  # by rank
    dys = zip(*(_shards(ctx, dy) for dy in inputs.dy), strict=True)
    weights, biases = ([_own(ctx, parameter) for _ in xs] for parameter in (inputs.weight, inputs.bias))
    activation = CONVOLUTIONS[case.conv].activation
    ys = ds.causal_conv1d(given(ctx, xs), given(ctx, weights), ctx, bias=given(ctx, biases), activation=activation)
    ys = listed(ctx, ys)
    torch.autograd.backward([y for row in ys for y in row], [dy for row in dys for dy in row])
    return [
        {
            "y": torch.cat(y, dim=-1),
            "dx": torch.cat([t.grad for t in x], dim=-1),
            "dweight": torch.cat([t.grad for t in weight]),
            "dbias": None if bias is None else torch.cat([t.grad for t in bias]),
        }
        for y, x, weight, bias in zip(ys, xs, weights, biases, strict=True)
    ]


def _round_trip(inputs: Inputs, ctx: ds.Context) -> list[Results]:
    """Whole numbers, which no order of additions rounds."""
    z = inputs.z.to(ctx.device, copy=True).requires_grad_()
    shards = listed(ctx, ctx.shard(z, dim=0))
    for shard in shards:
        shard.retain_grad()
    wholes = listed(ctx, ctx.unshard(given(ctx, shards), dim=0, total=len(z) + TAIL))
    first = ctx.rank or 0
    torch.autograd.backward(wholes, [dz.to(ctx.device) for dz in inputs.dz[first : first + len(wholes)]])
    # All simulated ranks share z; on a real rank its gradient is that rank's part, so a sum over ranks says the same.
    dz = [z.grad] + [torch.zeros_like(z)] * (len(wholes) - 1)
    return [
        {"whole": whole, "dshard": shard.grad, "dz": grad}
        for whole, shard, grad in zip(wholes, shards, dz, strict=True)
    ]


def _shards(ctx: ds.Context, x: Tensor) -> list[Tensor]:
    """[T, ...] to [1, tokens, ...] by rank."""
    return listed(ctx, ctx.shard(x.to(ctx.device)[None]))


def _leaves(shards: Sequence[Tensor]) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in shards]


def _replicas(ctx: ds.Context, x: Tensor | None, ranks: int) -> list[Tensor | None]:
    return [None if x is None else x.to(ctx.device, copy=True).requires_grad_() for _ in range(ranks)]


def _own(ctx: ds.Context, parameters: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
    """A rank's own copy of parameters, so that each rank's share of their gradient is seen."""
    return None if parameters is None else tuple(x.to(ctx.device, copy=True).requires_grad_() for x in parameters)


def whole(part: ds.Partition, shards: Sequence[Results]) -> Results:
    """All ranks' shards of a step as results of the whole pack, in float64, without batch axes.

    Tokens are put where the partition says that they belong; one that no rank holds becomes NaN. Shares are added.
    """
    joined = {}
    for name in (*OUTPUTS, *GRADIENTS, *CONVOLUTION):
        if name not in shards[0]:
            continue
        parts = [shard[name].double() for shard in shards]
        if name in PER_DOCUMENT + PER_PARAMETER:
            joined[name] = torch.stack(parts).sum(0)
            continue
        joined[name] = parts[0].new_full((part.total_tokens, *parts[0].shape[2:]), torch.nan)
        for rank, x in enumerate(parts):
            joined[name][token_ids(part, rank)] = x.squeeze(0)
    return joined


def token_ids(part: ds.Partition, rank: int) -> Tensor:
    """[tokens] int64: where a rank's tokens stand in the pack."""
    return torch.from_numpy(part.token_ids(rank).copy())  # a copy, for the partition's array is read-only


def truth(case: Case, inputs: Inputs) -> Results:
    """The step by the token recurrence, in float64 from the operands as they are."""
    leaves = [_wide_leaf(x) for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)]
    state = None if inputs.initial_state is None else _wide_leaf(inputs.initial_state)
    o, final = recurrent_gated_delta_rule(*leaves, case.cu_seqlens, initial_state=state)
    roots, starts = [o], [inputs.do.double()]
    if state is not None:
        roots, starts, leaves = [o, final], [*starts, inputs.dfinal_state.double()], [*leaves, state]
    gradients = torch.autograd.grad(roots, leaves, starts)
    results = dict(zip(GRADIENTS, gradients, strict=False)) | {"o": o.detach()}
    if state is not None:
        results["final_state"] = final.detach()
    return results | _true_convolution(case, inputs)


def _true_convolution(case: Case, inputs: Inputs) -> Results:
    columns = {"x": inputs.x, "weight": inputs.weight, "bias": inputs.bias or ()}
    x, weight, *bias = (
        _wide_leaf(torch.cat(tensors, dim=-1 if name == "x" else 0)) for name, tensors in columns.items() if tensors
    )
    y = causal_conv1d(
        x, weight, case.cu_seqlens, bias=bias[0] if bias else None, activation=CONVOLUTIONS[case.conv].activation
    )
    gradients = torch.autograd.grad(y, [x, weight, *bias], torch.cat(inputs.dy, dim=-1).double())
    return {"y": y.detach()} | dict(zip(("dx", "dweight", "dbias"), gradients, strict=False))


def _on_cpu(results: dict[str, Tensor | None]) -> Results:
    return {name: x.detach().cpu() for name, x in results.items() if x is not None}


def _wide_leaf(x: Tensor) -> Tensor:
    return x.to(torch.float64, copy=True).requires_grad_()
