"""The Hopper tier's walks and maps on the emulator, and on a GPU, against FP64 chunk by chunk."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

import deltaspan as ds
from deltaspan.plan import chunk_grid, segment_table
from deltaspan.reference import chunked_gated_delta_rule
from tests.emulator import DeviceFault, load, path_of, seeded
from tests.helpers import filled, same_bits
from tests.kernels.once import once

TIER = "deltaspan.kernels.hopper"
SCALE = 128**-0.5
# One bf16 rounding of the state, of what is written and of A a chunk: 2^-9 each, and their sum in squares.
BF16 = 6e-3


class Problem(NamedTuple):
    q: Tensor  # [T, H, 128] bf16
    k: Tensor
    v: Tensor  # [T, HV, 128] bf16
    g: Tensor  # [T, HV]
    beta: Tensor
    entry: Tensor  # [S, HV, 128, 128], a state a segment
    chunks: Tensor  # [NC, 2] int32
    segments: Tensor  # [S, 5] int32
    runs: list[tuple[int, int]]  # first token and end of each segment

    def to(self, device: str) -> "Problem":
        return Problem(*(x.to(device) if isinstance(x, Tensor) else x for x in self))

    def truth(self, v: Tensor | None = None, entry: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """o and exit states of segments by themselves, in FP64."""
        ends = [0, *(end for _, end in self.runs)]
        given = (x[None].double() for x in (self.q, self.k, self.v if v is None else v, self.g, self.beta))
        states = (self.entry if entry is None else entry).double()
        o, exit = chunked_gated_delta_rule(*given, ends, initial_state=states)
        return o[0], exit


def drawn(
    rng: torch.Generator, lengths: list[int], segments: int = 1, decay: str = "moderate", H: int = 1, group: int = 2
) -> Problem:
    T, HV = sum(lengths), H * group
    part = ds.partition([sum(lengths[:i]) for i in range(len(lengths) + 1)], 1)
    grid, table = chunk_grid(part, 0), segment_table(part, 0, segments)
    draw = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    g = -(1 + 15 * torch.rand(HV, generator=rng)) * softplus(draw(T, HV) - 4)
    g = {"moderate": g, "slow": -1e-4 * torch.rand(T, HV, generator=rng), "strong": 20 * g, "none": 0 * g}[decay]
    last = table.first + table.count - 1
    runs = list(zip(grid.start[table.first].tolist(), (grid.start[last] + grid.length[last]).tolist(), strict=True))
    rows = [(*run, first, i, i) for i, (run, first) in enumerate(zip(runs, table.first.tolist(), strict=True))]
    return Problem(
        normalize(draw(T, H, 128), dim=-1).bfloat16(), normalize(draw(T, H, 128), dim=-1).bfloat16(),
        draw(T, HV, 128).bfloat16(), g, torch.rand(T, HV, generator=rng), draw(len(runs), HV, 128, 128),
        torch.tensor(list(zip(grid.start, grid.length, strict=True)), dtype=torch.int32),
        torch.tensor(rows, dtype=torch.int32), runs,
    )  # fmt: skip


def relative(found: Tensor, truth: Tensor) -> float:
    return ((found.cpu().double() - truth).norm() / truth.norm()).item()


class Machine:
    """The kernels' own launches, on the emulator by a seed or on the GPU."""

    def __init__(self, device: str, edited: dict[str, str] | None = None) -> None:
        self.device, self.edited = device, edited or {}

    def module(self, name: str):
        if self.device == "cuda":
            return __import__(f"{TIER}.{name}", fromlist=["x"])
        return load(f"{TIER}.{name}", self.edited.get(name), self.edited)

    def prep(self, x: Problem, **options):
        operands = x.k, x.g, x.beta, x.chunks

        def make():
            with seeded(1):
                return self.module("prep").prep(*operands, **options)

        return make() if options or self.device == "cuda" else once(make, self.edited.get("prep"), *operands)

    def forward(self, x: Problem, seed: int = 0, made=None, **options):
        made = self.prep(x) if made is None else made
        with seeded(seed):
            return self.module("forward").forward(x.q, x.k, x.v, made, x.entry, x.segments, SCALE, **options)[:2]

    def transfer(self, x: Problem, seed: int = 0, made=None, **options):
        made = self.prep(x) if made is None else made
        with seeded(seed):
            return self.module("transfer").transfer(x.k, made, x.segments, **options)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(request.param)


