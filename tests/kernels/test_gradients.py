"""The Hopper tier's gradients of every chunk on the emulator, and on a GPU, against FP64; and the states they start
from."""

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
# Of a chunk S, D, A, T, F, R, U, dU, dR, dP and Y are rounded to bf16, and rows scaled on their way into dq and dk.
# Each gradient sees five to eight of these roundings, 1.7e-3 of RMS each, which add up in squares.
BF16 = 6e-3


class Machine(test_adjoint.Machine):
    def states(self, g: Given, **options) -> Tensor:
        x, made = g.x, self.prep(g.x)
        run = self.module("forward").forward
        with seeded(2):
            return run(x.q, x.k, x.v, made, x.entry, x.segments, SCALE, output=False, states=True, **options)[2]

    def walked(self, g: Given) -> tuple:
        """What the kernel takes."""
        return (
            g.x.q,
            g.x.k,
            g.x.v,
            g.x.beta,
            g.do,
            self.prep(g.x),
            self.states(g),
            self.adjoint(g)[1],
            g.x.chunks,
            SCALE,
        )

    def gradients(self, g: Given, seed: int = 0, programs: int = 2) -> dict[str, Tensor]:
        return self.of(self.walked(g), seed, programs)

    def of(self, walked: tuple, seed: int = 0, programs: int = 2, beside: int = 0) -> dict[str, Tensor]:
        """beside: so many key heads of others stand beside the gradients in memory."""
        run = self.module("gradients").gradients
        q, k, v, beta = walked[:4]
        wide = [torch.full_like(x, float("nan")).repeat_interleave(1 + beside, 1) for x in (q, k, v, beta, beta)]
        wide[3:] = (x.float() for x in wide[3:])
        found = [x[:, : like.shape[1]] for x, like in zip(wide, (q, k, v, beta, beta), strict=True)]
        beta = beta.repeat_interleave(1 + beside, 1)[:, : beta.shape[1]].copy_(beta)
        with seeded(seed):
            run(*walked[:3], beta, *walked[4:], found, programs=programs)
        for x, own in zip(wide, found, strict=True):
            assert x[:, own.shape[1] :].isnan().all(), "heads of others were written to"
        return dict(zip(NAMES, found, strict=True))


def truth(g: Given) -> dict[str, Tensor]:
    """By autograd of the recurrence in FP64, token by token, from every segment's entry state."""
    x = g.x
    leaves = [t.cpu().double().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.beta)]
    ends = [0, *(end for _, end in x.runs)]
    o, last = recurrent_gated_delta_rule(*leaves, ends, scale=SCALE, initial_state=x.entry.cpu().double())
    ((o * g.do.cpu()).sum() + (last * g.leaving.cpu()).sum()).backward()
    return {name: leaf.grad for name, leaf in zip(NAMES, leaves, strict=True)}


def sizes(g: Given, walked: tuple, true: dict[str, Tensor]) -> dict[str, Tensor]:
    """Beside what errors are judged: gradients themselves, and of sums that may nearly cancel their terms, too.

    dg: <D, S> of unrelated matrices is |D| |S| / 128, give or take, and as much of it is lost as S and D lose, for all
        tokens of a head alike: an RMS over two heads is one of two numbers, so twice that. Of 50 draws the error of dg
        was a fifth to a half of the bound, beside that once its whole.
    dbeta: the inner product of dv / beta with the token's own error, which is about as long as v.
    """
    S, D = (x.double().cpu().norm(dim=(-2, -1)) for x in walked[6:8])
    beta = g.x.beta.cpu().double()[..., None]
    written = torch.where(beta == 0, 0, true["dv"] / beta)  # nothing is known where nothing is written
    terms = (written * g.x.v.cpu().double()).square().sum(-1).sqrt()
    return true | {
        "dg": true["dg"].abs() + 2 * (S * D / 128).square().mean().sqrt(),
        "dbeta": torch.hypot(true["dbeta"], terms),
    }


def rms(x: Tensor, *axes: int) -> Tensor:
    return x.double().square().mean(axes or None).sqrt()


def found_and_true(g: Given, device: str, **options) -> None:
    """All of each gradient; and each token's, beside what all have, so that no tail is lost among many tokens."""
    machine, true = Machine(device), truth(g)
    walked = machine.walked(g.to(device))
    found = machine.of(walked, **options)
    for name, size in sizes(g, walked, true).items():
        error = found[name].cpu().double() - true[name]
        assert rms(error) < BF16 * rms(size), name
        by_token = rms(error.flatten(1), 1) / (rms(size.flatten(1), 1) + rms(size))
        assert by_token.max() < 4 * BF16, (name, int(by_token.argmax()))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("decay", ["moderate", "slow", "strong", "none"])
