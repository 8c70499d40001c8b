"""The convolution's forward of every tier against FP64: the torch tier's, the Hopper tier's emulated and on a GPU."""

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import deltaspan as ds
from deltaspan import reference
from deltaspan.kernels import select
from deltaspan.op.conv import Filter, forward_program
from tests.emulator import DeviceFault, load, path_of
from tests.helpers import filled, same_bits
from tests.op.support import LAYOUTS, offsets, split

LENGTHS = (20, 1, 0, 80, 2, 12)
MODULE = "deltaspan.kernels.hopper.conv"
Tier = Callable[[], tuple[ModuleType, str]]


def by_torch() -> tuple[ModuleType, str]:
    return select.tier("torch"), "cpu"


def emulated() -> tuple[ModuleType, str]:
    return load(MODULE), "cpu"


def on_gpu() -> tuple[ModuleType, str]:
    return select.tier("hopper"), "cuda"


TIERS = [
    pytest.param(by_torch, id="torch"),
    pytest.param(emulated, id="emulated"),
    pytest.param(on_gpu, id="gpu", marks=pytest.mark.gpu),
]


class Problem:
    """A pack's rows, as columns of wider ones, and its filter; `columns` counts those in front and those behind."""

    def __init__(
        self, rng: torch.Generator, dtype: torch.dtype = torch.bfloat16, D: int = 5, taps: int = 4, *,
        lengths: tuple[int, ...] = LENGTHS, columns: tuple[int, int] = (0, 0), bias: bool = True,
        activation: str | None = "silu",
    ) -> None:  # fmt: skip
        self.cu_seqlens, self.columns, self.activation = offsets(lengths), columns, activation
        self.x = 2 * torch.randn(sum(lengths), D, generator=rng).to(dtype)
        self.weight = torch.randn(D, taps, generator=rng)
        self.bias = torch.randn(D, generator=rng) if bias else None

    def run(self, tier: tuple[ModuleType, str], part: ds.Partition | None = None, padding: int = 0) -> Tensor:
        """y of the whole pack, put together from all ranks' rows; those of padding come last.

        Rows behind the pack's, columns beside it, and whatever nobody writes, are NaN.
        """
        part = part or ds.partition(self.cu_seqlens, 1)
        stages, device = tier
        ctx = ds.build_context(
            part, ds.SimulatedGroup(part.world_size), device=device, conv_kernel_size=self.weight.shape[1]
        )
        weight, bias = (None if t is None else t.to(device) for t in (self.weight, self.bias))
        programs = []
        for view in ctx._views:
            row = torch.nn.functional.pad(self.x[view.token_ids.cpu()], (*self.columns, 0, padding), value=torch.nan)
            x = row.to(device)[:, self.columns[0] : self.columns[0] + self.x.shape[1]]
            programs.append(forward_program(stages, view, [Filter(x, weight, bias)], self.activation))
        with filled():
            done = [outputs[0].cpu() for outputs, _ in ctx._transport.run(programs)]
        whole = torch.full((part.total_tokens + padding, self.x.shape[1]), torch.nan, dtype=self.x.dtype)
        for rank, y in enumerate(done):
            assert y.dtype == self.x.dtype
            whole[part.token_ids(rank)] = y[: part.tokens(rank)]
        whole[part.total_tokens :] = done[0][part.tokens(0) :]
        return whole

    def error(self, y: Tensor) -> float:
        """Worst error of y, in units of what the arithmetic allows.

        That is one rounding to y's type, and in fp32, of the sum of all magnitudes, a rounding a tap and one more; then
        silu, whose slope is at most 1.1 and whose exponent, at most 2^5 here, costs 2^-22 of it.
        """
        truth = self._exact(self.activation)
        size = self._exact(None, magnitudes=True)
        kind = torch.finfo(y.dtype)
        allowed = kind.eps / 2 * truth.abs() + kind.tiny * kind.eps + (self.weight.shape[1] + 9) * 2**-24 * size
        return ((y.double() - truth).abs() / allowed).max().nan_to_num(torch.inf).item()

    def _exact(self, activation: str | None, magnitudes: bool = False) -> Tensor:
        operands = [None if t is None else t.double() for t in (self.x, self.weight, self.bias)]
        x, weight, bias = (t.abs() if magnitudes and t is not None else t for t in operands)
        return reference.causal_conv1d(x, weight, self.cu_seqlens, bias=bias, activation=activation)


def tokens_apart(cu_seqlens: list[int], world_size: int) -> ds.Partition:
    """Every token a fragment by itself, on the next rank: the taps of one reach over several fragments and ranks."""
    table = [
        (doc, offset, 1, (start + offset) % world_size)
        for doc, (start, stop) in enumerate(pairwise(cu_seqlens))
        for offset in range(stop - start)
    ]
    return ds.partition(cu_seqlens, world_size, fragments=table)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("taps", [1, 2, 3, 4, 8])
