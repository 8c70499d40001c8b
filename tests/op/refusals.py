"""Calls that are refused: what one rank may do wrong, the error, and words that it must hold."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import deltaspan as ds
from tests.op.support import draw

LENGTHS = [5, 0, 7]
PART = ds.partition([0, 5, 5, 12], 2, "zigzag")


class Rank:
    """One rank's good arguments, of which a call spoils one."""

    def __init__(self, ctx: ds.Context) -> None:
        pack = draw(torch.Generator().manual_seed(0), LENGTHS).to(torch.bfloat16)
        self.ctx, self.pack, self.weight, self.bias = ctx, pack, pack.weight, pack.bias
        self.operands = {name: ctx.shard(getattr(pack, name)) for name in ("q", "k", "v", "g", "beta")}
        self.do, self.x = ctx.shard(pack.do), ctx.shard(pack.x)

    def rule(self, call: Callable = ds.chunk_gated_delta_rule, /, **changed: Any) -> Any:
        return call(**({"ctx": self.ctx} | self.operands | changed))

    def backward(self, **changed: Any) -> Any:
        return self.rule(ds.backward, **({"do": self.do} | changed))

    def convolution(self, **changed: Any) -> Any:
        return ds.causal_conv1d(**({"x": self.x, "weight": self.weight, "ctx": self.ctx} | changed))

    def __getattr__(self, name: str) -> Tensor:
        return self.operands[name]


def context(**changed: Any) -> ds.Context:
    return ds.build_context(**({"part": PART, "group": dist.group.WORLD, "device": "cpu"} | changed))


class Bad(NamedTuple):
    error: type[Exception]
    says: str
    call: Callable[[Rank], Any]


V, T = ValueError, TypeError


def _with(name: str, value: Any) -> Callable[[Rank], Any]:
    return lambda r: r.rule(**{name: value})


OPERANDS = {
    "q no tensor": Bad(T, "q must be a tensor, got list", lambda r: r.rule(q=[r.q])),
    "state no tensor": Bad(T, "initial_state must be a tensor, got int", lambda r: r.rule(initial_state=0)),
    "k elsewhere": Bad(V, "k is on meta, the context on cpu", lambda r: r.rule(k=r.k.to("meta"))),
    "batch of 2": Bad(V, r"q must have a batch of 1.*\(2, 6, 2, 8\)", lambda r: r.rule(q=r.q.expand(2, -1, -1, -1))),
    "q of two axes": Bad(V, r"q must have 3 axes.*\(6, 2\)", lambda r: r.rule(q=r.q[0, :, :, 0])),
    "g of four axes": Bad(V, r"g must have 2 axes.*\(1, 6, 4, 1\)", lambda r: r.rule(g=r.g[..., None])),
    "tokens too many": Bad(V, "q has 12 tokens, .* this rank 6", lambda r: r.rule(q=r.pack.q)),
    "tokens too few": Bad(V, "q has 5 tokens, .* this rank 6", lambda r: r.rule(q=r.q[:, :5])),
    "heads that do not divide": Bad(V, "multiple of q's, got HV=3 and H=2", lambda r: r.rule(v=r.v[:, :, :3])),
    "no value heads": Bad(V, "HV=0 and H=2", lambda r: r.rule(v=r.v[:, :, :0])),
    "no heads": Bad(V, "HV=4 and H=0", lambda r: r.rule(q=r.q[:, :, :0])),
    "no key channels": Bad(V, "K=0 and V=8", lambda r: r.rule(q=r.q[..., :0])),
    "no value channels": Bad(V, "K=8 and V=0", lambda r: r.rule(v=r.v[..., :0])),
    "k of other heads": Bad(V, r"k must have shape \(6, 2, 8\).*\(6, 1, 8\)", lambda r: r.rule(k=r.k[:, :, :1])),
    "k of other channels": Bad(V, r"k must have shape \(6, 2, 8\).*\(6, 2, 7\)", lambda r: r.rule(k=r.k[..., :7])),
    "v of other tokens": Bad(V, r"v must have shape \(6, 4, 8\).*\(5, 4, 8\)", lambda r: r.rule(v=r.v[:, :5])),
    "g by key head": Bad(V, r"g must have shape \(6, 4\).*\(6, 2\)", lambda r: r.rule(g=r.g[:, :, :2])),
    "beta of other tokens": Bad(V, r"beta must have shape \(6, 4\).*\(5, 4\)", lambda r: r.rule(beta=r.beta[:, :5])),
    "states of other documents": Bad(
        V,
        r"initial_state must have shape \(3, 4, 8, 8\).*\(2, 4, 8, 8\)",
        lambda r: r.rule(initial_state=r.pack.initial_state[:2]),
    ),
    "q of integers": Bad(V, "q must be bf16, .* got torch.int32", lambda r: r.rule(q=r.q.int())),
    "k of another type": Bad(
        V, "k must have q's type torch.bfloat16, got torch.float16", lambda r: r.rule(k=r.k.half())
    ),
    "v of another type": Bad(
        V, "v must have q's type torch.bfloat16, got torch.float32", lambda r: r.rule(v=r.v.float())
    ),
    "g in bf16": Bad(V, "g must be torch.float32 .* got torch.bfloat16", lambda r: r.rule(g=r.g.bfloat16())),
    "g in fp64": Bad(V, "g must be torch.float32 .* got torch.float64", lambda r: r.rule(g=r.g.double())),
    "beta in fp16": Bad(
        V, "beta must be torch.bfloat16 or torch.float32 .* got torch.float16", lambda r: r.rule(beta=r.beta.half())
    ),
    "states in bf16": Bad(
        V,
        "initial_state must be torch.float32 .* got torch.bfloat16",
        lambda r: r.rule(initial_state=r.pack.initial_state.bfloat16()),
    ),
}

