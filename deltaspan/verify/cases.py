"""The one table of cases: awkward packs, partitions and inputs, each by a name that says what is awkward."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

import deltaspan as ds
from deltaspan.exchange import EXCHANGES
from deltaspan.verify.pairwise import cover


class Heads(NamedTuple):
    H: int
    HV: int
    K: int
    V: int


class Convolution(NamedTuple):
    width: int
    channels: tuple[int, ...]  # of each tensor; they travel together
    bias: bool
    activation: str | None


class Way(NamedTuple):
    """How the op's gradients are come by."""

    options: dict[str, Any]  # of the op
    explicit: bool = False  # by `ds.forward` and `ds.backward`
    again: bool = False  # the backward runs the forward's exchange again, for nothing was kept
    checkpoint: dict[str, bool] | None = None  # torch's, around the op
    handle: bool = False


class Keys(NamedTuple):
    unit_keys: bool  # the op's option
    longest: float  # keys are between 1 / longest and longest long
    spread: float  # of directions around a common one; infinite: none is common


PACKS = {  # document lengths
    "off the chunk grid": (37, 150, 65),
    "on the chunk grid": (64, 128, 192),
    "one-token and empty documents": (1, 0, 40, 1, 0, 70, 0),
    "fragments shorter than a halo": (9, 3, 5, 2),
    "more ranks than tokens": (0, 0, 2, 1),
    "many short documents": (16,) * 6,
    "uneven documents": (3, 321, 131),
    "one long document": (1100,),
}
RANKS = ("1 rank", "2 ranks", "3 ranks", "4 ranks", "8 ranks", "2 processes", "4 processes")  # or any other number
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "ragged")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
HEADS = {  # H:HV KxV; HV of 3 and 6 divide by few numbers of ranks, HV of 1 and 2 are fewer than most
    "1:1 128x32": Heads(1, 1, 128, 32),
    "2:2 64x64": Heads(2, 2, 64, 64),
    "1:2 16x48": Heads(1, 2, 16, 48),
    "2:6 32x16": Heads(2, 6, 32, 16),
    "1:3 32x128": Heads(1, 3, 32, 128),
    "2:8 16x16": Heads(2, 8, 16, 16),
}
KEYS = {
    "unit keys": Keys(unit_keys=True, longest=1.0, spread=torch.inf),
    "collinear keys": Keys(unit_keys=True, longest=1.0, spread=0.05),
    "unit keys, any allowed": Keys(unit_keys=False, longest=1.0, spread=torch.inf),
    "long keys": Keys(unit_keys=False, longest=2.0, spread=torch.inf),
}
CONVOLUTIONS = {
    "4 taps": Convolution(4, (6,), bias=False, activation="silu"),
    "1 tap": Convolution(1, (5,), bias=True, activation="silu"),
    "2 taps, linear": Convolution(2, (3,), bias=True, activation=None),
    "7 taps, two tensors": Convolution(7, (3, 4), bias=True, activation="silu"),
}
SEGMENTS = {  # the planner's rule, and the multiprocessors that it plans for
    "segments as planned": ("row_cost_lpt", 132),
    "whole fragments": ("one", 132),
    "some segments": ("occ", 6),
    "a segment a chunk": ("occ", 10_000),
}
STATES = {"no states": False, "initial and final states": True}
WAYS = {
    "autograd": Way({}),
    "explicit": Way({}, explicit=True),
    "replay": Way({}, explicit=True, again=True),
    "replay under autograd": Way({"boundary_mode": "replay"}, again=True),
    "full": Way({"save_mode": "full"}),
    "without transfers": Way({"save_transfer": False}),
    "checkpoint": Way({}, checkpoint={"use_reentrant": False}),
    "reentrant checkpoint": Way({}, checkpoint={"use_reentrant": True}),
    "recompute handle": Way({}, checkpoint={"use_reentrant": False}, handle=True),
}