def test_sums(rng: torch.Generator, taps: int, dtype: torch.dtype, tier: Tier) -> None:
    for bias, activation in ((True, "silu"), (False, "silu"), (True, None)):
        problem = Problem(rng, dtype, taps=taps, bias=bias, activation=activation)
        assert problem.error(problem.run(tier())) <= 1, (bias, activation)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    ("D", "columns"), [(1, (0, 0)), (1, (3, 2)), (256, (0, 0)), (264, (8, 0)), (300, (1, 0)), (7, (256, 249))]
)
def test_channels_and_pitches(rng: torch.Generator, D: int, columns: tuple[int, int], tier: Tier) -> None:
    """Columns of a packed row, aligned to what a lane loads at once or not; those beside them are NaN."""
    for dtype in (torch.bfloat16, torch.float32):
        problem = Problem(rng, dtype, D, columns=columns, lengths=(45, 3))
        assert problem.error(problem.run(tier())) <= 1


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("taps", [4, 8])
def test_the_same_bits_for_any_cut(rng: torch.Generator, taps: int, tier: Tier) -> None:
    """Fragments of all lengths, ranks without any, history from this rank and others."""
    problem = Problem(rng, taps=taps)
    one = problem.run(tier())
    assert problem.error(one) <= 1
    for world_size in (1, 5):
        parts = {layout: split(problem.cu_seqlens, world_size, layout, rng) for layout in LAYOUTS}
        for name, part in (parts | {"apart": tokens_apart(problem.cu_seqlens, world_size)}).items():
            assert same_bits(problem.run(tier(), part), one), (name, world_size)


@pytest.mark.parametrize("tier", TIERS)
def test_ranks_without_tokens_and_rows_without_a_document(rng: torch.Generator, tier: Tier) -> None:
    short = Problem(rng, lengths=(2, 1))
    assert short.error(short.run(tier(), ds.partition(short.cu_seqlens, 7))) <= 1
    problem = Problem(rng)
    padded = problem.run(tier(), padding=70)
    assert same_bits(padded[:-70], problem.run(tier())) and not padded[-70:].any()
    assert not Problem(rng, lengths=(0,)).run(tier(), padding=3).any()
    assert Problem(rng, lengths=()).run(tier()).shape == (0, 5)
    assert Problem(rng, D=0).run(tier()).shape == (sum(LENGTHS), 0)


@pytest.mark.parametrize("tier", TIERS)
def test_nan_does_not_cross_into_another_document(rng: torch.Generator, tier: Tier) -> None:
    problem = Problem(rng)
    clean = problem.run(tier())
    start, stop = problem.cu_seqlens[3:5]
    problem.x[start:stop] = torch.nan
    for part in (None, split(problem.cu_seqlens, 3, "zigzag"), tokens_apart(problem.cu_seqlens, 2)):
        y = problem.run(tier(), part)
        assert y[start:stop].isnan().all()
        assert same_bits(y[:start], clean[:start]) and same_bits(y[stop:], clean[stop:])


