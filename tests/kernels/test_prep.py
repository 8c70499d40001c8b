"""The prep stage of every tier against FP64: the torch tier's, the Hopper tier's on the emulator, and on a GPU."""

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import deltaspan as ds
from deltaspan.kernels import select
from deltaspan.kernels.stages import READY, Raw
from deltaspan.plan import chunk_grid
from tests.emulator import DeviceFault, launch, load, path_of, seeded
from tests.helpers import same_bits

LENGTHS = (100, 1, 0, 64, 17)
MODULE = "deltaspan.kernels.hopper.prep"
EXCESS = 1.004


class Found(NamedTuple):
    A: Tensor  # [HV, NC, 64, 64]
    G: Tensor  # [HV, NC, 64], log2
    broken: Tensor  # [H, NC]


class Inputs(NamedTuple):
    k: Tensor  # [T, H, 128] bf16
    g: Tensor  # [T, HV]
    beta: Tensor  # [T, HV]
    part: ds.Partition

    @property
    def chunks(self) -> Tensor:
        grid = chunk_grid(self.part, 0)
        return torch.tensor(list(zip(grid.start, grid.length, strict=True)), dtype=torch.int32).view(-1, 2)


def drawn(rng: torch.Generator, kind: str = "random", H: int = 2, group: int = 3) -> Inputs:
    T, HV = sum(LENGTHS), H * group
    noise, one = torch.randn(T, H, 128, generator=rng), normalize(torch.randn(1, H, 128, generator=rng), dim=-1)
    uniform = torch.rand(T, HV, generator=rng)
    k, beta = {
        "random": (noise, uniform),
        "collinear": (one + 0.05 * normalize(noise, dim=-1), 0.9 + 0.1 * uniform),
        "collinear signs": (one * noise[..., :1].sign() + 0.05 * normalize(noise, dim=-1), 0.9 + 0.1 * uniform),
        "identical, beta 1": (one.expand(T, H, 128), torch.ones(T, HV)),
        "beta up to 2": (noise, 2 * uniform),
        "collinear, beta near 2": (one + 0.05 * normalize(noise, dim=-1), 1.9 + 0.1 * uniform),
        "some beta of 0": (noise, (2 * uniform - 1).clamp(min=0)),
    }[kind]
    g = -(1 + 15 * torch.rand(HV, generator=rng)) * torch.nn.functional.softplus(torch.randn(T, HV, generator=rng) - 4)
    offsets = [sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)]
    return Inputs(normalize(k, dim=-1).bfloat16().contiguous(), g, beta, ds.partition(offsets, 1))


def exact(x: Inputs) -> tuple[Tensor, Tensor]:
    """A and G in FP64, from the chunks of every document by themselves."""
    HV, group = x.g.shape[1], x.g.shape[1] // x.k.shape[1]
    A, G = torch.zeros(HV, len(x.chunks), 64, 64).double(), torch.zeros(HV, len(x.chunks), 64).double()
    for c, (start, n) in enumerate(x.chunks.tolist()):
        k = x.k[start : start + n].double().transpose(0, 1).repeat_interleave(group, 0)
        beta = x.beta[start : start + n].double().mT
        system = torch.eye(n).double() + (beta[..., None] * (k @ k.mT)).tril(-1)
        A[:, c, :n, :n] = torch.linalg.inv(system) * beta[:, None]
        G[:, c, :n] = x.g[start : start + n].double().clamp(min=-110).mT.cumsum(-1) / math.log(2)
        G[:, c, n:] = G[:, c, n - 1, None]
    return A, G