Sampler = Callable[[torch.Generator, int, int], Tensor]  # tokens, value heads -> [T, HV] fp64


def _normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=rng)


def _uniform(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=rng)


def _moderate(rng: torch.Generator, T: int, HV: int) -> Tensor:
    return -(1 + 15 * _uniform(rng, HV)) * softplus(_normal(rng, T, HV) - 4)


def _mixed(rng: torch.Generator, T: int, HV: int) -> Tensor:
    return torch.tensor([-10.0, 0.0], dtype=torch.float64).repeat(HV)[:HV].expand(T, HV)


def _one_infinite(rng: torch.Generator, T: int, HV: int) -> Tensor:
    g = _moderate(rng, T, HV)
    g.view(-1)[torch.randint(g.numel(), (), generator=rng)] = -torch.inf
    return g


DECAYS: dict[str, Sampler] = {  # g, natural logarithms
    "moderate decay": _moderate,
    "slow decay": lambda rng, T, HV: -1e-4 * _uniform(rng, T, HV),
    "strong decay": lambda rng, T, HV: -16 * softplus(_normal(rng, T, HV)),
    "no decay": lambda rng, T, HV: torch.zeros(T, HV, dtype=torch.float64),
    "heads with and without decay": _mixed,
    "one g of -inf": _one_infinite,
}
BETAS: dict[str, Sampler] = {
    "beta in [0, 1]": _uniform,
    "beta near 1": lambda rng, T, HV: 1 - 1e-3 * _uniform(rng, T, HV),
    "beta up to 2": lambda rng, T, HV: 2 * _uniform(rng, T, HV),
    "some beta of 0": lambda rng, T, HV: (2 * _uniform(rng, T, HV) - 1).clamp(min=0),
}

FACTORS = {
    "pack": tuple(PACKS),
    "ranks": RANKS,
    "layout": LAYOUTS,
    "dtype": tuple(DTYPES),
    "decay": tuple(DECAYS),
    "heads": tuple(HEADS),
    "keys": tuple(KEYS),
    "beta": tuple(BETAS),
    "conv": tuple(CONVOLUTIONS),
    "states": tuple(STATES),
    "segments": tuple(SEGMENTS),
    "exchange": tuple(EXCHANGES),
    "way": tuple(WAYS),
}


@dataclass(frozen=True)
class Case:
    """One row of the table: a name of each kind, and the seed of its random numbers."""

    pack: str
    ranks: str
    layout: str
    dtype: str
    decay: str
    heads: str
    keys: str
    beta: str
    conv: str
    states: str
    segments: str
    exchange: str
    way: str
    seed: int

    @property
    def label(self) -> str:
        return "; ".join(getattr(self, field.name) for field in fields(self) if field.name != "seed")

    @property
    def world_size(self) -> int:
        return int(self.ranks.split()[0])

    @property
    def real(self) -> bool:
        """Whether the ranks are processes of their own."""
        return "process" in self.ranks

    @property
    def cu_seqlens(self) -> list[int]:
        return [0, *accumulate(PACKS[self.pack])]

    def partition(self, world_size: int | None = None) -> ds.Partition:
        """Over its own number of ranks, or another."""
        world_size = self.world_size if world_size is None else world_size
        if self.layout != "ragged":
            return ds.partition(self.cu_seqlens, world_size, layout=self.layout)
        return ds.partition(self.cu_seqlens, world_size, fragments=self._ragged(world_size))

    def _ragged(self, world_size: int) -> list[tuple[int, int, int, int]]:
        """Every document in up to 7 pieces, some empty, each on any rank: pieces that touch may stay together."""
        rng, table = Random(self.seed), []
        for doc, length in enumerate(PACKS[self.pack]):
            cuts = [0, *sorted(rng.choices(range(length + 1), k=rng.randint(0, 6))), length]
            table += [(doc, cut, cuts[i + 1] - cut, rng.randrange(world_size)) for i, cut in enumerate(cuts[:-1])]
        return table


