"""Raw operands within the Hopper tier's kernels, on the emulator and on a GPU, against those made ready in FP64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from deltaspan.kernels.stages import Raw
from tests.emulator import DeviceFault, path_of, seeded
from tests.kernels.once import once
from tests.kernels.test_hopper import BF16, SCALE, TIER, Machine, Problem, drawn, relative

EPSILON = 1e-6  # beside |x|^2
HOW = ("l2norm", "gate", "sigmoid")


class RawProblem(NamedTuple):
    """Operands as projections give them; the tests' own formulas make them ready."""

    given: Problem  # q, k, g and beta raw where `raw` says so
    raw: Raw

    def to(self, device: str) -> RawProblem:
        moved = {name: x.to(device) for name, x in self.raw._asdict().items() if isinstance(x, Tensor)}
        return RawProblem(self.given.to(device), self.raw._replace(**moved))

    @property
    def ready(self) -> Problem:
        """In FP64, never rounded."""
        x, raw = self.given, self.raw
        q, k, g, beta = (t.double() for t in (x.q, x.k, x.g, x.beta))
        if raw.l2norm:
            q, k = (t / (t.square().sum(-1, keepdim=True) + EPSILON).sqrt() for t in (q, k))
        if raw.A_log is not None:
            g = -raw.A_log.double().exp() * softplus(g if raw.dt_bias is None else g + raw.dt_bias.double())
        if raw.sigmoid:
            beta = raw.largest_beta / (1 + (-beta).exp())
        return x._replace(q=q, k=k, g=g, beta=beta)

    def truth(self) -> tuple[Tensor, Tensor, Tensor]:
        """o, exit states and maps of segments by themselves."""
        ready = self.ready
        unit = torch.eye(128).expand_as(ready.entry)
        return *ready.truth(), ready.truth(v=torch.zeros_like(ready.v), entry=unit)[1]


def raw_drawn(
    rng: torch.Generator, lengths: list[int], segments: int = 1, *, H: int = 1, group: int = 1, largest: float = 1.0,
    gates: torch.dtype = torch.float32, how: Sequence[str] = HOW,
) -> RawProblem:  # fmt: skip
    """Rows of q and k from 1e-3 to 1e4 long, and some of zeros; decays from closed to open."""
    x = drawn(rng, lengths, segments, H=H, group=group)
    T, HV = x.g.shape
    raw = Raw()
    if "l2norm" in how:
        q, k = ((t * 10 ** (7 * torch.rand(T, H, 1, generator=rng) - 3)).bfloat16() for t in (x.q, x.k))
        q[5], k[7] = 0.0, 0.0
        x, raw = x._replace(q=q, k=k), raw._replace(l2norm=True)
    if "gate" in how:
        x = x._replace(g=(2 * torch.randn(T, HV, generator=rng) - 3).to(gates))
        apart = torch.arange(HV) + 0.5 * torch.rand(HV, generator=rng)
        raw = raw._replace(A_log=apart - 1, dt_bias=1 - 0.5 * apart)
    if "sigmoid" in how:
        x = x._replace(beta=(2 * torch.randn(T, HV, generator=rng)).to(gates))
        raw = raw._replace(sigmoid=True, largest_beta=largest)
    return RawProblem(x, raw)


class RawMachine(Machine):
    def prep(self, x: RawProblem):
        given, operands = x.given, (x.given.k, x.given.g, x.given.beta, x.given.chunks)

        def make():
            with seeded(1):
                return self.module("prep").prep(*operands, q=given.q, raw=x.raw)

        return make() if self.device == "cuda" else once(make, self.edited.get("prep"), given.q, *operands, *x.raw)

    def forward(self, x: RawProblem, seed: int = 0, **options):
        made, given = self.prep(x), x.given
        with seeded(seed):
            return self.module("forward").forward(
                given.q, given.k, given.v, made, given.entry, given.segments, SCALE, **options
            )[:2]

    def transfer(self, x: RawProblem):
        return self.module("transfer").transfer(x.given.k, self.prep(x), x.given.segments)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> RawMachine:
    return RawMachine(request.param)


@pytest.mark.parametrize(
    ("H", "group", "lengths", "segments", "largest", "gates"),
    [
        (1, 1, [100, 1, 64, 70], 2, 1.0, torch.float32),
        (2, 1, [90], 1, 2.0, torch.bfloat16),
        (1, 3, [64, 9], 1, 2.0, torch.float32),
    ],
)
def test_everything_raw(
    rng: torch.Generator, machine: RawMachine, H: int, group: int, lengths: list[int], segments: int, largest: float,
    gates: torch.dtype,
) -> None:  # fmt: skip
    """Outputs, exit states with them and alone, and maps, to the roundings of ready operands; every row by itself."""
    x = raw_drawn(rng, lengths, segments, H=H, group=group, largest=largest, gates=gates)
    o, exits, maps = x.truth()
    x = x.to(machine.device)
    found, exit = machine.forward(x, seed=3)
    assert relative(found, o) < BF16 and relative(exit, exits) < BF16
    assert all(map(torch.equal, machine.forward(x, whole=1), (found, exit)))
    assert relative(machine.forward(x, output=False)[1], exits) < BF16
    assert relative(machine.transfer(x), maps) < BF16
    error, size = ((t.double().square().sum(-1)).sqrt() for t in (found.cpu().double() - o, o))
    assert (error <= 5 * BF16 * size.square().mean().sqrt()).all()  # one row in thousands: many times the average
    assert not found[5].any()  # a query of zeros reads nothing
    assert (machine.prep(x).broken == 64).all()  # long and short keys are unit keys all