def by_torch(x: Inputs) -> Found:
    """From the torch tier's tape without decay, where T is the decay-free inverse, and with it."""
    view = ds.build_context(x.part, device="cpu")._views[0]
    v, tier = torch.zeros(*x.g.shape, 8).to(x.k.dtype), select.tier("torch")
    without, tape = (tier.prep(x.k, x.k, v, g, x.beta, view.grid, scale=1.0, unit_keys=True) for g in (0 * x.g, x.g))
    broken = torch.where(without.broken.any(-2), without.broken.int().argmax(-2), 64)[..., 0]
    A = without.solve * without.beta.mT
    return Found(A.transpose(0, 1), tape.a[..., 0].log2().transpose(0, 1), broken.mT[:: x.g.shape[1] // x.k.shape[1]])


def emulated(x: Inputs, source: str | None = None) -> Found:
    """The kernel itself, on memory full of NaN."""
    HV, NC = x.g.shape[1], len(x.chunks)
    A = torch.full((HV, NC, 64, 64), torch.nan, dtype=torch.bfloat16)
    G, reach = torch.full((HV, NC, 64), torch.nan), torch.full((HV, NC), torch.nan)
    broken = torch.full((x.k.shape[1], NC), -1, dtype=torch.int32)
    H, raw = x.k.shape[1], {"L2NORM": False, "GATE": False, "BIAS": False, "SIGMOID": 0}
    module = load(MODULE, source)
    tiles = module.Tilings()
    given = (tiles.rows(x.k), tiles.of(A, 64, 64, 64), x.g, x.beta, x.chunks, G, broken, reach, NC, 1, *[None] * 5)
    launch(module.prep_kernel, (NC * H,), *given, seed=5, H=H, GROUP=HV // H, **raw)
    return Found(A, G, broken)


def on_gpu(x: Inputs) -> Found:
    from deltaspan.kernels.hopper.prep import prep

    made = [prep(*(t.cuda() for t in (x.k, x.g, x.beta, x.chunks))) for _ in range(3)]
    for again in made[1:]:
        assert all(same_bits(a, b) for a, b in zip(made[0][:4], again[:4], strict=True))
    return Found(*(t.cpu() for t in made[0][:3]))


TIERS = [
    pytest.param(by_torch, id="torch"),
    pytest.param(emulated, id="emulated"),
    pytest.param(on_gpu, id="gpu", marks=pytest.mark.gpu),
]
KINDS = (
    "random", "collinear", "collinear signs", "identical, beta 1", "beta up to 2", "collinear, beta near 2",
    "some beta of 0",
)  # fmt: skip


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_inverse_and_decay(rng: torch.Generator, kind: str, tier: Callable[[Inputs], Found]) -> None:
    """A to the error of rounding the exact one to bf16, also where the inverse is ill-conditioned: what is added before
    has 22 bits, and adds up in squares to less than the 0.4 % that 11 bits would. In fp32 to a hundredth of that."""
    x = drawn(rng, kind)
    found, (A, G) = tier(x), exact(x)
    rounding = (A.bfloat16().double() - A).norm() / A.norm()
    error = (found.A.double() - A).norm() / A.norm()
    assert error <= (EXCESS * rounding if found.A.dtype == torch.bfloat16 else 1e-5), (error, rounding)
    torch.testing.assert_close(found.G.double(), G, rtol=1e-5, atol=1e-5)
    beyond = torch.arange(64) >= x.chunks[:, 1, None]  # [NC, 64]
    outside = torch.ones(64, 64).triu(1).bool() | beyond[:, :, None] | beyond[:, None, :]
    if found.A.dtype == torch.bfloat16:
        assert not found.A[:, outside].any()
    assert (found.broken == 64).all()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("H", "group"), [(1, 1), (3, 1), (1, 2), (2, 4), (1, 5)])
def test_any_heads(rng: torch.Generator, H: int, group: int, tier: Callable[[Inputs], Found]) -> None:
    x = drawn(rng, H=H, group=group)
    A, _ = exact(x)
    assert (tier(x).A.double() - A).norm() / A.norm() <= 2e-3


@pytest.mark.parametrize("tier", TIERS)
def test_long_keys_are_marked_from_their_row_on(rng: torch.Generator, tier: Callable[[Inputs], Found]) -> None:
    x = drawn(rng)
    assert not (tier(x).broken < 64).any()
    x.k[70, 1] *= 1.1  # document 0, its second chunk, row 6
    x.k[90, 1] *= 1.2
    x.k[101 + 63, 0] *= 1.05  # document 3's last row
    expected = torch.full((2, len(x.chunks)), 64)
    expected[1, 1], expected[0, 3] = 6, 63
    assert torch.equal(tier(x).broken.long(), expected)


@pytest.mark.parametrize("tier", TIERS[1:])
def test_a_key_that_is_no_number_is_no_unit_key(rng: torch.Generator, tier: Callable[[Inputs], Found]) -> None:
    x = drawn(rng)
    clean = tier(x)
    x.k[66, 0, 5] = torch.nan
    found = tier(x)
    assert found.broken[0, 1] == 2 and (found.broken.flatten() < 64).sum() == 1
    others = [c for c in range(len(x.chunks)) if c != 1]
    assert torch.equal(found.A[:, others], clean.A[:, others]) and torch.equal(found.A[3:], clean.A[3:])


@pytest.mark.parametrize("tier", TIERS)
def test_strong_decay(rng: torch.Generator, tier: Callable[[Inputs], Found]) -> None:
    """Decays beyond what fp32 can hold count as those that it can, so that the sum keeps its low bits."""
    x = drawn(rng)
    x.g[::7] = -torch.inf
    x.g[3::11] = -400.0
    found, (_, G) = tier(x), exact(x)
    assert found.G.isfinite().all() or tier is by_torch
    if tier is not by_torch:
        torch.testing.assert_close(found.G.double(), G, rtol=1e-6, atol=1e-3)


def spoilt(x: Inputs, chunk: int, raw: bool, device: str, source: str | None = None) -> tuple[list, list]:
    """What prep leaves of one chunk, with all other rows as they are, and with NaN in their place; k has a pitch."""
    if device == "cuda":
        from deltaspan.kernels.hopper.prep import prep
    else:
        prep = load(MODULE, source).prep
    (T, H, D), HV = x.k.shape, x.g.shape[1]
    start, n = x.chunks[chunk].tolist()
    found = []
    for value in (None, torch.nan):
        held = torch.full((2, T, 2 * H, D), torch.nan if value else 1.0, dtype=torch.bfloat16)
        held[:, :, :H] = x.k
        q, k = held[:, :, :H]
        g, beta = x.g.clone(), x.beta.clone()
        if value is not None:
            for t in (q, k, g, beta):
                t[:start], t[start + n :] = value, value
        how = Raw(True, torch.zeros(HV, device=device), None, True) if raw else READY
        with seeded(3):
            made = prep(*(t.to(device) for t in (k, g, beta, x.chunks[chunk : chunk + 1])), q=q.to(device), raw=how)
        found.append([t.cpu() for t in made if t is not None])
    return found[0], found[1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("raw", [False, True], ids=["ready", "raw"])
@pytest.mark.parametrize("chunk", [1, 2, 4], ids=["36 tokens", "one token", "17 tokens at the end"])
def test_rows_behind_a_chunk_are_not_felt(rng: torch.Generator, chunk: int, raw: bool, device: str) -> None:
    """A tile of keys holds them, be they of the next document or no numbers."""
    clean, found = spoilt(drawn(rng, H=1, group=2), chunk, raw, device)
    assert all(map(same_bits, clean, found)) and all(t.isfinite().all() for t in found)
    assert len(found) == 4 + raw and found[2].item() == 64


MASKS = {
    "in a diagonal block": "gl.where((column < n)[None, :], ",
    "between blocks": "gl.where((row < felt)[:, None], ",
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("raw", [False, True], ids=["ready", "raw"])
def test_rows_behind_a_chunk_would_be_felt(rng: torch.Generator, raw: bool, mask: str) -> None:
    source, before = path_of(MODULE).read_text(), MASKS[mask]
    assert source.count(before) == 1
    without = source.replace(before, before.replace("< n)", "< 64)").replace("< felt)", "< 64)"))
    clean, found = spoilt(drawn(rng, H=1, group=2), 1, raw, "cpu", without)
    assert not (same_bits(clean[0], found[0]) and found[0].isfinite().all())  # raw, both may overflow


@pytest.mark.parametrize("T", [1, 17, 63])
def test_fewer_rows_than_a_tile_has(rng: torch.Generator, T: int) -> None:
    """The copy engine fills what lies behind the tensor."""
    x = drawn(rng, H=2, group=1)
    x = Inputs(x.k[:T], x.g[:T], x.beta[:T], ds.partition([0, T], 1))
    found, (A, _) = emulated(x), exact(x)
    rounding = (A.bfloat16().double() - A).norm()  # of a number alone up to 2^-8 of it, of many less
    assert (found.A.double() - A).norm() <= EXCESS * rounding and (found.broken == 64).all()


def test_no_chunk_at_all(rng: torch.Generator) -> None:
    x = drawn(rng)
    made = load(MODULE).prep(x.k[:0], x.g[:0], x.beta[:0], x.chunks[:0])
    assert made.A.shape == (6, 0, 64, 64) and made.reach.shape == (6, 0) and made.broken.shape == (2, 0)


def test_tiles_are_those_of_the_launches_that_follow(rng: torch.Generator) -> None:
    x, module = drawn(rng, H=1, group=1), load(MODULE)
    tilings = module.Tilings()
    with seeded(3):
        made = module.prep(x.k, x.g, x.beta, x.chunks[:1], tilings=tilings)
    held = [*tilings.values()]
    assert held == [tilings.rows(x.k), tilings.of(made.A, 64, 64, 64)] and len(tilings) == 2


FAULTS = {
    "wrong row of n": ("between(keys, felt, inverse, 2, 1,", "between(keys, felt, inverse, 3, 1,"),
    "low halves dropped": ("    acc = mma_v2(left_low, right_high, acc)\n", ""),
    "beta of the wrong row": ("strengths.index(e * 2 + pair).slice(i, 1, 1)", "strengths.index(e * 2).slice(i, 1, 1)"),
    "upper half not cleared": ("place(tile, 1, o10, o11, none, none)", "place(tile, 1, o10, o11, o11, none)"),
    "blocks in the wrong order": ("gl.permute(x, (0, 3, 2, 1))", "gl.permute(x, (0, 2, 3, 1))"),
    "diagonal of the wrong pair": ("diagonal.index(1).slice(0, 1, 0)", "diagonal.index(1).slice(1, 1, 0)"),
    "rows below take up one row less": ("gl.where(row > i, x + ni", "gl.where(row > i + 1, x + ni"),
    "keys that nobody has waited for": ("    mbarrier.wait(arrived, 0)\n    mbarrier.invalidate(arrived)", "    pass"),
    "a tile handed on without a fence": ("        fence_async_shared()\n", ""),
    "a tile written while it leaves": ("    store_wait(0)  # for", "    # for"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(rng: torch.Generator, fault: str) -> None:
    before, after = FAULTS[fault]
    source = path_of(MODULE).read_text()
    assert before in source
    x = drawn(rng, "collinear")
    A, _ = exact(x)
    try:
        found = emulated(x, source.replace(before, after)).A.double()
    except DeviceFault:
        return
    rounding = (A.bfloat16().double() - A).norm()
    assert not (found - A).norm() <= EXCESS * rounding