def quick_cases(seed: int) -> list[Case]:
    """Cases in which every two factors meet in every pair of values."""
    rng = Random(seed)
    return [Case(**row, seed=rng.getrandbits(32)) for row in cover(FACTORS, rng)]


@dataclass(frozen=True, eq=False)
class Inputs:
    """Whole-pack operands of a case, and the gradients that its backward starts from; on the CPU."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, HV, V]
    g: Tensor  # [T, HV]
    beta: Tensor  # [T, HV]
    do: Tensor  # [T, HV, V]
    initial_state: Tensor | None  # [N, HV, K, V]
    dfinal_state: Tensor | None  # [N, HV, K, V]
    x: tuple[Tensor, ...]  # [T, D] each
    dy: tuple[Tensor, ...]
    weight: tuple[Tensor, ...]  # [D, W]
    bias: tuple[Tensor, ...] | None  # [D]
    z: Tensor  # [T, 3] whole numbers, to shard and unshard
    dz: tuple[Tensor, ...]  # by rank, [T + TAIL, 3] whole numbers


TAIL = 3  # rows that unshard appends


def draw(case: Case) -> Inputs:
    """The inputs of a case: the same in every process. Operands are rounded to the case's type once, here."""
    rng = torch.Generator().manual_seed(case.seed)
    T, N, (H, HV, K, V), conv = case.cu_seqlens[-1], len(PACKS[case.pack]), HEADS[case.heads], CONVOLUTIONS[case.conv]
    operand = DTYPES[case.dtype]
    wide = torch.promote_types(operand, torch.float32)

    k = _draw_keys(rng, KEYS[case.keys], T, H, K)
    # beta |k|^2 is what a write takes of the old state: with longer keys it stays the drawn number.
    beta = BETAS[case.beta](rng, T, HV) / k.square().sum(-1).clamp(min=1).repeat_interleave(HV // H, dim=-1)
    states = (_normal(rng, N, HV, K, V).to(wide) for _ in range(2)) if STATES[case.states] else (None, None)
    initial_state, dfinal_state = states

    def rows(dtype: torch.dtype, *shape: int) -> Tensor:
        return _normal(rng, T, *shape).to(dtype)

    def whole_numbers(count: int) -> Tensor:
        return torch.randint(-99, 100, (count, 3), generator=rng).double()

    # A query leans towards its key, a gradient towards its value. Else q.k or v.do of a document of one token, which is
    # all that its results consist of, may cancel by chance, and roundings would be measured against next to nothing.
    v = _normal(rng, T, HV, V)
    q, do = _normal(rng, T, H, K) + 3 * k, _normal(rng, T, HV, V) + v

    return Inputs(
        q=q.to(operand),
        k=k.to(operand),
        v=v.to(operand),
        g=DECAYS[case.decay](rng, T, HV).to(wide),
        beta=beta.to(wide),
        do=do.to(operand),
        initial_state=initial_state,
        dfinal_state=dfinal_state,
        x=tuple(rows(operand, D) for D in conv.channels),
        dy=tuple(rows(operand, D) for D in conv.channels),
        weight=tuple(_normal(rng, D, conv.width).to(wide) for D in conv.channels),
        bias=tuple(_normal(rng, D).to(wide) for D in conv.channels) if conv.bias else None,
        z=whole_numbers(T),
        dz=tuple(whole_numbers(T + TAIL) for _ in range(case.world_size)),
    )


def _draw_keys(rng: torch.Generator, keys: Keys, T: int, H: int, K: int) -> Tensor:
    """[T, H, K]"""
    k = _normal(rng, T, H, K)
    if keys.spread < torch.inf:
        k = normalize(_normal(rng, H, K), dim=-1) + keys.spread * normalize(k, dim=-1)
    return normalize(k, dim=-1) * keys.longest ** (2 * _uniform(rng, T, H, 1) - 1)