@pytest.mark.parametrize("decay", ["moderate", "slow", "strong", "none"])
def test_walk_and_output(rng: torch.Generator, machine: Machine, decay: str) -> None:
    x = drawn(rng, [100, 1, 64, 150], 2, decay)
    truth, exits = x.truth()
    o, exit = machine.forward(x.to(machine.device), seed=3)
    assert relative(o, truth) < BF16 and relative(exit, exits) < BF16
    for begin, end in x.runs:
        assert relative(o[begin:end], truth[begin:end]) < 2 * BF16, (begin, end)


def test_running_sums_in_the_place_of_the_output(rng: torch.Generator, machine: Machine) -> None:
    """They are read by all walks, and overwritten by the last one, with the same bits."""
    x = drawn(rng, [100, 1, 70], 2, H=2, group=2).to(machine.device)
    o = torch.full_like(x.v, torch.nan)
    made = machine.prep(x, o=o)
    assert made.o is o and made.G.data_ptr() == o.data_ptr()
    for stage, options in ((machine.transfer, {}), (machine.forward, {"output": False}), (machine.forward, {})):
        found, expected = stage(x, made=made, **options), stage(x, **options)
        pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
        assert all(torch.equal(a, b) for a, b in pairs if a is not None)
    assert found[0] is o


@pytest.mark.parametrize(("H", "group"), [(1, 1), (2, 3), (1, 4)])
def test_any_heads(rng: torch.Generator, machine: Machine, H: int, group: int) -> None:
    x = drawn(rng, [70, 20], H=H, group=group)
    truth, exits = x.truth()
    o, exit = machine.forward(x.to(machine.device))
    assert relative(o, truth) < BF16 and relative(exit, exits) < BF16


def test_beta_in_bf16(rng: torch.Generator, machine: Machine) -> None:
    x = drawn(rng, [70])
    narrow = x._replace(beta=x.beta.bfloat16())
    wide = x._replace(beta=narrow.beta.float())
    for a, b in zip(machine.forward(narrow.to(machine.device)), machine.forward(wide.to(machine.device)), strict=True):
        assert torch.equal(a, b)


def test_the_order_of_partitions_changes_no_bit(rng: torch.Generator) -> None:
    x = drawn(rng, [200])
    first = Machine("cpu").forward(x, seed=0)
    for seed in range(1, 4):
        assert all(torch.equal(a, b) for a, b in zip(Machine("cpu").forward(x, seed=seed), first, strict=True))