@pytest.mark.parametrize("how", HOW)
def test_one_operand_raw_at_a_time(rng: torch.Generator, machine: RawMachine, how: str) -> None:
    x = raw_drawn(rng, [80], how=[how])
    o, exits, maps = x.truth()
    found, exit = machine.forward(x.to(machine.device))
    assert relative(found, o) < BF16 and relative(exit, exits) < BF16
    assert relative(machine.transfer(x.to(machine.device)), maps) < BF16


@pytest.mark.parametrize(("bias", "kind"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_gates(rng: torch.Generator, machine: RawMachine, bias: bool, kind: torch.dtype) -> None:
    """Each by itself, in documents of one token, so that tiny ones are not lost in sums.

    The exponent A_log + x is rounded to 24 bits three times, the exponential, two quotients and what is multiplied to
    two units of the last place each.
    """
    T, HV = 45 if machine.device == "cuda" else 20, 2  # the emulator inverts a whole chunk for each
    x = raw_drawn(rng, [1] * T, H=1, group=HV, how=["gate"])
    g = (120 * torch.rand(T, HV, generator=rng) - 60).to(kind)
    A_log, dt_bias = 6 * torch.rand(HV, generator=rng) - 3, 4 * torch.rand(HV, generator=rng) - 2
    g[-5:] = torch.tensor([-torch.inf, -1000.0, 1e4, torch.inf, torch.nan])[:, None]
    x = RawProblem(x.given._replace(g=g), x.raw._replace(A_log=A_log, dt_bias=dt_bias if bias else None))
    found = machine.prep(x.to(machine.device)).G[..., 0].mT.cpu().double() * math.log(2)
    exact = x.ready.g.clamp(min=-110)
    exponent = (A_log.double() + (g.double() + (dt_bias if bias else 0)).clamp(max=0)).abs()
    bound = (16 + 3 * exponent) * 2**-24 * exact.abs()
    if bias:
        bound += (g.double().abs() + 2) * 2**-24 * exact.abs()  # x itself is a sum
    assert ((found - exact).abs() <= bound)[:-5].all()
    assert not found[-5:-3].any() and ((found[-3:-1] + 110).abs() < 1e-4).all() and found[-1].isnan().all()


@pytest.mark.parametrize("largest", [1.0, 2.0])
def test_sigmoids(rng: torch.Generator, machine: RawMachine, largest: float) -> None:
    """A of documents of one token is beta, but no less than 2^-27, to 2^-8 of bf16 and fp16 halves' steps of 2^-37."""
    T = 30 if machine.device == "cuda" else 16
    x = raw_drawn(rng, [1] * T, group=2, largest=largest, how=["sigmoid"])
    beta = 120 * torch.rand(T, 2, generator=rng) - 60
    beta[: T // 2] /= 10
    beta[-3:] = torch.tensor([-torch.inf, torch.inf, torch.nan])[:, None]
    x = x._replace(given=x.given._replace(beta=beta))
    found = machine.prep(x.to(machine.device)).A[:, :, 0, 0].mT.cpu().double()
    exact = x.ready.beta
    exact = exact.clamp(min=2**-27)
    assert ((found - exact).abs() <= 2**-37 + (2**-8 + 2**-16) * exact)[:-1].all() and found[-1].isnan().all()
    assert found[-3:-1].tolist() == [[2**-27] * 2, [largest, largest]]


def test_lengths_and_rows_of_A(rng: torch.Generator, machine: RawMachine) -> None:
    """Inverse lengths to fp32: eight sums cut to 24 bits, and a root to two units of the last place. And A over them to
    its rounding to bf16, as of ready keys: 1.7e-3 in squares."""
    x = raw_drawn(rng, [100, 3], H=2, group=2)
    made, ready = machine.prep(x.to(machine.device)), x.ready
    found_A, exact_A = [], []
    for c, (start, n) in enumerate(x.given.chunks.tolist()):
        for which, t in enumerate((x.given.q, x.given.k)):
            exact = (t[start : start + n].double().square().sum(-1) + EPSILON).rsqrt().mT
            found = made.lengths[:, c, which, :n].cpu().double()
            torch.testing.assert_close(found, exact, rtol=2e-6, atol=0)
        k = ready.k[start : start + n].transpose(0, 1).repeat_interleave(2, 0)
        beta = ready.beta[start : start + n].mT
        system = torch.eye(n).double() + (beta[..., None] * (k @ k.mT)).tril(-1)
        exact_A.append((torch.linalg.inv(system) * beta[:, None]).flatten())
        found_A.append((made.A[:, c, :n, :n].cpu().double() / found.repeat_interleave(2, 0)[..., None]).flatten())
    assert relative(torch.cat(found_A), torch.cat(exact_A)) <= 2e-3


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_what_stands_behind_a_fragment_is_not_read(rng: torch.Generator, machine: RawMachine, name: str) -> None:
    x = raw_drawn(rng, [70, 30])
    spoilt = x._replace(given=x.given._replace(**{name: getattr(x.given, name).clone()}))
    getattr(spoilt.given, name)[70:] = torch.nan
    (o, exit), (found, state) = (machine.forward(y.to(machine.device)) for y in (x, spoilt))
    assert torch.equal(found[:70], o[:70]) and torch.equal(state[0], exit[0])
    assert found[70:].isnan().all()
    M, maps = (machine.transfer(y.to(machine.device)) for y in (spoilt, x))
    assert torch.equal(M[0], maps[0]) and M[1].isnan().any() == (name not in "qv")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
def test_a_key_that_cannot_be_normalised_is_loud(rng: torch.Generator, machine: RawMachine, value: float) -> None:
    """From its row on, and in no other document or head, nor in a chunk before."""
    x = raw_drawn(rng, [80, 9], H=2)
    (o, exit), maps = machine.forward(x.to(machine.device)), machine.transfer(x.to(machine.device))
    x.given.k[70, 1, 3] = value
    assert machine.prep(x.to(machine.device)).broken.tolist() == [[64, 64, 64], [64, 6, 64]]
    (found, state), found_maps = machine.forward(x.to(machine.device)), machine.transfer(x.to(machine.device))
    assert found[70:80, 1].isnan().all() and state[0, 1].isnan().all() and found_maps[0, 1].isnan().all()
    found[64:80, 1], state[0, 1], found_maps[0, 1] = o[64:80, 1], exit[0, 1], maps[0, 1]
    assert torch.equal(found, o) and torch.equal(state, exit) and torch.equal(found_maps, maps)


FAULTS = {
    "lengths of keys missing where they are read": (
        "forward", "written * gl.load(inverse + i * (2 * CHUNK) + CHUNK + token)", "written"
    ),
    "lengths of queries taken for those of keys": (
        "forward", "gl.load(inverse + i * (2 * CHUNK) + CHUNK + token)", "gl.load(inverse + i * (2 * CHUNK) + token)"
    ),
    "lengths of queries missing in W": (
        "forward", "E = E * gl.load(inverse + i * (2 * CHUNK) + row)[:, None]", "E = E + 0.0"
    ),
    "lengths of queries missing in what is read": (
        "forward", "kept * gl.load(inverse + i * (2 * CHUNK) + token)", "kept"
    ),
    "lengths of another chunk": ("forward", "gl.load(inverse + i * (2 * CHUNK) + row)", "gl.load(inverse + row)"),
    "decay of the state times a length": (
        "forward", "if EARLY:\n            S = S * decay_of(keeps", "if EARLY:\n            S = S * decay_of(reads"
    ),
    "rows of A as they were": (
        "prep", "return (x * scale).to(", "return (x * SCALE).to("
    ),
    "one side of K K^T as it was": (
        "prep", "return n_ij * inverse.index(j).load(gl.SliceLayout(0, MMA))[None, :]", "return n_ij"
    ),
    "no bias": ("prep", "        if BIAS:\n", "        if False:\n"),
    "decay of another head": ("prep", "gl.load(A_log + h * GROUP + e)", "gl.load(A_log + h * GROUP)"),
    "sigmoid of half the size": ("prep", "sigmoid(strength, SIGMOID)", "sigmoid(strength, 1.0)"),
    "lengths of keys missing in maps": (
        "transfer", "unit = unit * inverse[:, None]", "unit = unit + 0.0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(rng: torch.Generator, fault: str) -> None:
    name, before, after = FAULTS[fault]
    source = path_of(f"{TIER}.{name}").read_text()
    assert source.count(before) == 1
    machine = RawMachine("cpu", {name: source.replace(before, after)})
    x = raw_drawn(rng, [90], group=2 if "head" in fault else 1, largest=2.0)
    o, exits, maps = x.truth()
    try:
        if name == "transfer":
            pairs = [(machine.transfer(x), maps)]
        else:
            pairs = [*zip(machine.forward(x), (o, exits), strict=True)]
    except DeviceFault:
        return
    assert not all(relative(*pair) < 2 * BF16 for pair in pairs)


def test_a_launch_tells_apart_what_triton_does() -> None:
    """An argument that may be None among them."""
    gluon = RawMachine("cpu").module("gluon")
    kernel = gluon.gluon.jit(lambda value, y: None)
    x = torch.zeros(20)
    given = [None, 0.5, 1, 5, 16, 2**40 + 1, x, x[1:], x.bfloat16()]
    for value in [*given, 0.25, 7, 32, x.clone()]:
        gluon.launch(kernel, (0,), value, x, num_warps=1)
    assert len(gluon._READY) == len(given)
