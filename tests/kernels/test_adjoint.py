"""The Hopper tier's adjoint walk on the emulator, and on a GPU, against FP64 chunk by chunk."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from deltaspan.reference import chunked_gated_delta_rule
from tests.emulator import DeviceFault, path_of, seeded
from tests.helpers import filled, same_bits
from tests.kernels import test_hopper
from tests.kernels.test_hopper import BF16, SCALE, TIER, Problem, drawn, relative

# Of a chunk: D, U, Y, P and Q' are rounded to bf16 and A was, about as many roundings as the forward has: BF16 holds.


class Given(NamedTuple):
    """Operands with what comes back: the gradient of the output, and the adjoint of exit states."""

    x: Problem
    do: Tensor  # [T, HV, 128] bf16
    leaving: Tensor  # [S, HV, 128, 128]

    def to(self, device: str) -> "Given":
        return Given(*(part.to(device) for part in self))

    def truth(self) -> tuple[Tensor, Tensor]:
        """The adjoint of entry states, like leaving, and of the state at every chunk's end [NC, HV, K, V], by autograd
        in FP64, chunk by chunk."""
        x, entering, adjoints = self.x, [], []
        for begin, end, first, source, _ in x.segments.tolist():
            states = [x.entry[source : source + 1].double().requires_grad_()]
            loss = torch.zeros((), dtype=torch.float64)
            for at, tokens in x.chunks[first : first + -(-(end - begin) // 64)].tolist():
                operands = (t[None, at : at + tokens].double() for t in (x.q, x.k, x.v, x.g, x.beta))
                o, state = chunked_gated_delta_rule(*operands, [0, tokens], initial_state=states[-1])
                loss = loss + (o[0] * self.do[at : at + tokens]).sum()
                states.append(state)
            entry, *rest = torch.autograd.grad(loss + (states[-1] * self.leaving[source]).sum(), states)
            entering.append(entry)
            adjoints += rest
        return torch.cat(entering), torch.cat(adjoints)


def given(rng: torch.Generator, *args, **options) -> Given:
    x = drawn(rng, *args, **options)
    return Given(x, *(torch.randn(like.shape, generator=rng).to(like.dtype) for like in (x.v, x.entry)))


class Machine(test_hopper.Machine):
    def adjoint(self, g: Given, seed: int = 0, *, states: bool = True, **options):
        made = self.prep(g.x)
        run = self.module("adjoint").adjoint
        with seeded(seed):
            return run(g.x.q, g.x.k, g.do, made, g.leaving, g.x.segments, SCALE, states=states, **options)

    def both(self, g: Given) -> list[Tensor]:
        """Of the walk: adjoints of entry states and of all chunks; and of entry states alone."""
        return [*self.adjoint(g), self.adjoint(g, states=False)[0]]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def found_and_true(g: Given, device: str, **options) -> None:
    """Of entry states and of all chunks, and of each by itself."""
    entering, D = Machine(device).adjoint(g.to(device), **options)
    true_entering, true_D = g.truth()
    assert D.dtype == torch.bfloat16 and entering.dtype == torch.float32
    D = D.mT
    assert relative(entering, true_entering) < BF16 and relative(D, true_D) < BF16
    for found, truth in ((entering, true_entering), (D, true_D)):
        for i in range(len(truth)):
            assert relative(found[i], truth[i]) < 2 * BF16, i


@pytest.mark.parametrize("decay", ["moderate", "slow", "strong", "none"])
def test_adjoints_of_entry_states_and_of_every_chunk(rng: torch.Generator, device: str, decay: str) -> None:
    found_and_true(given(rng, [100, 1, 64, 150], 2, decay), device, seed=3)


@pytest.mark.parametrize(("H", "group"), [(2, 3), (1, 4)])
def test_any_heads(rng: torch.Generator, device: str, H: int, group: int) -> None:
    found_and_true(given(rng, [70], H=H, group=group), device)


@pytest.mark.parametrize("states", [True, False])
def test_segments_read_and_write_where_they_are_told(rng: torch.Generator, device: str, states: bool) -> None:
    """Zero from the last row on."""
    g = given(rng, [70, 1, 64, 3], group=1).to(device)
    g.leaving[3] = 0.0
    expected = Machine(device).adjoint(g, states=states)[0]
    among = torch.randn(6, *g.leaving.shape[1:], generator=rng).to(device)
    among[[4, 0, 2]] = g.leaving[:3]
    g.x.segments[:, 3] = torch.tensor([4, 0, 2, 5])
    g.x.segments[:, 4] = torch.tensor([2, 0, 3, 1])
    entering, _ = Machine(device).adjoint(g._replace(leaving=among[:5]), states=states)
    assert entering.shape == expected.shape and torch.equal(entering[[2, 0, 3, 1]], expected)


def test_rows_at_a_pitch(rng: torch.Generator, device: str) -> None:
    dense = given(rng, [70], H=2, group=1).to(device)
    q, k, do = torch.cat([dense.x.q, dense.x.k, dense.do], dim=1).split(2, dim=1)
    packed = Given(dense.x._replace(q=q, k=k), do, dense.leaving)
    assert all(map(torch.equal, Machine(device).adjoint(dense), Machine(device).adjoint(packed)))


def test_the_order_of_partitions_changes_no_bit(rng: torch.Generator) -> None:
    g = given(rng, [200], group=1)
    first = Machine("cpu").adjoint(g, seed=0)
    for seed in range(1, 3):
        assert all(map(torch.equal, Machine("cpu").adjoint(g, seed=seed), first))


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize("number", [0, 3])
def test_walks_on_halves_of_v_give_the_same_bits(rng: torch.Generator, device: str, states: bool, number: int) -> None:
    g = given(rng, [130, 1], H=2, group=1, decay="slow").to(device)
    g.x.k[45, 1] *= 1.3  # a broken promise, too
    whole, halves = (Machine(device).adjoint(g, seed=3, states=states, whole=w) for w in (None, number))
    assert same_bits(whole[0], halves[0]) and whole[0][0, 0].isfinite().all()
    assert same_bits(whole[1], halves[1]) if states else whole[1] is halves[1] is None


def test_entry_states_alone_are_those_of_the_walk(rng: torch.Generator, device: str) -> None:
    """To the bit, where nothing decays away."""
    g = given(rng, [200, 64, 5], group=1, decay="slow").to(device)
    entering, _, alone = Machine(device).both(g)
    assert torch.equal(alone, entering)


def test_what_decays_away_is_not_walked(rng: torch.Generator, device: str) -> None:
    """To fp32's last bits. Nothing is skipped where nobody knows what decays."""
    g = given(rng, [64 * 3 + 9], group=1).to(device)
    g.x.g[:] = -1.0  # e^-64 a chunk: the first two are felt
    whole, _, alone = Machine(device).both(g)
    assert relative(alone, whole.cpu().double()) < 1e-7
    g.do[64 * 2 :] = torch.nan
    assert torch.equal(Machine(device).adjoint(g, states=False)[0], alone)
    g.do[64 * 2 - 1] = torch.nan
    assert Machine(device).adjoint(g, states=False)[0].isnan().all()
    g.do[:] = 1.0
    g.leaving[0, 0, 3, 100] = torch.nan
    assert Machine(device).adjoint(g, states=False)[0][0, 0, :, 100].isnan().any()
    g.leaving[:] = 1.0
    for broken in (g.x.g, g.x.beta):
        spoilt = broken[200].clone()
        broken[200] = torch.nan
        assert Machine(device).adjoint(g, states=False)[0].isnan().all()
        broken[200] = spoilt