def test_gradients(rng: torch.Generator, device: str, decay: str) -> None:
    found_and_true(given(rng, [100, 1, 64], 2, decay), device, seed=3)


@pytest.mark.parametrize(("H", "group"), [(2, 1), (1, 3), (1, 4)])
def test_any_heads(rng: torch.Generator, device: str, H: int, group: int) -> None:
    found_and_true(given(rng, [66, 3], H=H, group=group, decay="slow"), device)


def test_every_head_of_strong_decay(rng: torch.Generator, device: str) -> None:
    """dg of a head that decays by e^-10 a token is 1e-5 of another's: by itself it is nearly as right, of few terms,
    since nothing large cancels in it."""
    g = given(rng, [90], group=2)
    g.x.g[:, 0] = -10 - torch.rand(90, generator=rng)
    found, true = Machine(device).gradients(g.to(device)), truth(g)
    assert true["dg"][:, 0].norm() < 1e-3 * true["dg"][:, 1].norm()
    assert relative(found["dg"][:, 0], true["dg"][:, 0]) < 4 * BF16


def test_decay_that_cuts_off(rng: torch.Generator, device: str) -> None:
    g = given(rng, [80], group=2)
    g.x.g[[3, 64, 70]] = -torch.inf
    g.x.g[40, 1] = -500.0
    found = Machine(device).gradients(g.to(device))
    assert not found["dg"][[3, 64, 70]].any() and not found["dg"][40, 1]
    finite = g._replace(x=g.x._replace(g=g.x.g.clamp(min=-1000)))
    true = truth(finite)
    for name, size in sizes(g, Machine(device).walked(g.to(device)), true).items():
        assert rms(found[name].cpu() - true[name]) < BF16 * rms(size), name


@pytest.mark.parametrize("strength", [0.0, 1e-7, 2.0])
def test_writes_of_any_strength(rng: torch.Generator, device: str, strength: float) -> None:
    """Also a token that writes nothing learns what writing would have done."""
    g = given(rng, [80], H=1, group=2, decay="slow")
    quiet = torch.rand(80, 2, generator=rng) < 0.3
    g.x.beta[quiet] = strength
    g.x.beta[~quiet] = 0.9 + 0.1 * torch.rand(int((~quiet).sum()), generator=rng)
    found_and_true(g, device)
    true = truth(g)
    size = sizes(g, Machine(device).walked(g.to(device)), true)["dbeta"]
    size[quiet] = torch.hypot(true["dbeta"][quiet], rms(size[~quiet]))  # what a token writes does not change its terms
    error = Machine(device).gradients(g.to(device))["dbeta"].cpu() - true["dbeta"]
    for tokens in (quiet, ~quiet):
        assert rms(error[tokens]) < BF16 * rms(size[tokens])


def test_states_of_every_chunk(rng: torch.Generator, device: str) -> None:
    """What walks of single chunks hand on, in bf16; with the exit states of the walk with output."""
    g, machine = given(rng, [130, 1], group=1, decay="slow").to(device), Machine(device)
    x, made, run = g.x, machine.prep(g.x), machine.module("forward").forward
    operands = x.q, x.k, x.v, made
    none, exits, states = run(*operands, x.entry, x.segments, SCALE, output=False, states=True)
    assert none is None and torch.equal(exits, machine.forward(x)[1])
    both = run(*operands, x.entry, x.segments, SCALE, output=False, states=True, exits=False, whole=0)
    assert both[1] is None and torch.equal(both[2], states)
    state = x.entry[:1]
    for c, (begin, tokens) in enumerate(x.chunks[:3].tolist()):
        assert torch.equal(states[c], state[0].mT.bfloat16())
        alone = torch.tensor([[begin, begin + tokens, c, 0, 0]], dtype=torch.int32, device=device)
        state = run(*operands, state, alone, SCALE)[1]
    assert torch.equal(state, exits[:1]) and torch.equal(states[3], x.entry[1].mT.bfloat16())


def test_programs_and_partitions_change_no_bit(rng: torch.Generator) -> None:
    machine = Machine("cpu")
    walked = machine.walked(given(rng, [66, 5], H=2, group=2))
    first = machine.of(walked, seed=0, programs=1)
    for seed, programs in ((1, 3), (2, 8)):
        found = machine.of(walked, seed, programs)
        assert all(torch.equal(found[name], first[name]) for name in NAMES)