OPTIONS = (
    {
        f"{name}={value!r}": Bad(
            V, rf"{name} must be one of \[{among}\], got {re.escape(repr(value))}", _with(name, value)
        )
        for name, among, values in (
            ("save_mode", "'light', 'full'", ("heavy", None, True)),
            ("boundary_mode", "'saved', 'replay'", ("Replay", None)),
            ("reuse_recompute_tapes", "'auto', True, False", (1, "never")),
            ("recompute_output", "'auto', 'always'", ("never", False)),
            ("exchange", "'all_to_all', .*", ("allreduce",)),
        )
        for value in values
    }
    | {
        f"{name}={value!r}": Bad(T, f"{name} must be a bool, got {re.escape(repr(value))}", _with(name, value))
        for name, value in (
            ("use_qk_l2norm_in_kernel", 0),
            ("use_gate_in_kernel", None),
            ("use_beta_sigmoid_in_kernel", "yes"),
            ("allow_neg_eigval", 1),
            ("save_transfer", 1),
            ("output_final_state", None),
            ("unit_keys", 1),
        )
    }
    | {
        "negative eigenvalues of a ready beta": Bad(
            V,
            "allow_neg_eigval=True .* use_beta_sigmoid_in_kernel=True, which is False",
            _with("allow_neg_eigval", True),
        ),
        "workspace": Bad(V, r"workspace=\[\] is not served by this release, which serves None", _with("workspace", [])),
        "workspace of backward": Bad(V, "workspace=0 is not served", lambda r: r.backward(workspace=0)),
        "handle": Bad(T, "recompute_handle must be a RecomputeHandle, got dict", _with("recompute_handle", {})),
        "handle's class": Bad(T, "must be a RecomputeHandle, got type", _with("recompute_handle", ds.RecomputeHandle)),
        "handle without a saved set": Bad(
            V,
            "recompute_handle needs boundary_mode='saved'",
            lambda r: r.rule(recompute_handle=ds.RecomputeHandle(), boundary_mode="replay"),
        ),
        "scale": Bad(T, "scale must be a float or None, got '1'", lambda r: r.rule(scale="1")),
        "scale as a flag": Bad(T, "scale must be a float or None, got True", lambda r: r.rule(scale=True)),
        "scale as a tensor": Bad(
            T, "scale must be a float or None, got tensor", lambda r: r.rule(scale=torch.tensor(1.0))
        ),
        "backend": Bad(V, r"backend must be one of \['auto', 'torch'.* got 'cuda'", lambda r: r.rule(backend="cuda")),
        "backend no name": Bad(V, r"backend must be one of \['auto', 'torch'.* got \[\]", lambda r: r.rule(backend=[])),
        "unknown": Bad(T, "gate", lambda r: r.rule(gate=1)),
        "unknown of forward": Bad(T, "unknown option 'gate'", lambda r: r.rule(ds.forward, gate=1)),
        "unknown of backward": Bad(T, "unknown option 'gate'", lambda r: r.backward(gate=1)),
        "option of forward": Bad(V, "save_mode must be one of .* got 0", lambda r: r.rule(ds.forward, save_mode=0)),
        "no segment": Bad(V, "segments must be at least 1, got 0", lambda r: r.rule(segments=0)),
        "segments as a flag": Bad(T, "segments must be an integer, got True", lambda r: r.rule(segments=True)),
        "segments as a fraction": Bad(T, "segments must be an integer, got 1.0", lambda r: r.rule(segments=1.0)),
        "segments beyond the chunks": Bad(
            V, r"segments must be at most 1 \(.*: 1\), got 2", lambda r: r.rule(segments=2)
        ),
        "no lengths of segments": Bad(V, "segments must be a count, or relative", lambda r: r.rule(segments=())),
        "a segment without length": Bad(
            V, r"segments\[1\] must be at least 1, got 0", lambda r: r.rule(segments=(1, 0, 1))
        ),
        "lengths of segments as fractions": Bad(
            T, r"segments\[0\] must be an integer, got 0.5", lambda r: r.rule(segments=(0.5, 1))
        ),
        "lengths of segments beyond the chunks": Bad(
            V, r"segments must be at most 1 \(.*: 1\), got \(2, 1\)", lambda r: r.rule(segments=(2, 1))
        ),
        "lengths of segments beyond 64 bits": Bad(
            V,
            r"segments must add up to at most 1048576, got",
            lambda r: r.rule(segments=(2**60, 2**60)),
        ),
        "segments as an array": Bad(
            T, "segments must be an integer or a tuple of such, got Tensor", lambda r: r.rule(segments=torch.ones(3))
        ),
        "segments of backward": Bad(V, "segments must be at most 1", lambda r: r.backward(segments=2)),
        "reuse of a recompute without autograd": Bad(
            V,
            "reuse_recompute_tapes is for .* deltaspan.forward and backward take 'auto', got False",
            lambda r: r.backward(reuse_recompute_tapes=False),
        ),
        "output of a recompute without autograd": Bad(
            V,
            "recompute_output is for .* take 'auto', got 'always'",
            lambda r: r.rule(ds.forward, recompute_output="always"),
        ),
        "option of backward": Bad(V, "exchange must be one of .* got 0", lambda r: r.backward(exchange=0)),
    }
)


