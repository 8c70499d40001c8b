"""Packs drawn at random, what the truth makes of them, and what the ranks of a context make of them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

import deltaspan as ds
from deltaspan import reference
from tests.helpers import same_bits

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "ragged")
TOKENWISE = ("q", "k", "v", "g", "beta")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")
PER_TOKEN = ("q", "k", "v", "g", "beta", "do", "x", "dy")
PER_DOCUMENT = ("initial_state", "dfinal_state")
STATES = ("final_state", "dinitial_state", "dweight", "dbias")  # whose sum over ranks is that of the whole pack


class Pack(NamedTuple):
    """Operands of a whole pack and the gradients of its outputs, for the operation and for the convolution."""

    cu_seqlens: list[int]
    q: Tensor  # [1, T, H, K]
    k: Tensor  # [1, T, H, K]
    v: Tensor  # [1, T, HV, V]
    g: Tensor  # [1, T, HV]
    beta: Tensor  # [1, T, HV]
    initial_state: Tensor  # [N, HV, K, V]
    do: Tensor  # [1, T, HV, V]
    dfinal_state: Tensor  # [N, HV, K, V]
    x: Tensor  # [1, T, D]
    weight: Tensor  # [D, W]
    bias: Tensor  # [D]
    dy: Tensor  # [1, T, D]

    def to(self, dtype: torch.dtype) -> "Pack":
        """Rounded to `dtype`, but for what is FP32 beside it."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        narrow = ("q", "k", "v", "do", "x", "dy")
        rounded = {n: getattr(self, n).to(dtype if n in narrow else wide) for n in self._fields[1:]}
        return self._replace(**rounded)


def offsets(lengths: Iterable[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))


def draw(
    rng: torch.Generator,
    lengths: list[int],
    *,
    H: int = 2,
    HV: int = 4,
    K: int = 8,
    V: int = 8,
    D: int = 6,
    taps: int = 4,
    decay: str = "moderate",
    beta: tuple[float, float] = (0.0, 1.0),
    key_noise: float = torch.inf,
    key_length: tuple[float, float] = (1.0, 1.0),
) -> Pack:
    """A pack of documents of these lengths, in FP64.

    key_noise: of keys around one direction, none by default. key_length, beta: ends of uniform distributions.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=rng, dtype=torch.float64)

    T, N = sum(lengths), len(lengths)
    moderate = -uniform(1, 16, HV) * softplus(normal(1, T, HV) - 4)
    k = normal(1, T, H, K) if key_noise == torch.inf else normal(H, K) + key_noise * normal(1, T, H, K)
    return Pack(
        cu_seqlens=offsets(lengths),
        q=normalize(normal(1, T, H, K), dim=-1),
        k=normalize(k, dim=-1) * uniform(*key_length, 1, T, H, 1),
        v=normal(1, T, HV, V),
        g={
            "moderate": moderate,
            "zero": torch.zeros_like(moderate),
            "slow": -1e-4 * uniform(0, 1, 1, T, HV),
            "strong": -16 * softplus(normal(1, T, HV)),
            "mixed": moderate * torch.tensor([0.0, 1.0, 1e-3, 200.0]).double()[torch.arange(HV) % 4],
            "cut": torch.where(uniform(0, 1, 1, T, HV) < 0.05, -torch.inf, moderate),
        }[decay],
        beta=uniform(*beta, 1, T, HV),
        initial_state=normal(N, HV, K, V),
        do=normal(1, T, HV, V),
        dfinal_state=normal(N, HV, K, V),
        x=normal(1, T, D),
        weight=normal(D, taps),
        bias=normal(D),
        dy=normal(1, T, D),
    )


def documents(pack: Pack, first: int, stop: int) -> Pack:
    """Some of a pack's documents by themselves."""
    cu = pack.cu_seqlens
    own = {name: getattr(pack, name)[:, cu[first] : cu[stop]] for name in PER_TOKEN}
    own |= {name: getattr(pack, name)[first:stop] for name in PER_DOCUMENT}
    return pack._replace(cu_seqlens=[c - cu[first] for c in cu[first : stop + 1]], **own)


def split(cu_seqlens: list[int], world_size: int, layout: str, rng: torch.Generator | None = None) -> ds.Partition:
    """A partition by the name of its layout; `ragged` is cut anew by `rng`."""
    if layout != "ragged":
        return ds.partition(cu_seqlens, world_size, layout)
    return ds.partition(cu_seqlens, world_size, fragments=ragged(cu_seqlens, world_size, rng))


def ragged(cu_seqlens: list[int], world_size: int, rng: torch.Generator) -> list[tuple[int, int, int, int]]:
    """(doc, offset, length, rank): long pieces, single tokens, empty pieces, pieces that touch on one rank."""
    table = []
    for doc in range(len(cu_seqlens) - 1):
        length = cu_seqlens[doc + 1] - cu_seqlens[doc]
        cuts = torch.randint(0, length + 1, (world_size + 2,), generator=rng)
        points = torch.cat([cuts, cuts[:1], (cuts[:2] + 1).clamp(max=length)]).sort().values.tolist()
        ranks = torch.randint(0, world_size, (len(points) + 1,), generator=rng)
        ranks[1::3] = ranks[::3][: len(ranks[1::3])]
        pieces = zip([0, *points], [*points, length], ranks.tolist(), strict=True)
        table += [(doc, start, stop - start, rank) for start, stop, rank in pieces]
    return table


def alone(pack: Pack) -> ds.Context:
    """A context of one rank, without any group."""
    return ds.build_context(ds.partition(pack.cu_seqlens, 1), device="cpu")


def simulate(part: ds.Partition, **options: Any) -> ds.Context:
    """A context of all ranks of `part` in this process."""
    return ds.build_context(part, ds.SimulatedGroup(part.world_size), device="cpu", **options)