@pytest.mark.gpu
def test_the_same_bits_three_thousand_times(rng: torch.Generator) -> None:
    """Some eight items for every multiprocessor, which share all memory and none of each other's pace, one launch right
    behind the other: a load that the copy engine overtakes is seen in one launch of hundreds."""
    g, machine, launches = given(rng, [31_872], 3, "slow", H=2, group=3).to("cuda"), Machine("cuda"), 3000
    walked, run = machine.walked(g), machine.module("gradients").gradients
    first = machine.of(walked, programs=132)
    found = {name: torch.empty_like(x) for name, x in first.items()}
    differing = torch.zeros(launches, len(NAMES), dtype=torch.int64, device="cuda")
    for i in range(launches):
        for x in found.values():
            x.fill_(torch.nan)
        run(*walked, list(found.values()), programs=132)
        differing[i] = torch.stack([(found[name] != first[name]).sum() for name in NAMES])
    wrong = differing.any(1).nonzero()[:, 0].tolist()
    assert not wrong, [(i, dict(zip(NAMES, differing[i].tolist(), strict=True))) for i in wrong[:5]]


def test_rows_at_a_pitch(rng: torch.Generator, device: str) -> None:
    dense = given(rng, [40], H=2, group=1).to(device)
    q, k, v, do = torch.cat([dense.x.q, dense.x.k, dense.x.v, dense.do], dim=1).split(2, dim=1)
    packed = Given(dense.x._replace(q=q, k=k, v=v), do, dense.leaving)
    a, b = (Machine(device).gradients(g) for g in (dense, packed))
    assert all(torch.equal(a[name], b[name]) for name in NAMES)


def test_beta_in_bf16(rng: torch.Generator, device: str) -> None:
    g = given(rng, [20])
    narrow = g.x._replace(beta=g.x.beta.bfloat16())
    wide = narrow._replace(beta=narrow.beta.float())
    a, b = (Machine(device).gradients(g._replace(x=x).to(device)) for x in (narrow, wide))
    assert all(torch.equal(a[name], b[name]) for name in NAMES)


def test_what_stands_behind_a_fragment_is_not_read(rng: torch.Generator, device: str) -> None:
    g = given(rng, [66, 3], group=1)
    clean = Machine(device).gradients(g.to(device))
    for x in (g.x.q, g.x.k, g.x.v, g.do):
        x[66:] = torch.nan
    found = Machine(device).gradients(g.to(device))
    for of in NAMES:
        assert torch.equal(found[of][:66], clean[of][:66]), of
    assert found["dk"][66:].isnan().all()


@pytest.mark.parametrize("longer", [1.02, 1e5])
def test_a_long_key_is_loud_and_nothing_else_is(rng: torch.Generator, device: str, longer: float) -> None:
    g = given(rng, [100], H=2, group=1)
    clean = Machine(device).gradients(g.to(device))
    g.x.k[70, 1] *= longer
    found = Machine(device).gradients(g.to(device))
    for name in NAMES:
        assert found[name][70 if name == "dq" else 64 : 100, 1].isnan().all(), name
        assert found[name][64:70, 1].isfinite().all() or name != "dq"
        found[name][:100, 1] = clean[name][:100, 1]
        assert torch.equal(found[name], clean[name]), name


def test_a_nan_stays_in_its_head(rng: torch.Generator, device: str) -> None:
    g = given(rng, [30], H=2, group=1)
    clean = Machine(device).gradients(g.to(device))
    g.do[26, 1, 3] = torch.nan
    found = Machine(device).gradients(g.to(device))
    for name in NAMES:
        assert same_bits(found[name][:, 0], clean[name][:, 0]) and found[name][:, 1].isnan().any(), name


def test_no_chunks(rng: torch.Generator, device: str) -> None:
    g = given(rng, [70]).to(device)
    x, made = g.x, Machine(device).prep(g.x)
    none = torch.empty(0, 2, 128, 128, dtype=torch.bfloat16, device=device)
    run = Machine(device).module("gradients").gradients
    found = [torch.full_like(t, 3.0) for t in (x.q, x.k, x.v, x.beta, x.beta)]
    run(x.q, x.k, x.v, x.beta, g.do, made, none, none, x.chunks[:0], SCALE, found, programs=2)
    assert [f.shape for f in found] == [x.q.shape, x.k.shape, x.v.shape, x.g.shape, x.g.shape]


def wait(signal: str, phase: str) -> str:
    return f"mbarrier.wait(signals.index({signal}), {phase})\n"


def arrive(signal: str) -> str:
    return f"mbarrier.arrive(signals.index({signal}), count=1)\n"


