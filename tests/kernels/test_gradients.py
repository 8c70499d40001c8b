"""The Hopper tier's gradients of every chunk on the emulator, and on a GPU, against FP64; and the states they start
from."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deltaspan.reference import recurrent_gated_delta_rule
from tests.emulator import DeviceFault, path_of, seeded
from tests.helpers import same_bits
from tests.kernels import test_adjoint
from tests.kernels.test_adjoint import Given, given
from tests.kernels.test_hopper import SCALE, TIER, relative

NAMES = ("dq", "dk", "dv", "dg", "dbeta")
# Of a chunk S, D, A, T, F, R, U, dU, dR, dP and Y are rounded to bf16, and rows scaled on their way into dq and dk: some
# ten roundings, of which each gradient sees five to eight, 1.1e-3 of RMS each.
BF16 = 6e-3


class Found(NamedTuple):
    """What the kernel gives, and what it was given."""

    gradients: dict[str, Tensor]
    states: Tensor
    costates: Tensor


class Machine(test_adjoint.Machine):
    def states(self, g: Given, **options) -> Tensor:
        x, made = g.x, self.prep(g.x)
        run = self.module("forward").forward
        with seeded(2):
            return run(x.q, x.k, x.v, made, x.entry, x.segments, SCALE, output=False, states=True, **options)[2]

    def gradients(self, g: Given, seed: int = 0, programs: int = 2) -> Found:
        x, made, states, (_, costates) = g.x, self.prep(g.x), self.states(g), self.adjoint(g, seed=4)
        run = self.module("gradients").gradients
        operands = x.q, x.k, x.v, x.beta, g.do, made, states, costates, x.chunks, SCALE
        with seeded(seed):
            return Found(dict(zip(NAMES, run(*operands, programs=programs), strict=True)), states, costates)


def truth(g: Given) -> dict[str, Tensor]:
    """By autograd of the recurrence in FP64, token by token, from every segment's entry state."""
    x = g.x
    leaves = [t.cpu().double().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.beta)]
    ends = [0, *(end for _, end in x.runs)]
    o, last = recurrent_gated_delta_rule(*leaves, ends, scale=SCALE, initial_state=x.entry.cpu().double())
    ((o * g.do.cpu()).sum() + (last * g.leaving.cpu()).sum()).backward()
    return {name: leaf.grad for name, leaf in zip(NAMES, leaves, strict=True)}


def found_and_true(g: Given, device: str, bound: float = BF16, **options) -> None:
    """All of each gradient; and each token's, beside what all have, so that no tail is lost among many tokens."""
    found = Machine(device).gradients(g.to(device), **options).gradients
    for name, true in truth(g).items():
        assert relative(found[name], true) < bound, name
        error, size = found[name].cpu().double() - true, true.square().mean().sqrt()
        by_token = error.flatten(1).square().mean(1).sqrt() / (true.flatten(1).square().mean(1).sqrt() + size)
        assert by_token.max() < 4 * bound, (name, int(by_token.argmax()))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("decay", ["moderate", "slow", "strong", "none"])
def test_gradients(rng: torch.Generator, device: str, decay: str) -> None:
    found_and_true(given(rng, [100, 1, 64, 70], 2, decay), device, seed=3)


@pytest.mark.parametrize(("H", "group"), [(2, 1), (1, 3), (2, 4)])
def test_any_heads(rng: torch.Generator, device: str, H: int, group: int) -> None:
    found_and_true(given(rng, [66, 3], H=H, group=group, decay="slow"), device)


def test_every_head_of_strong_decay(rng: torch.Generator, device: str) -> None:
    """dg of a head that decays by e^-10 a token is 1e-5 of another's: by itself it is as right, since nothing large
    cancels in it."""
    g = given(rng, [90], group=2)
    g.x.g[:, 0] = -10 - torch.rand(90, generator=rng)
    found, true = Machine(device).gradients(g.to(device)).gradients, truth(g)
    assert true["dg"][:, 0].norm() < 1e-3 * true["dg"][:, 1].norm()
    for name in ("dv", "dg", "dbeta"):
        for head in range(2):
            assert relative(found[name][:, head], true[name][:, head]) < 2 * BF16, (name, head)


