"""Packs whose operands are as a model's projections give them, what plain formulas make of them, and what ranks do."""

from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

import deltaspan as ds
from deltaspan.reference import recurrent_gated_delta_rule
from tests.op.support import GRADIENTS, TOKENWISE, Pack, draw, join, leaf, listed, unlisted

L2NORM = {"use_qk_l2norm_in_kernel": True}
GATE = {"use_gate_in_kernel": True}
SIGMOID = {"use_beta_sigmoid_in_kernel": True}
TWICE = {**SIGMOID, "allow_neg_eigval": True}
ALL = {**L2NORM, **GATE, **TWICE}
WAYS = {"l2norm": L2NORM, "gate": GATE, "sigmoid": SIGMOID, "twice the sigmoid": TWICE, "all": ALL}
PARAMETERS = ("A_log", "dt_bias")
SHARES = ("dA_log", "ddt_bias")
STATES = ("final_state", "dinitial_state", *SHARES)  # whose sum over ranks is that of the whole pack


class RawPack(NamedTuple):
    pack: Pack  # q, k, g and beta raw where `way` says so
    way: dict[str, bool]  # options of the call
    A_log: Tensor | None = None  # [HV]
    dt_bias: Tensor | None = None  # [HV]

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: x for name in PARAMETERS if (x := getattr(self, name)) is not None}

    def to(self, dtype: torch.dtype, *, raw: torch.dtype | None = None) -> "RawPack":
        """Rounded to `dtype`, but for what is FP32 beside it; raw: of g and beta where they are so."""
        pack, wide = self.pack.to(dtype), torch.float64 if dtype == torch.float64 else torch.float32
        names = [name for name, use in (("g", GATE), ("beta", SIGMOID)) if use.items() <= self.way.items()]
        if raw is not None:
            pack = pack._replace(**{name: getattr(pack, name).to(raw) for name in names})
        return self._replace(pack=pack, **{name: x.to(wide) for name, x in self.parameters.items()})

    def replace(self, **operands: Tensor) -> "RawPack":
        return self._replace(pack=self.pack._replace(**operands))


def draw_raw(
    rng: torch.Generator, lengths: list[int], way: dict[str, bool], *, bias: bool = True, **shape: int
) -> RawPack:
    """In FP64: rows of any length, gates from closed to open, write strengths on both sides of one half."""
    pack = draw(rng, lengths, **shape)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, dtype=torch.float64)

    operands = (
        {"q": 3 * normal(*pack.q.shape), "k": 0.5 * normal(*pack.k.shape)} if L2NORM.items() <= way.items() else {}
    )
    if SIGMOID.items() <= way.items():
        operands["beta"] = 2 * normal(*pack.beta.shape)
    if not GATE.items() <= way.items():
        return RawPack(pack._replace(**operands), way)
    operands["g"] = 2 * normal(*pack.g.shape) - 3
    HV = pack.v.shape[2]
    return RawPack(pack._replace(**operands), way, normal(HV), normal(HV) if bias else None)


def some(x: Tensor, value: float | Tensor) -> Tensor:
    """x with `value` at every seventh token, the first and the last."""
    x = x.clone()
    x[:, [*range(0, x.shape[1] - 1, 7), -1]] = value
    return x


def made_ready(
    raw: RawPack, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None
) -> tuple[Tensor, ...]:
    """By the formulas as they are published, to be differentiated by autograd."""
    if raw.way.get("use_qk_l2norm_in_kernel"):
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if raw.way.get("use_gate_in_kernel"):
        g = -torch.exp(A_log) * softplus(g if dt_bias is None else g + dt_bias)
    if raw.way.get("use_beta_sigmoid_in_kernel"):
        beta = (2 if raw.way.get("allow_neg_eigval") else 1) / (1 + torch.exp(-beta))
    return q, k, g, beta


def true_raw(raw: RawPack) -> dict[str, Tensor]:
    """Outputs and all gradients of a whole pack in FP64, from the operands as they are rounded."""
    pack, names = raw.pack, (*TOKENWISE, "initial_state")
    leaves = {name: leaf(getattr(pack, name).double()) for name in names}
    leaves |= {name: leaf(x.double()) for name, x in raw.parameters.items()}
    given = [leaves.get(name) for name in ("q", "k", "g", "beta", *PARAMETERS)]
    q, k, g, beta = made_ready(raw, *given)
    o, final = recurrent_gated_delta_rule(
        q, k, leaves["v"], g, beta, pack.cu_seqlens, initial_state=leaves["initial_state"]
    )
    grads = torch.autograd.grad((o, final), list(leaves.values()), (pack.do.double(), pack.dfinal_state.double()))
    return {"o": o.detach(), "final_state": final.detach()} | {
        f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)
    }


def run_raw(raw: RawPack, ctx: ds.Context, **options: Any) -> list[dict[str, Tensor]]:
    """By rank that runs here: its outputs and the gradients of its operands and of its copies of the parameters."""
    pack = raw.pack
    inputs = {name: [leaf(x) for x in listed(ctx, ctx.shard(getattr(pack, name)))] for name in TOKENWISE}
    ranks = len(inputs["q"])
    replicated = {"initial_state": pack.initial_state, **raw.parameters}
    inputs |= {name: [leaf(x) for _ in range(ranks)] for name, x in replicated.items()}
    o, final = ds.chunk_gated_delta_rule(
        **{name: unlisted(ctx, x) for name, x in inputs.items()}, ctx=ctx, output_final_state=True, **raw.way, **options
    )
    o, final = listed(ctx, o), listed(ctx, final)
    douts = [*listed(ctx, ctx.shard(pack.do)), *[pack.dfinal_state] * ranks]
    grads = torch.autograd.grad([*o, *final], list(chain(*inputs.values())), douts)
    return [
        {"o": o[r].detach(), "final_state": final[r].detach()}
        | {f"d{name}": grads[i * ranks + r] for i, name in enumerate(inputs)}
        for r in range(ranks)
    ]


def run_explicitly(raw: RawPack, ctx: ds.Context, *, keep: bool = True, **options: Any) -> list[dict[str, Tensor]]:
    """The same by `forward` and `backward`, whose gradients of g and beta are those of states in type."""
    pack, states = raw.pack, {"initial_state": raw.pack.initial_state, "output_final_state": True}
    operands = [ctx.shard(getattr(pack, name)) for name in TOKENWISE]
    given = states | raw.parameters | raw.way | options
    o, final, saved = ds.forward(*operands, ctx, **given)
    douts = {"do": ctx.shard(pack.do), "dfinal_state": pack.dfinal_state}
    grads = listed(ctx, ds.backward(*operands, ctx, **douts, saved=saved if keep else None, **given))
    names = [*GRADIENTS, *(f"d{name}" for name in raw.parameters)]
    assert all(getattr(grad, name) is None for grad in grads for name in {*SHARES} - {*names})
    return [
        {"o": out, "final_state": end} | {name: getattr(grad, name) for name in names}
        for out, end, grad in zip(listed(ctx, o), listed(ctx, final), grads, strict=True)
    ]


def join_raw(part: ds.Partition, results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As those of the whole pack; the parameters' gradients are shares of a sum over ranks."""
    shares = {name: sum(r[name] for r in results) for name in SHARES if name in results[0]}
    return join(part, [{n: x for n, x in r.items() if n not in SHARES} for r in results]) | shares