@pytest.mark.parametrize("output", [True, False])
def test_a_run_finds_its_state_among_all(rng: torch.Generator, machine: Machine, output: bool) -> None:
    """And zero from the last row on."""
    x = drawn(rng, [150, 1, 70, 66], decay="slow").to(machine.device)
    x.entry[3] = 0.0
    expected = machine.forward(x, output=output)
    x.segments[:, 3] = torch.tensor([4, 0, 2, 5])
    among = torch.full_like(x.entry[:1], torch.nan).repeat(6, 1, 1, 1)
    among[[4, 0, 2]] = x.entry[:3]
    among = among[:5]  # what stands behind it is no number
    found = machine.forward(x._replace(entry=among), output=output)
    assert all(a is b is None or same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("what", [{}, {"exits": False}, {"output": False}])
@pytest.mark.parametrize("whole", [0, 5])
def test_walks_on_halves_of_v_give_the_same_bits(
    rng: torch.Generator, machine: Machine, whole: int, what: dict[str, bool]
) -> None:
    x = drawn(rng, [150, 1, 70], H=2, group=2, decay="slow").to(machine.device)
    x.k[45] *= 1.3  # a broken promise, too
    both = machine.forward(x, **what), machine.forward(x, seed=3, whole=whole, **what)
    assert all((a is None and b is None) or same_bits(a, b) for a, b in zip(*both, strict=True))


def test_exit_states_alone_are_those_of_the_walk(rng: torch.Generator, machine: Machine) -> None:
    """To the bit, where nothing decays away."""
    x = drawn(rng, [300, 64, 5], decay="slow").to(machine.device)
    assert torch.equal(machine.forward(x, output=False)[1], machine.forward(x)[1])


def test_what_decays_away_is_not_walked(rng: torch.Generator, machine: Machine) -> None:
    """The exit state to fp32's last bits; the map is zero, as the whole walk would have made it."""
    x = drawn(rng, [64 * 6], decay="moderate").to(machine.device)
    x.g[:] = -0.5  # e^-32 a chunk
    whole, alone = machine.forward(x)[1], machine.forward(x, output=False)[1]
    assert relative(alone, whole.cpu().double()) < 1e-7
    assert not machine.transfer(x).any()
    for broken in (x.g, x.beta):  # nothing is skipped where nobody knows what decays
        spoilt = broken[70].clone()
        broken[70] = torch.nan
        assert machine.transfer(x).isnan().any() and machine.forward(x, output=False)[1].isnan().any()
        broken[70] = spoilt


def test_each_head_begins_where_it_is_felt(rng: torch.Generator, machine: Machine) -> None:
    """Decay that differs by head and chunk: what is not felt is not read."""
    n = 130 if machine.device == "cuda" else 7  # 130: more than are summed at once
    x = drawn(rng, [64 * n + 7], group=3, decay="none")
    x.g[64 * 2 : 64 * 3, 0] = -2.0
    x.g[64 * (n - 1) : 64 * n, 1] = -2.0
    first = {0: 64 * 2, 1: 64 * (n - 1), 2: 0}  # of each head, what is felt
    for h, begin in first.items():
        x.v[:begin, h] = torch.nan
        exit = machine.forward(x.to(machine.device), output=False)[1][0, h]
        assert exit.isfinite().all() and exit.any()
        if begin:
            x.v[begin, h] = torch.nan
            assert machine.forward(x.to(machine.device), output=False)[1][0, h].isnan().any()
        x.v[: begin + 1, h] = 0.0
    M = machine.transfer(x.to(machine.device))[0]
    assert not M[:2].any() and M[2].any()


@pytest.mark.parametrize("decay", ["moderate", "slow", "none"])
def test_maps(rng: torch.Generator, machine: Machine, decay: str) -> None:
    x = drawn(rng, [100, 1, 64, 130], decay=decay)
    unit = torch.eye(128).expand_as(x.entry)
    _, truth = x.truth(v=torch.zeros_like(x.v), entry=unit)
    M = machine.transfer(x.to(machine.device), seed=2)
    assert relative(M, truth) < BF16
    # and the walk's own exit state is what the map and the offset say, to the walk's own roundings
    nothing = x._replace(entry=torch.zeros_like(x.entry)).to(machine.device)
    _, b = machine.forward(nothing, output=False)
    _, exits = x.truth()
    assert relative(M.cpu().double() @ x.entry.double() + b.cpu().double(), exits) < BF16


UNIT = torch.tensor([5.0, 5, 3, 1, 1, 1, 1, 1]) / 8
ROTATION = torch.eye(8) - 2 * torch.outer(UNIT, UNIT)  # orthogonal, of numbers of five bits


def exact(rng: torch.Generator, chunks: int) -> Problem:
    """Operands of which A and X are without rounding: keys of five bits, orthogonal within a chunk, beta of 3 bits.

    So whatever a map errs is its own arithmetic. Coordinates are shuffled from chunk to chunk: maps fill up.
    """
    x = drawn(rng, [64 * chunks], decay="none")
    for c in range(chunks):
        rows, order, columns = (torch.randperm(n, generator=rng) for n in (8, 64, 128))
        x.k[64 * c : 64 * c + 64, 0] = torch.block_diag(*[ROTATION[rows[:4]]] * 16)[order][:, columns]
    x.beta.copy_(torch.randint(2, 7, x.beta.shape, generator=rng) / 4)
    return x


def test_maps_keep_the_arithmetic_of_fp32(rng: torch.Generator, machine: Machine) -> None:
    """Two halves of fp16 do, one, of as many bits as TF32, does not."""
    x = exact(rng, 12)
    _, truth = x.truth(v=torch.zeros_like(x.v), entry=torch.eye(128).expand_as(x.entry))
    assert truth.count_nonzero() / truth.numel() > 0.3
    assert relative(machine.transfer(x.to(machine.device)), truth) < 2e-6  # 12 chunks of 2^-22 a term
    assert relative(machine.transfer(x.to(machine.device), terms=1), truth) > 5e-5


ONTO = {  # the same sums but for what tensor cores cut off
    "the map": (("gl.zeros([ROWS, HEAD_DIM], gl.float32, STATE)", "-T"), ("T = T - R", "T = -R")),
    "the high half": (("U - high.to(gl.float32)", "U"), ("in_fp16(U),", "in_fp16(U - high.to(gl.float32)),")),
}


def test_maps_do_not_shrink(rng: torch.Generator, machine: Machine) -> None:
    """beta 2, so that nothing fades. What tensor cores cut off would add up where roundings do not: along the truth."""
    chunks = 16
    x = exact(rng, chunks)
    x.beta.fill_(2)
    _, truth = x.truth(v=torch.zeros_like(x.v), entry=torch.eye(128).expand_as(x.entry))
    x = x.to(machine.device)

    def missing(found: Tensor) -> float:
        return 1 - ((found.cpu().double() * truth).sum() / truth.square().sum()).item()

    # 2^-25 a chunk would be all that 1,024 chunks may err in test_hopper_chain.py
    assert abs(missing(machine.transfer(x))) < chunks * 2.0**-26
    for edits in ONTO.values() if machine.device == "cpu" else ():
        source = path_of(f"{TIER}.transfer").read_text()
        for before, after in edits:
            assert before in source
            source = source.replace(before, after)
        assert missing(Machine("cpu", {"transfer": source}).transfer(x)) > chunks * 2.0**-25


@pytest.mark.parametrize("too_long", [1.02, 1.2, 1e5])  # |k|^2 of 1.04, and more
def test_a_long_key_is_loud_and_nothing_else_is(rng: torch.Generator, machine: Machine, too_long: float) -> None:
    x = drawn(rng, [100, 90], H=2, group=1, decay="slow")
    (o, exit), maps = machine.forward(x.to(machine.device)), machine.transfer(x.to(machine.device))
    x.k[30, 1] *= too_long
    (found, state), found_maps = machine.forward(x.to(machine.device)), machine.transfer(x.to(machine.device))
    assert found[30:100, 1].isnan().all() and state[0, 1].isnan().all() and found_maps[0, 1].isnan().all()
    found[30:100, 1], state[0, 1], found_maps[0, 1] = o[30:100, 1], exit[0, 1], maps[0, 1]
    assert torch.equal(found, o) and torch.equal(state, exit) and torch.equal(found_maps, maps)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_stands_behind_a_fragment_is_not_read(rng: torch.Generator, machine: Machine, name: str) -> None:
    x = drawn(rng, [70, 30])
    (o, exit), maps = machine.forward(x.to(machine.device)), machine.transfer(x.to(machine.device))
    getattr(x, name)[70:] = torch.nan
    found, state = machine.forward(x.to(machine.device))
    assert torch.equal(found[:70], o[:70]) and torch.equal(state[0], exit[0])
    assert found[70:].isnan().any()
    M = machine.transfer(x.to(machine.device))
    assert torch.equal(M[0], maps[0]) and M[1].isnan().any() == (name == "k")


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def test_maps_say_of_themselves_that_nothing_is_felt(rng: torch.Generator, machine: Machine) -> None:
    """By -0.0 in every element, which no other map has in any, be it zero to the last."""
    x = drawn(rng, [64 * 3, 64, 64], group=3, decay="slow")
    x.g[: 64 * 3] = -0.9  # 2^-166 in the last two chunks, so that nothing is felt
    x.g[: 64 * 3, 1] *= 0.4  # 2^-100 in all, and is
    x.g[64 * 3 : 64 * 4, 0] = -1.6  # 2^-148, walked for nothing
    M = machine.transfer(x.to(machine.device)).cpu()
    assert (bits(M[0, 0::2]) == -(2**31)).all()
    assert not (bits(M[0, 1]) == -(2**31)).any() and not (bits(M[1:]) == -(2**31)).any()
    assert not M[1, 0].any() and M[0, 1].any() and M[2].any()


ARRIVE = "        barrier()\n        mbarrier.arrive(ready.index(b), count=1)\n"
FAULTS = {
    "no wait for what is prepared": ("forward", "        mbarrier.wait(ready.index(b), (i >> 1) & 1)\n", ""),
    "a half walked for the other": ("forward", "    first = first + HELD\n", ""),
    "no wait for room": ("forward", "        mbarrier.wait(empty.index(stage), phase ^ 1)\n", ""),
    "bytes of one tile too many": ("forward", "(2 if OUTPUT else 1) * CHUNK", "(3 if OUTPUT else 1) * CHUNK"),
    "A overwritten while it is read": ("forward", "            W = warpgroup_mma_wait(0, deps=[W, p, a])[0]\n", ""),
    "later keys read": ("forward", "row[:, None] >= column[None, :]", "row[:, None] >= 0 * column[None, :]"),
    "tail not cleared": ("forward", "            clear_behind(k, held)\n", ""),
    "no fence": ("forward", f"        fence_async_shared()\n{ARRIVE}", ARRIVE),
    "late arrival": ("forward", "        mbarrier.arrive(empty.index(stage), count=1)\n", ""),
    "one half not cleared in a tail": ("forward", "for half in range(2)", "for half in range(1)"),
    "arrivals of both": ("forward", "    if alone:\n        mbarrier", "    if 0 > 1:\n        mbarrier"),
    "bytes of both halves where one comes": ("forward", "BYTES + VALUES)", "BYTES + 2 * VALUES)"),
    "a second walk of half of V": ("forward", "    if alone:\n        fence", "    if 0 > 1:\n        fence"),
    "half of X before it is there": ("forward", "0 if OUTPUT else 1, deps", "0 if OUTPUT else 2, deps"),
    "S does not decay early": ("forward", "        if EARLY:\n", "        if EARLY and OUTPUT > 1:\n"),
    "the same half twice": ("forward", "behind % 2 * HALF", "behind % 1 * HALF"),
    "wrong phase": ("transfer", "mbarrier.wait(ready.index(b), (i >> 1) & 1)", "mbarrier.wait(ready.index(b), i & 1)"),
    "one half of the map lost": ("transfer", "                R = warpgroup_mma(r_low, x, R, is_async=True)\n", ""),
    "both halves by one place": ("transfer", "ms.index(1)", "ms.index(0)"),
    "both halves on one diagonal": ("transfer", "late(FIRST + row)", "late(row)"),
    "range forgotten": ("transfer", "        scaled = scaled + up\n", ""),
    "decay of the last chunks lost": ("transfer", "held = base + lane < n", "held = base + lane < n - 1"),
}  # fmt: skip


def test_no_state_is_of_fp32_whatever_else_is() -> None:
    no_state = Machine("cpu").module("forward").no_state
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert no_state(torch.device("cpu")).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def planted() -> tuple[Problem, dict[str, list[Tensor]]]:
    """Operands, and what the kernels make of them."""
    x = drawn(torch.Generator().manual_seed(5), [64 * 4 + 9, 70], decay="none")
    x.g[:265] = -0.01
    x.k[265:] = x.v[265:] = torch.nan  # the second segment's, which nobody looks at
    return x, {name: of_the_first(Machine("cpu"), name, x) for name in ("forward", "transfer")}


def of_the_first(machine: Machine, name: str, x: Problem) -> list[Tensor]:
    """Maps, or exit states alone, and outputs and exit states of walks on all of V and on halves."""
    with filled():
        if name == "transfer":
            return [machine.transfer(x)[0]]
        runs = (machine.forward(x, whole=whole) for whole in (None, 0))
        alone = machine.forward(x, output=False)[1][0]
        return [alone, *(t for o, exit, *_ in runs for t in (o[:265], exit[0]))]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(planted: tuple[Problem, dict[str, list[Tensor]]], fault: str) -> None:
    name, before, after = FAULTS[fault]
    source = path_of(f"{TIER}.{name}").read_text()
    assert before in source
    x, clean = planted
    try:
        found = of_the_first(Machine("cpu", {name: source.replace(before, after)}), name, x)
    except DeviceFault:
        return
    assert not all(map(torch.equal, found, clean[name]))