def test_decay_that_cuts_off(rng: torch.Generator, device: str) -> None:
    g = given(rng, [80], group=2)
    g.x.g[[3, 64, 70]] = -torch.inf
    g.x.g[40, 1] = -500.0
    found = Machine(device).gradients(g.to(device)).gradients
    assert not found["dg"][[3, 64, 70]].any() and not found["dg"][40, 1]
    finite = g._replace(x=g.x._replace(g=g.x.g.clamp(min=-1000)))
    for name, true in truth(finite).items():
        assert relative(found[name], true) < BF16, name


@pytest.mark.parametrize("strength", [0.0, -0.0, 1e-7, 2.0])
def test_writes_of_any_strength(rng: torch.Generator, device: str, strength: float) -> None:
    """Also a token that writes nothing learns what writing would have done."""
    g = given(rng, [80], H=1, group=2, decay="slow")
    quiet = torch.rand(80, 2, generator=rng) < 0.3
    g.x.beta[quiet] = strength
    g.x.beta[~quiet] = 0.9 + 0.1 * torch.rand(int((~quiet).sum()), generator=rng)
    found_and_true(g, device)
    found, true = Machine(device).gradients(g.to(device)).gradients["dbeta"].cpu(), truth(g)["dbeta"]
    assert relative(found[quiet], true[quiet]) < BF16 and relative(found[~quiet], true[~quiet]) < BF16


@pytest.mark.parametrize("halves", [False, True])
def test_states_of_every_chunk(rng: torch.Generator, device: str, halves: bool) -> None:
    """What the walk with output passes from chunk to chunk, in bf16; exit states stay those of the walk."""
    g = given(rng, [150, 1, 64], H=2, group=1, decay="slow").to(device)
    states, x = Machine(device).states(g, halves=halves), g.x
    _, exits = Machine(device).forward(x)
    run = partial(Machine(device).module("forward").forward, output=False, states=True, halves=halves)
    assert torch.equal(run(x.q, x.k, x.v, Machine(device).prep(x), x.entry, x.segments, SCALE)[1], exits)
    _, ends = Machine(device).forward(x._replace(segments=chunk_by_chunk(x.segments), entry=chained(g, device)))
    assert torch.equal(states, chained(g, device).mT.bfloat16())
    for source, first in ((0, 0), (1, 3), (2, 4)):
        assert torch.equal(states[first], x.entry[source].mT.bfloat16())
    assert torch.equal(ends[2], exits[0])


def chunk_by_chunk(segments: Tensor) -> Tensor:
    """Every chunk a segment of its own."""
    rows = []
    for begin, end, first, *_ in segments.tolist():
        for c, at in enumerate(range(begin, end, 64), first):
            rows.append((at, min(at + 64, end), c, c, c))
    return torch.tensor(rows, dtype=torch.int32, device=segments.device)


def chained(g: Given, device: str) -> Tensor:
    """The state at every chunk's start by walks of one chunk each [NC, HV, K, V]."""
    entry, rows = [], chunk_by_chunk(g.x.segments)
    firsts = {first: source for _, _, first, source, _ in g.x.segments.tolist()}
    for c, row in enumerate(rows):
        if c in firsts:
            state = g.x.entry[firsts[c]]
        entry.append(state)
        alone = row.clone()[None]
        alone[0, 3:] = 0
        state = Machine(device).forward(g.x._replace(segments=alone, entry=state[None]))[1][0]
    return torch.stack(entry)


def test_programs_and_partitions_change_no_bit(rng: torch.Generator) -> None:
    g = given(rng, [130, 5], H=2, group=2)
    first = Machine("cpu").gradients(g, seed=0, programs=1).gradients
    for seed, programs in ((1, 3), (2, 8)):
        found = Machine("cpu").gradients(g, seed=seed, programs=programs).gradients
        assert all(torch.equal(found[name], first[name]) for name in NAMES)