FAULTS = {
    "no wait for a unit": (f"            {wait('FULL + stage', 'phase')}            if held", "            if held"),
    "no wait for room for a unit": (f"                {wait('EMPTY + stage', 'phase ^ 1')}", ""),
    "no wait for room for q and k": (f"                {wait('ITEM_LEFT', '(turn & 1) ^ 1')}", ""),
    "no wait for q and k": (f"        {wait('ITEM_FULL', 'turn & 1')}", ""),
    "no wait for what is cleared": (f"            {wait('SCORED', 'turn & 1')}", "            pass\n"),
    "no wait for T and F": (f"            {wait('DECAYED', 'head & 1')}", ""),
    "no wait for room for U": (f"            {wait('USED + panel', '(head & 1) ^ 1')}", ""),
    "no wait for U and dR": (f"                {wait('MADE + panel', 'head & 1')}", ""),
    "no wait for dP": (f"                    {wait('DP_MADE', 'head & 1')}", ""),
    "no wait for Y": (f"                    {wait('Y_MADE', 'head & 1')}", ""),
    "a unit is left once": (f"                {arrive('EMPTY + stage')}                stage", "                stage"),
    "the last unit is left before dk": ("if e + panel < GROUP:", "if e + panel <= GROUP:"),
    "bytes of one tile too many": ("2 * CHUNK * PANEL * 2", "3 * CHUNK * PANEL * 2"),
    "R not seen by the product": (
        "            v.store(narrow)\n            fence_async_shared()\n", "            v.store(narrow)\n",
    ),
    "v not cleared in a tail": ("                clear_behind(v, held)\n", ""),
    "dO not cleared in a tail": ("                clear_behind(do, held)\n", ""),
    "q not cleared in a tail": ("            clear_behind(q, held)\n", ""),
    "k not cleared in a tail": ("            clear_behind(k, held)\n", ""),
    "K K^T in F": ("gl.where(kept, decay_ratios(G, HALF, HALF_NUMBER * 32, 32), 0.0)",
                   "decay_ratios(G, HALF, HALF_NUMBER * 32, 32)"),
    "dP above the diagonal": ("gl.where(lower(square.index(ONES + here), ACC), dP * E, 0.0)", "dP * E"),
    "Y on the diagonal": ("gl.where(strictly_lower(square.index(ONES + here), ACC), -Y * E, 0.0)",
                          "gl.where(lower(square.index(ONES + here), ACC), -Y * E, 0.0)"),
    "the sign of x2 in dg": ("read - gl.sum(dR", "read + gl.sum(dR"),
    "<D, S> forgotten": ("passed = rows.index(ERROR)", "passed = 0.0 * rows.index(ERROR)"),
    "<D, S> without its decay": ("(passed * exp2(end.load(gl.SliceLayout(1, TILE))))", "(passed)"),
    "kappa before its token": ("of_token[:, None], kappa[:, None])", "of_token[:, None], 0.0)"),
    "the scale of P": ("P, KK) * scale", "P, KK)"),
    "the scale of dP": ("more=exponent", "more=0.0"),
    "the scale of dg": ("total * unscaled", "total"),
    "the scale of dbeta": (", 1) * unscaled", ", 1)"),
    "G of another head": ("ahead = rows.index(gl.where(third == 2, 0, third + 1))", "ahead = rows.index(third)"),
    "dq of the last head alone": ("at = first + gl.minimum", "out = out * 0.0\n            at = first + gl.minimum"),
    "S of another panel": ("+ panel * PANEL\n                column", "\n                column"),
    "rows behind the tail stored": ("column, x.load(LAYOUT), held", "column, x.load(LAYOUT), held + 6"),
    "a tail stored whole": ("    if held == CHUNK:\n        store_tile", "    if held > 0:\n        store_tile"),
    "Y in dR's place before it has gone out": ("                    store_wait(0)\n                    barrier()",
                                               "                    barrier()"),
    "v in dR's place before it has gone out": ("                    store_wait(0)\n                barrier()",
                                               "                    pass\n                barrier()"),
}  # fmt: skip


@pytest.fixture(scope="module")
def planted() -> tuple[tuple, list[Tensor]]:
    """What the kernel takes, with NaN behind the last token, and what it makes of it."""
    g = given(torch.Generator().manual_seed(5), [64 + 9], group=2, decay="none")
    g.x.g[:] = -0.01
    behind = lambda x: torch.cat([x, torch.full_like(x[:5], torch.nan)])  # noqa: E731
    x = g.x._replace(**{name: behind(getattr(g.x, name)) for name in ("q", "k", "v", "g", "beta")})
    walked = Machine("cpu").walked(g._replace(x=x, do=behind(g.do)))
    return walked, of_all_rows(Machine("cpu"), walked)


def of_all_rows(machine: Machine, walked: tuple) -> list[Tensor]:
    """Those behind the last token too, which nobody writes."""
    return list(machine.of(walked, programs=1).values())


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(planted: tuple[tuple, list[Tensor]], fault: str) -> None:
    before, after = FAULTS[fault]
    sources = {name: path_of(f"{TIER}.{name}").read_text() for name in ("gradients", "chunk")}
    edited = {name: source.replace(before, after) for name, source in sources.items()}
    assert edited != sources
    walked, clean = planted
    try:
        found = of_all_rows(Machine("cpu", edited), walked)
    except DeviceFault:
        return
    assert not all(map(same_bits, found, clean))