def _gate(call: Callable = ds.chunk_gated_delta_rule, /, **changed: Any) -> Callable[[Rank], Any]:
    """A call with a raw g: A_log and dt_bias of zeros where they are not changed."""
    return lambda r: r.rule(
        call, **({"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.zeros(4)} | changed)
    )


RAW = {
    "gate without A_log": Bad(
        V, "A_log must be given with use_gate_in_kernel=True, got None", _gate(A_log=None, dt_bias=None)
    ),
    "gate with dt_bias alone": Bad(V, "A_log must be given with use_gate_in_kernel=True, got None", _gate(A_log=None)),
    "A_log without a gate": Bad(V, "A_log belongs to use_gate_in_kernel=True", _gate(use_gate_in_kernel=False)),
    "dt_bias without a gate": Bad(V, "dt_bias belongs to use_gate_in_kernel=True", _with("dt_bias", torch.zeros(4))),
    "A_log no tensor": Bad(T, "A_log must be a tensor, got float", _gate(A_log=0.5)),
    "dt_bias no tensor": Bad(T, "dt_bias must be a tensor, got int", _gate(dt_bias=0)),
    "A_log elsewhere": Bad(V, "A_log is on meta, the context on cpu", _gate(A_log=torch.zeros(4, device="meta"))),
    "A_log by key head": Bad(V, r"A_log must have shape \(4,\) .*\(2,\)", _gate(A_log=torch.zeros(2))),
    "A_log for all heads": Bad(V, r"A_log must have shape \(4,\) .*\(\)", _gate(A_log=torch.tensor(0.0))),
    "dt_bias by token": Bad(V, r"dt_bias must have shape \(4,\) .*\(6, 4\)", _gate(dt_bias=torch.zeros(6, 4))),
    "dt_bias with an axis more": Bad(V, r"dt_bias must have shape \(4,\) .*\(1, 4\)", _gate(dt_bias=torch.zeros(1, 4))),
    "A_log in bf16": Bad(
        V, "A_log must be torch.float32 beside .* got torch.bfloat16", _gate(A_log=torch.zeros(4).bfloat16())
    ),
    "A_log in fp64": Bad(
        V, "A_log must be torch.float32 beside .* got torch.float64", _gate(A_log=torch.zeros(4).double())
    ),
    "dt_bias in fp16": Bad(
        V, "dt_bias must be torch.float32 beside .* got torch.float16", _gate(dt_bias=torch.zeros(4).half())
    ),
    "dt_bias of integers": Bad(V, "dt_bias must be torch.float32 .* got torch.int64", _gate(dt_bias=torch.arange(4))),
    "raw g in fp16 beside bf16": Bad(
        V,
        "g must be torch.bfloat16 or torch.float32 beside .* got torch.float16",
        lambda r: _gate(g=r.g.half())(r),
    ),
    "raw beta in fp16 beside bf16": Bad(
        V,
        "beta must be torch.bfloat16 or torch.float32 beside .* got torch.float16",
        lambda r: r.rule(beta=r.beta.half(), use_beta_sigmoid_in_kernel=True),
    ),
    "a raw beta excuses no raw g": Bad(
        V,
        "g must be torch.float32 beside .* got torch.bfloat16",
        lambda r: r.rule(g=r.g.bfloat16(), use_beta_sigmoid_in_kernel=True),
    ),
    "gate of forward": Bad(V, "A_log must be given", _gate(ds.forward, A_log=None)),
    "gate of backward": Bad(
        V, "A_log must be given", lambda r: r.backward(use_gate_in_kernel=True, dt_bias=torch.zeros(4))
    ),
}

BACKWARD = {
    "operand": Bad(V, "HV=3", lambda r: r.backward(v=r.v[:, :, :3])),
    "do of other heads": Bad(
        V, r"do must have shape \(6, 4, 8\).*\(1, 6, 3, 8\)", lambda r: r.backward(do=r.do[:, :, :3])
    ),
    "do elsewhere": Bad(V, "do is on meta, the context on cpu", lambda r: r.backward(do=r.do.to("meta"))),
    "dfinal_state": Bad(
        V,
        r"dfinal_state must have shape \(3, 4, 8, 8\).*\(2, 4, 8, 8\)",
        lambda r: r.backward(dfinal_state=r.pack.dfinal_state[:2]),
    ),
    "do no tensor": Bad(T, "do must be a tensor, got NoneType", lambda r: r.backward(do=None)),
    "do of integers": Bad(V, "do must be .*int64", lambda r: r.backward(do=r.do.long())),
    "do of complex numbers": Bad(V, "do must be .*complex64", lambda r: r.backward(do=r.do.to(torch.complex64))),
    "dfinal_state no tensor": Bad(T, "dfinal_state must be a tensor, got str", lambda r: r.backward(dfinal_state="")),
    "saved no saved set": Bad(T, "saved must be .* got tuple", lambda r: r.backward(saved=())),
}

CONVOLUTION = {
    "activation": Bad(
        V, r"activation must be one of \['silu', None\], got 'relu'", lambda r: r.convolution(activation="relu")
    ),
    "initial_state": Bad(V, "initial_state is not served", lambda r: r.convolution(initial_state=r.x)),
    "output_final_state": Bad(V, "output_final_state is not served", lambda r: r.convolution(output_final_state=True)),
    "recompute_handle": Bad(
        T, "recompute_handle must be a RecomputeHandle, got dict", lambda r: r.convolution(recompute_handle={})
    ),
    "x no tensor": Bad(T, "x must be a tensor, got list", lambda r: r.convolution(x=[r.x])),
    "weight no tensor": Bad(T, "weight must be a tensor, got NoneType", lambda r: r.convolution(weight=None)),
    "bias no tensor": Bad(T, "bias must be a tensor, got float", lambda r: r.convolution(bias=0.0)),
    "weight elsewhere": Bad(
        V, "weight is on meta, the context on cpu", lambda r: r.convolution(weight=r.weight.to("meta"))
    ),
    "x of one axis": Bad(V, r"x must have 2 axes.*\(6,\)", lambda r: r.convolution(x=r.x[0, :, 0])),
    "x in a batch of 2": Bad(
        V, r"x must have a batch of 1.*\(2, 6, 6\)", lambda r: r.convolution(x=r.x.expand(2, -1, -1))
    ),
    "x of integers": Bad(V, "x must be bf16, .* got torch.int32", lambda r: r.convolution(x=r.x.int())),
    "x of other tokens": Bad(V, "x has 12 tokens, .* this rank 6", lambda r: r.convolution(x=r.pack.x)),
    "taps": Bad(V, r"weight must have shape \(6, 4\).*\(6, 3\)", lambda r: r.convolution(weight=r.weight[:, :3])),
    "channels": Bad(V, r"weight must have shape \(6, 4\).*\(5, 4\)", lambda r: r.convolution(weight=r.weight[:5])),
    "bias of other channels": Bad(V, r"bias must have shape \(6,\).*\(5,\)", lambda r: r.convolution(bias=r.bias[:5])),
    "weight beside a tuple": Bad(V, "weight must be a tuple of 2", lambda r: r.convolution(x=(r.x, r.x))),
    "weights of another count": Bad(
        V, "weight must be a tuple of 2", lambda r: r.convolution(x=(r.x, r.x), weight=(r.weight,))
    ),
    "bias beside a tuple": Bad(
        V, "bias must be a tuple of 2", lambda r: r.convolution(x=(r.x,) * 2, weight=(r.weight,) * 2, bias=r.bias)
    ),
    "a tuple of two types": Bad(
        V, "x must be .* all of a tuple alike", lambda r: r.convolution(x=(r.x, r.x.float()), weight=(r.weight,) * 2)
    ),
    "an empty tuple": Bad(V, r"x must .*\(\)", lambda r: r.convolution(x=(), weight=())),
    "weight of integers": Bad(V, "weight must be .*int64", lambda r: r.convolution(weight=r.weight.long())),
    "weight of complex numbers": Bad(
        V, "weight must be .*complex64", lambda r: r.convolution(weight=r.weight.to(torch.complex64))
    ),
}

UNSHARD = {
    "tokens of another rank": Bad(
        V, r"x must have exactly 6 tokens along dim 1, .*\(1, 5, 6\)", lambda r: r.ctx.unshard(r.x[:, :5])
    ),
    "axis": Bad(V, r"dim must be an axis of .*\(1, 6, 6\), got -4", lambda r: r.ctx.unshard(r.x, dim=-4)),
    "elsewhere": Bad(V, "x is on meta, the context on cpu", lambda r: r.ctx.unshard(r.x.to("meta"))),
    "total": Bad(V, "total must be at least the pack's 12 tokens, got 11", lambda r: r.ctx.unshard(r.x, total=11)),
    "no tensor": Bad(T, "x.* must be a tensor, got list", lambda r: r.ctx.unshard([r.x])),
    "total no number": Bad(T, "total must be an integer, got '12'", lambda r: r.ctx.unshard(r.x, total="12")),
    "total no integer": Bad(T, "total must be an integer, got 12.0", lambda r: r.ctx.unshard(r.x, total=12.0)),
}

CONTEXT = {
    "part": Bad(T, "part must be a Partition.* got list", lambda r: context(part=[0, 5])),
    "taps": Bad(V, "conv_kernel_size must be at least 1, got 0", lambda r: context(conv_kernel_size=0)),
    "sm_count": Bad(V, "sm_count must be at least 1, got -3", lambda r: context(sm_count=-3)),
    "rule": Bad(V, "^p_rule must be one of .* got 'best'", lambda r: context(p_rule="best")),
    "world": Bad(
        V, "part is for 3 ranks, but there is a group of 2 ranks", lambda r: context(part=ds.partition([0, 5], 3))
    ),
    "rank": Bad(V, "rank must be the group's own, 1, got 0", lambda r: context(rank=0)),
    "taps no number": Bad(T, "conv_kernel_size must be an integer, got '4'", lambda r: context(conv_kernel_size="4")),
    "taps no integer": Bad(T, "conv_kernel_size must be an integer, got 4.0", lambda r: context(conv_kernel_size=4.0)),
    "sm_count no number": Bad(T, "sm_count must be an integer, got '8'", lambda r: context(sm_count="8")),
    "sm_count no integer": Bad(T, "sm_count must be an integer, got 1.5", lambda r: context(sm_count=1.5)),
    "rule no name": Bad(T, "^p_rule must be .* got \\[\\]", lambda r: context(p_rule=[])),
    "device": Bad(V, "device must .* got 'abacus'", lambda r: context(device="abacus")),
    "device without a tier": Bad(V, "meta", lambda r: context(device="meta")),
}

# Where no group can be told, or none waits
LOCAL = {
    "shard, tokens too few": Bad(
        V, r"x must have at least 12 tokens along dim 1, .*\(1, 6, 6\)", lambda r: r.ctx.shard(r.x)
    ),
    "shard, axis": Bad(V, r"dim must be an axis of .*\(1, 12, 6\), got 3", lambda r: r.ctx.shard(r.pack.x, dim=3)),
    "shard, elsewhere": Bad(V, "x is on meta, the context on cpu", lambda r: r.ctx.shard(r.pack.x.to("meta"))),
    "shard, no tensor": Bad(T, "x must be a tensor, got NoneType", lambda r: r.ctx.shard(None)),
    "group": Bad(T, "group must be a ProcessGroup, .* got int", lambda r: context(group=0)),
    "no group": Bad(V, "part is for 2 ranks, but there is no group, which is one", lambda r: context(group=None)),
    "no context": Bad(T, "ctx must be a Context.* got NoneType", lambda r: r.rule(ctx=None)),
    "a partition as context": Bad(T, "ctx must be a Context.* got Partition", lambda r: r.rule(ctx=PART)),
    "no context of a convolution": Bad(T, "ctx must be a Context.* got int", lambda r: r.convolution(ctx=4)),
}

# By the argument that is spoilt, and what the other ranks call meanwhile
GROUPS: dict[str, tuple[dict[str, Bad], Callable[[Rank], Any] | None]] = {
    "operands": (OPERANDS, Rank.rule),
    "options": (OPTIONS, Rank.rule),
    "raw": (RAW, Rank.rule),
    "backward": (BACKWARD, Rank.backward),
    "convolution": (CONVOLUTION, Rank.convolution),
    "unshard": (UNSHARD, lambda r: r.ctx.unshard(r.x)),
    "context": (CONTEXT, lambda _: context()),
    "local": (LOCAL, None),
}