def test_rows_at_a_pitch(rng: torch.Generator, device: str) -> None:
    dense = given(rng, [70], H=2, group=1).to(device)
    q, k, v, do = torch.cat([dense.x.q, dense.x.k, dense.x.v, dense.do], dim=1).split(2, dim=1)
    packed = Given(dense.x._replace(q=q, k=k, v=v), do, dense.leaving)
    a, b = (Machine(device).gradients(g).gradients for g in (dense, packed))
    assert all(torch.equal(a[name], b[name]) for name in NAMES)


def test_beta_in_bf16(rng: torch.Generator, device: str) -> None:
    g = given(rng, [70])
    narrow = g.x._replace(beta=g.x.beta.bfloat16())
    wide = narrow._replace(beta=narrow.beta.float())
    a, b = (Machine(device).gradients(g._replace(x=x).to(device)).gradients for x in (narrow, wide))
    assert all(torch.equal(a[name], b[name]) for name in NAMES)


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_what_stands_behind_a_fragment_is_not_read(rng: torch.Generator, device: str, name: str) -> None:
    g = given(rng, [70, 10])
    clean = Machine(device).gradients(g.to(device)).gradients
    (g.do if name == "do" else getattr(g.x, name))[70:] = torch.nan
    found = Machine(device).gradients(g.to(device)).gradients
    for of in NAMES:
        assert torch.equal(found[of][:70], clean[of][:70]), of
    assert found["dk"][70:].isnan().all()


@pytest.mark.parametrize("longer", [1.02, 30.0])
def test_a_long_key_is_loud_and_nothing_else_is(rng: torch.Generator, device: str, longer: float) -> None:
    g = given(rng, [140, 5], H=2, group=2, decay="moderate")
    clean = Machine(device).gradients(g.to(device)).gradients
    g.x.k[70, 1] *= longer
    found = Machine(device).gradients(g.to(device)).gradients
    of_head = {"dq": slice(1, 2), "dk": slice(1, 2)}
    for name in NAMES:
        heads, begin = of_head.get(name, slice(2, 4)), 70 if name == "dq" else 64
        assert found[name][begin:128, heads].isnan().all(), name
        found[name][:140, heads] = clean[name][:140, heads]
        assert torch.equal(found[name], clean[name]), name


def test_a_nan_stays_in_its_head(rng: torch.Generator, device: str) -> None:
    g = given(rng, [70], H=2, group=1)
    clean = Machine(device).gradients(g.to(device)).gradients
    g.do[66, 1, 3] = torch.nan
    found = Machine(device).gradients(g.to(device)).gradients
    for name in NAMES:
        assert same_bits(found[name][:, 0], clean[name][:, 0]) and found[name][:, 1].isnan().any(), name


def test_no_chunks(rng: torch.Generator, device: str) -> None:
    g = given(rng, [70]).to(device)
    x, made = g.x, Machine(device).prep(g.x)
    none = torch.empty(0, 2, 128, 128, dtype=torch.bfloat16, device=device)
    run = Machine(device).module("gradients").gradients
    found = run(x.q, x.k, x.v, x.beta, g.do, made, none, none, x.chunks[:0], SCALE, programs=2)
    assert [f.shape for f in found] == [x.q.shape, x.k.shape, x.v.shape, x.g.shape, x.g.shape]


def wait(signal: str, phase: str) -> str:
    return f"mbarrier.wait(signals.index({signal}), {phase})\n"


def arrive(signal: str) -> str:
    return f"mbarrier.arrive(signals.index({signal}), count=1)\n"