@pytest.mark.parametrize("tier", TIERS)
def test_large_sums(rng: torch.Generator, tier: Tier) -> None:
    """silu of what its exponential overflows or vanishes for; an infinity gives what it gives in FP64."""
    problem = Problem(rng, torch.float32, lengths=(8,), taps=1, bias=False)
    problem.x[:] = torch.tensor([90.0, -90.0, 1e4, -1e4, 1e30, -1e30, torch.inf, -torch.inf])[:, None]
    problem.weight[:] = 1
    y = problem.run(tier())
    expected = torch.tensor([90.0, -0.0, 1e4, -0.0, 1e30, -0.0, torch.inf, torch.nan])
    torch.testing.assert_close(y, expected[:, None].expand(8, 5), rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("tier", TIERS)
def test_offsets_past_32_bits(rng: torch.Generator, tier: Tier) -> None:
    """Rows 2^25 numbers apart, of memory that is never touched but for them."""
    problem = Problem(rng, lengths=(41, 60), D=3)
    stages, device = tier()
    view = ds.build_context(ds.partition(problem.cu_seqlens, 1), device=device)._views[0]
    far = torch.empty(100 * 2**25 + 3, dtype=torch.bfloat16, device=device).as_strided((101, 3), (2**25, 1))
    far.copy_(problem.x)
    y = stages.convolve(far, far[:0], problem.weight.to(device), problem.bias.to(device), view.edges, "silu")
    assert problem.error(y.cpu()) <= 1


def test_the_kernel_agrees_with_the_torch_tier(rng: torch.Generator) -> None:
    """In fp32 to a unit of a few; in bf16 but for sums that fall between two of its numbers."""
    for dtype, share in ((torch.float32, 1.0), (torch.bfloat16, 0.02)):
        problem = Problem(rng, dtype, D=40)
        ours, theirs = problem.run(emulated()), problem.run(by_torch())
        assert (ours != theirs).float().mean() <= share
        torch.testing.assert_close(ours, theirs, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_tables(rng: torch.Generator) -> None:
    """Fragments of every 64th token and their bounds, empty fragments among them."""
    for world_size in (1, 2, 5):
        part = split(offsets(LENGTHS), world_size, "ragged", rng)
        for view in ds.build_context(part, ds.SimulatedGroup(world_size), device="cpu")._views:
            edges = view.edges
            assert edges.bounds.dtype == edges.fragments.dtype == torch.int32
            assert edges.bounds.tolist() == [*edges.start.tolist(), view.tokens]
            of_token = torch.repeat_interleave(torch.arange(len(edges.length)), edges.length)
            assert edges.fragments.tolist() == of_token[::64].tolist()


NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"}
NAMES |= {torch.int32: "*i32", torch.int64: "*i64"}


@pytest.mark.triton
@pytest.mark.parametrize(
    ("dtype", "weights", "taps", "D", "bias", "activation"),
    [
        (torch.bfloat16, torch.float32, 1, 256, True, "silu"),
        (torch.float16, torch.bfloat16, 2, 264, False, None),
        (torch.bfloat16, torch.float64, 3, 1, True, None),
        (torch.float32, torch.float32, 8, 300, False, "silu"),
    ],
)
def test_what_is_launched_compiles(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, weights: torch.dtype, taps: int, D: int, bias: bool,
    activation: str | None,
) -> None:  # fmt: skip
    """By Triton itself, with the launch's own arguments, also where one that is 1 becomes a constant; and fits."""
    conv = import_module(MODULE)
    compile_ahead = import_module("deltaspan.kernels.hopper.ahead").compile_ahead
    launched = []

    def compiled(kernel: Any, programs: tuple[int], *arguments: Any, num_warps: int, **constants: Any) -> None:
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        assert [*given, *constants] == list(kernel.arg_names)
        kinds = {name: NAMES[t.dtype] if isinstance(t, Tensor) else "i32" for name, t in given.items()}
        if given["tokens"] == 1:
            constants["tokens"] = 1
            del kinds["tokens"]
        launched.append(compile_ahead(kernel, kinds, constants, num_warps))

    monkeypatch.setattr(conv, "launch", compiled)
    for tokens in (1, 40):
        view = ds.build_context(ds.partition([0, tokens], 1), device="cpu", conv_kernel_size=taps)._views[0]
        x, weight = torch.zeros(tokens, D, dtype=dtype), torch.zeros(D, taps, dtype=weights)
        conv.convolve(x, x[:0], weight, weight[:, 0] if bias else None, view.edges, activation)
    assert len(launched) == 2 and all(made.spills == 0 and made.shared == 0 for made in launched)


FAULTS = {
    "history ignored": ("mask=inside & (row >= 0)", "mask=inside & (row < -1)"),
    "border within a run ignored": ("if (first + i + j >= end) & (i + j < n)", "if (first + i + j >= end) & (n < 0)"),
    "border before a run ignored": ("if first - begin >= W - 1 - k", "if first >= W - 1 - k"),
    "tap order reversed": ("gl.where(k == tap,", "gl.where(k == W - 1 - tap,"),
    "history of a run from its first column on": ("(W - 1) + first - begin + k", "(W - 1) + k"),
    "fragment of the wrong run": ("fragments + first // CHUNK", "fragments + first // RUN"),
    "empty fragments not skipped": ("                while end <=", "                if end <="),
    "one fragment a run": ("    while end <= first:", "    if end <= first:"),
    "bias forgotten": ("pre = pre + shift", "pre = pre"),
    "bias after silu": ("pre = silu(pre)", "pre = silu(pre - shift) + shift"),
    "rows not walked at their pitch": ("x += AT_ONCE * PITCH", "x += AT_ONCE * D"),
    "pitch of y for x": ("x += first.to(gl.int64) * PITCH", "x += first.to(gl.int64) * D"),
    "channels not masked": ("inside = d < D", "inside = d < D + 1"),
    "last rows not masked": ("mask=inside & (i + j < n))", "mask=inside)"),
    "32-bit offsets": ("first.to(gl.int64) * PITCH", "first * PITCH"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(rng: torch.Generator, fault: str) -> None:
    before, after = FAULTS[fault]
    source = path_of(MODULE).read_text()
    assert before in source
    tier = load(MODULE, source.replace(before, after)), "cpu"
    if fault == "32-bit offsets":
        with pytest.raises(DeviceFault, match="does not fit"):
            test_offsets_past_32_bits(rng, lambda: tier)
        return
    problem = Problem(rng, columns=(2, 1))
    whole = [(doc, 0, length, 0) for doc, length in enumerate(LENGTHS) if doc != 3]
    before_a_run = ds.partition(problem.cu_seqlens, 1, fragments=[*whole[:3], (3, 0, 9, 0), (3, 9, 71, 0), *whole[3:]])
    parts = [None, before_a_run, split(problem.cu_seqlens, 2, "ragged", rng), tokens_apart(problem.cu_seqlens, 2)]
    try:
        assert not all(problem.error(problem.run(tier, part)) <= 1 for part in parts)
    except DeviceFault:
        return