def test_each_head_begins_where_it_is_felt(rng: torch.Generator, device: str) -> None:
    """Decay that differs by head and chunk: what is not felt is not read, what is felt is."""
    n = 130 if device == "cuda" else 3  # 130: more than are summed at once
    g = given(rng, [64 * n + 7], group=3, decay="none")
    g.x.g[:64, 0] = -2.0
    g.x.g[64 * (n - 1) : 64 * n, 1] = -2.0
    run = lambda: Machine(device).adjoint(g.to(device), states=False)[0][0]  # noqa: E731
    clean = run()
    ends = (64, 64 * n, 64 * n + 7)  # of what each head feels
    for h, end in enumerate(ends):
        g.do[end:, h] = torch.nan
    assert torch.equal(run(), clean) and all(x.any() for x in clean)
    for h, end in enumerate(ends):
        g.do[end - 1, h] = torch.nan
    assert run().isnan().all()


def test_a_long_key_is_loud_and_nothing_else_is(rng: torch.Generator, device: str) -> None:
    """All of what leaves its chunk backwards is NaN, however much decays before it is felt."""
    g = given(rng, [140, 5], H=2, group=1, decay="none")
    g.x.g[:64] = -2.0
    clean = Machine(device).both(g.to(device))
    g.x.k[70, 1] *= 1.02  # in the second of three chunks; |k|^2 of 1.04
    found = Machine(device).both(g.to(device))
    for now, were in zip(found, clean, strict=True):
        assert now[0, 1].isnan().all()  # of a segment, or at the end of the first chunk
        now[0, 1] = were[0, 1]
    assert all(map(torch.equal, found, clean))