FAULTS = {
    "no wait for a unit": (f"            {wait('FULL + stage', 'phase')}", ""),
    "no wait for room for a unit": (f"                {wait('EMPTY + stage', 'phase ^ 1')}", ""),
    "no wait for room for q and k": (f"                {wait('ITEM_LEFT', '(turn & 1) ^ 1')}", ""),
    "no wait for q and k": (f"        {wait('ITEM_FULL', 'turn & 1')}", ""),
    "no wait for P": (f"        {wait('SCORED', 'turn & 1')}", ""),
    "no wait for T and F": (f"            {wait('DECAYED', 'head & 1')}", ""),
    "no wait for room for U": (f"            {wait('USED + panel', '(head & 1) ^ 1')}", ""),
    "no wait for U and dR": (f"                {wait('MADE + panel', 'head & 1')}", ""),
    "no wait for dP": (f"                    {wait('DP_MADE', 'head & 1')}", ""),
    "no wait for the share of Y": (f"            {wait('SUMMED', 'head & 1')}", ""),
    "a unit is left once": (f"                {arrive('EMPTY + stage')}", ""),
    "two stages": ("STAGES = gl.constexpr(3)", "STAGES = gl.constexpr(2)"),
    "bytes of one tile too many": ("2 * CHUNK * PANEL * 2", "3 * CHUNK * PANEL * 2"),
    "R not seen by the product": (
        "            v.store(narrow)\n            fence_async_shared()\n", "            v.store(narrow)\n",
    ),
    "v not cleared in a tail": ("                clear_behind(v, held)\n", ""),
    "dO not cleared in a tail": ("                clear_behind(do, held)\n", ""),
    "q not cleared in a tail": ("            clear_behind(q, held)\n", ""),
    "k not cleared in a tail": ("            clear_behind(k, held)\n", ""),
    "K K^T in F": ("gl.where(lower(before, ACC), p.load(ACC).to(gl.float32), 0.0)", "p.load(ACC).to(gl.float32)"),
    "dP above the diagonal": ("gl.where(lower(square.index(ONES + here), ACC), dP * E, 0.0)", "dP * E"),
    "Y on the diagonal": ("gl.where(strictly_lower(square.index(ONES + here), ACC), -Y * E, 0.0)",
                          "gl.where(lower(square.index(ONES + here), ACC), -Y * E, 0.0)"),
    "M on the diagonal": ("            M = gl.where(strictly_lower(square.index(ONES + here), ACC), M, 0.0)\n", ""),
    "the sign of x2 in dg": ("read - gl.sum(dR", "read + gl.sum(dR"),
    "<D, S> forgotten": ("of_panel + passed", "of_panel"),
    "kappa before its token": ("of_token[:, None], kappa[:, None])", "of_token[:, None], 0.0)"),
    "the scale of F": ("(E * scale)", "E"),
    "G of another head": ("gs.index((head & 1) ^ 1)", "gs.index(head & 1)"),
    "dq of the last head alone": ("            this = first + e * NC\n",
                                  "            this = first + e * NC\n            out = out * 0.0\n"),
    "S of another panel": ("+ panel * PANEL\n                column", "\n                column"),
    "a row behind the tail stored": ("mask=(row < held)[:, None]", "mask=(row <= held)[:, None]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def planted() -> tuple[Given, list[Tensor]]:
    """Of two segments the second is NaN, at which nobody looks, and what the kernel makes of the first."""
    g = given(torch.Generator().manual_seed(5), [64 * 2 + 9, 5], H=2, group=2, decay="none")
    g.x.g[:137] = -0.01
    for x in (g.x.q, g.x.k, g.x.v, g.do):
        x[137:] = torch.nan
    return g, of_the_first(Machine("cpu"), g)


def of_the_first(machine: Machine, g: Given) -> list[Tensor]:
    return [x[:137] for x in machine.gradients(g).gradients.values()]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(planted: tuple[Given, list[Tensor]], fault: str) -> None:
    before, after = FAULTS[fault]
    source = path_of(f"{TIER}.gradients").read_text()
    assert before in source
    g, clean = planted
    try:
        found = of_the_first(Machine("cpu", {"gradients": source.replace(before, after)}), g)
    except DeviceFault:
        return
    assert not all(map(same_bits, found, clean))