def listed(ctx: ds.Context, value: Any) -> list:
    """One entry a rank that runs here."""
    return value if ctx.rank is None else [value]


def unlisted(ctx: ds.Context, values: list) -> Any:
    return values if ctx.rank is None else values[0]


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def run_rule(pack: Pack, ctx: ds.Context, **options: Any) -> list[dict[str, Tensor]]:
    """By rank that runs here: its outputs and the gradients of its operands, by autograd."""
    inputs = [[leaf(x) for x in listed(ctx, ctx.shard(getattr(pack, name)))] for name in TOKENWISE]
    ranks = len(inputs[0])
    inputs.append([leaf(pack.initial_state) for _ in range(ranks)])
    *operands, initial_state = (unlisted(ctx, x) for x in inputs)
    o, final_state = ds.chunk_gated_delta_rule(
        *operands, ctx, initial_state=initial_state, output_final_state=True, **options
    )
    o, final_state = listed(ctx, o), listed(ctx, final_state)
    douts = [*listed(ctx, ctx.shard(pack.do)), *[pack.dfinal_state] * ranks]
    grads = torch.autograd.grad([*o, *final_state], list(chain(*inputs)), douts)
    return [
        {"o": o[r].detach(), "final_state": final_state[r].detach()}
        | {name: grads[i * ranks + r] for i, name in enumerate(GRADIENTS)}
        for r in range(ranks)
    ]


def run_convolution(
    pack: Pack, ctx: ds.Context, *, bias: bool = True, activation: str | None = "silu", backend: str = "auto"
) -> list[dict[str, Tensor]]:
    """By rank that runs here: y, and the gradients of its rows and of its copies of the parameters."""
    x = [leaf(x) for x in listed(ctx, ctx.shard(pack.x))]
    weight, shift = [leaf(pack.weight) for _ in x], [leaf(pack.bias) for _ in x]
    y = ds.causal_conv1d(
        unlisted(ctx, x), unlisted(ctx, weight), ctx, bias=unlisted(ctx, shift) if bias else None,
        activation=activation, backend=backend,
    )  # fmt: skip
    y = listed(ctx, y)
    names = ("dx", "dweight", "dbias") if bias else ("dx", "dweight")
    leaves = [*x, *weight, *(shift if bias else ())]
    grads = torch.autograd.grad(y, leaves, listed(ctx, ctx.shard(pack.dy)))
    return [{"y": y[r].detach()} | {name: grads[i * len(x) + r] for i, name in enumerate(names)} for r in range(len(x))]


def join(part: ds.Partition, results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All ranks' results as those of the whole pack, put together without the help of a context."""
    whole = {}
    for name, first in results[0].items():
        if name in STATES:
            whole[name] = sum(r[name] for r in results)
            continue
        whole[name] = first.new_full((1, part.total_tokens, *first.shape[2:]), torch.nan)
        for rank, r in enumerate(results):
            whole[name][:, torch.from_numpy(part.token_ids(rank))] = r[name]
    return whole


def true_rule(pack: Pack, rule: Callable = reference.recurrent_gated_delta_rule, **options: Any) -> dict[str, Tensor]:
    """Outputs and all gradients of a whole pack in FP64, from the operands as they are rounded."""
    leaves = [leaf(getattr(pack, name).double()) for name in (*TOKENWISE, "initial_state")]
    o, final_state = rule(*leaves[:5], pack.cu_seqlens, initial_state=leaves[5], **options)
    grads = torch.autograd.grad((o, final_state), leaves, (pack.do.double(), pack.dfinal_state.double()))
    return {"o": o.detach(), "final_state": final_state.detach(), **dict(zip(GRADIENTS, grads, strict=True))}


def true_convolution(pack: Pack, *, bias: bool = True, activation: str | None = "silu") -> dict[str, Tensor]:
    x, weight, shift = (leaf(t.double()) for t in (pack.x, pack.weight, pack.bias))
    y = reference.causal_conv1d(x, weight, pack.cu_seqlens, bias=shift if bias else None, activation=activation)
    leaves = (x, weight, shift) if bias else (x, weight)
    grads = torch.autograd.grad(y, leaves, pack.dy.double())
    return {"y": y.detach(), **dict(zip(("dx", "dweight", "dbias"), grads, strict=False))}


def relative_error(found: Tensor, truth: Tensor) -> tuple[float, float]:
    """RMS of the error and its worst element, both relative to the RMS of the truth; (0, 0) for equal tensors."""
    assert found.shape == truth.shape
    if found.numel() == 0:
        return 0.0, 0.0
    error, rms = (found.double() - truth).abs(), truth.square().mean().sqrt()
    if rms == 0:
        return (0.0, 0.0) if error.max() == 0 else (torch.inf, torch.inf)
    return (error.square().mean().sqrt() / rms).item(), (error.max() / rms).item()


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that do not have the same bits in both."""
    assert a.keys() == b.keys()
    return [name for name in a if not same_bits(a[name], b[name])]


def assert_exact(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Every tensor agrees with the truth, in RMS and in its worst element (a NaN fails both)."""
    assert found.keys() == truth.keys()
    errors = {name: relative_error(found[name], truth[name]) for name in truth}
    assert {name: error for name, error in errors.items() if not max(error) <= tolerance} == {}


@contextmanager
def reduced_precision(allowed: bool) -> Iterator[None]:
    """What processes switch on to let FP32 products run in TF32 or bf16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if allowed else "highest")
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
        assert torch.backends.cuda.matmul.allow_tf32 == allowed  # and they find their settings as they left them
    finally:
        torch.set_float32_matmul_precision(before)