@pytest.mark.parametrize("name", ["q", "k", "do"])
def test_what_stands_behind_a_fragment_is_not_read(rng: torch.Generator, device: str, name: str) -> None:
    g = given(rng, [70, 10], group=1)
    clean = Machine(device).both(g.to(device))
    (g.do if name == "do" else getattr(g.x, name))[70:] = torch.nan
    found = Machine(device).both(g.to(device))
    for now, before, held in zip(found, clean, (1, 2, 1), strict=True):  # segments, chunks, segments
        assert torch.equal(now[:held], before[:held])
    assert found[0][1].isnan().any() and found[2][1].isnan().any()


READY = "        mbarrier.wait(ready.index(b), (i >> 1) & 1)\n"
ARRIVE = "        barrier()\n        mbarrier.arrive(ready.index(b), count=1)\n"
BROKEN = "        first_broken = gl.load(broken + c)\n"
ROOM = "        mbarrier.wait(free.index(b), ((i >> 1) & 1) ^ 1)\n"
FAULTS = {
    "no wait for what is prepared": (READY, ""),
    "no wait for dO": (f"        mbarrier.wait(do_full.index(b), (i >> 1) & 1)\n{READY}", READY),
    "no wait for keys": (f"{BROKEN}        mbarrier.wait(full.index(stage), phase)\n", BROKEN),
    "no wait for room": (f"{ROOM}        if alone", "        if alone"),
    "no wait for room for Y": (f"{ROOM}{BROKEN}", BROKEN),
    "two stages": ("STAGES = gl.constexpr(3)", "STAGES = gl.constexpr(2)"),
    "bytes of one tile too many": ("2 * CHUNK * HEAD_DIM * 2", "3 * CHUNK * HEAD_DIM * 2"),
    "a half walked for the other": ("    first = first + HELD\n", ""),
    "dO of the other half": ("dos.index(2 * b + HELD // HALF)", "dos.index(2 * b)"),
    "dO of one half not cleared in a tail": ("for half in range(2)", "for half in range(1)"),
    "bytes of both halves where one comes": ("do_full.index(b), VALUES)", "do_full.index(b), 2 * VALUES)"),
    "a second walk of half of V": ("    if alone:\n        fence", "    if 0 > 1:\n        fence"),
    "q not cleared in a tail": ("            clear_behind(q, held)\n", ""),
    "k not cleared in a tail": ("            clear_behind(k, held)\n", ""),
    "no fence": (f"        fence_async_shared()\n{ARRIVE}", ARRIVE),
    "U read before it is computed": ("        U, d = warpgroup_mma_wait(1, deps=[U, d])\n", ""),
    "D overwritten on its way out": ("            store_wait(0)\n", ""),
    "D of another chunk": ("(n - 1 - i) * HV", "i * HV"),
    "later keys read": ("row[:, None] >= column[None, :]", "row[:, None] >= 0 * column[None, :]"),
    "the sign of Y": ("gamma = -exp2", "gamma = exp2"),
    "decay of U forgotten": ("U * gamma[None, :]", "-1.0 * U"),
    "decay of D forgotten": ("D * exp2(G.load(gl.SliceLayout(0, STATE)))[None, :]", "D * 1.0"),
    "first to last": ("        c = n - 1 - i\n        token", "        c = i\n        token"),
    "late arrival": ("        mbarrier.arrive(free.index(b), count=1)\n", ""),
}  # fmt: skip


@pytest.fixture(scope="module")
def planted() -> tuple[Given, list[Tensor]]:
    """Of two segments the second is NaN, at which nobody looks, and what the kernel makes of the first."""
    g = given(torch.Generator().manual_seed(5), [64 * 3 + 9, 5], group=1, decay="none")
    g.x.g[:201] = -0.01
    for x in (g.x.q, g.x.k, g.do):
        x[201:] = torch.nan
    return g, of_the_first(Machine("cpu"), g)


def of_the_first(machine: Machine, g: Given) -> list[Tensor]:
    with filled():
        whole, halves = (machine.adjoint(g, whole=number) for number in (None, 0))
    return [whole[0][0], whole[1][:4], halves[0][0], halves[1][:4]]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(planted: tuple[Given, list[Tensor]], fault: str) -> None:
    before, after = FAULTS[fault]
    source = path_of(f"{TIER}.adjoint").read_text()
    assert before in source
    g, clean = planted
    try:
        found = of_the_first(Machine("cpu", {"adjoint": source.replace(before, after)}), g)
    except DeviceFault:
        return
    assert not all(map(torch.equal, found, clean))
