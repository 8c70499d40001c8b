"""Every stage by itself, the same body over every tier: the algebra that ties stages together, and hard inputs."""

import pytest
import torch
from torch import Tensor

import deltaspan as ds
from deltaspan.kernels import select
from deltaspan.op.segments import cut
from deltaspan.plan import CHUNK
from deltaspan.reference import recurrent_gated_delta_rule
from tests.emulator import load

# FP64 throughout: a stage is a handful of products of at most 128 terms of unit size, so that only roundings of about
# 1e-15 each remain; 1e-12 of a tensor's RMS leaves a thousand of them.
EXACT = 1e-12
# Of bf16 operands and a bf16 state some ten roundings of up to 2^-9 stand between the operands and a result, 3e-3 of
# RMS. The worst of thousands of elements is ten times as far off, where documents differ in size (nearly equal keys).
BF16, BF16_ELEMENT = 8e-3, 4e-2
LENGTHS = [70, 0, 1, 64, 129, 5]


TIERS = ["torch", "emulated", pytest.param("hopper", marks=pytest.mark.gpu)]


def close(found: Tensor, expected: Tensor, bound: float = EXACT) -> None:
    assert found.shape == expected.shape
    found, expected = found.cpu().double(), expected.cpu().double()
    error = (found - expected).abs().max().item() if found.numel() else 0.0
    scale = expected.square().mean().sqrt().item() if expected.numel() else 0.0
    assert error <= bound * max(scale, 1e-30), f"worst element {error:.2e} beside an RMS of {scale:.2e}"


class Problem:
    """Random operands over documents of LENGTHS on one rank, in FP64; for the Hopper tier in bf16, states in FP32."""

    def __init__(self, rng: torch.Generator, tier: str, **changes: Tensor) -> None:
        self.hopper = tier != "torch"
        self.H, self.HV, self.K, self.V = (1, 2, 128, 128) if self.hopper else (2, 6, 24, 16)
        self.device = "cuda" if tier == "hopper" else "cpu"
        self.tier = load("deltaspan.kernels.hopper.tier") if tier == "emulated" else select.tier(tier)
        self.cu = [0]
        for length in LENGTHS:
            self.cu.append(self.cu[-1] + length)
        T = self.cu[-1]
        draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
        unit = torch.nn.functional.normalize
        self.q, self.k = draw(T, self.H, self.K), unit(draw(T, self.H, self.K), dim=-1)
        self.v, self.do = draw(T, self.HV, self.V), draw(T, self.HV, self.V)
        self.g = -0.3 * torch.rand(T, self.HV, generator=rng, dtype=torch.float64)
        self.beta = torch.rand(T, self.HV, generator=rng, dtype=torch.float64)
        vars(self).update(changes)
        self.states = draw(len(LENGTHS) - 1, self.HV, self.K, self.V)  # the empty document has no fragment
        if self.hopper:
            narrow = {name: getattr(self, name).to(torch.bfloat16) for name in ("q", "k", "v", "do")}
            narrow |= {name: getattr(self, name).float() for name in ("g", "beta", "states")}
            vars(self).update({name: x.to(self.device) for name, x in narrow.items()})
        self.view = ds.build_context(ds.partition(self.cu, 1), device=self.device)._views[0]
        self.cut = cut(self.view, 1, self.HV, 132)
        self.unit_keys = True

    def tape(self):
        return self.tier.prep(
            self.q, self.k, self.v, self.g, self.beta, self.view.grid, scale=0.3, unit_keys=self.unit_keys
        )

    def close(
        self, found: Tensor, expected: Tensor, bound: float = EXACT, roundings: float = 1.0, by_row: bool = False,
        terms: float = 0.0,
    ) -> None:  # fmt: skip
        """roundings: to bf16, how many times as many as usual. by_row: of elements, beside their row's size. terms: the
        norm of sums that may cancel in it."""
        if not self.hopper:
            return close(found, expected, bound)
        found, expected = found.cpu().double(), expected.cpu().double()
        error, size = found - expected, (expected.square().mean() + terms**2 / expected.numel()).sqrt()
        assert error.square().mean().sqrt() <= roundings * BF16 * size
        if by_row and expected.dim() > 2:
            size = expected.square().mean(-1, keepdim=True).sqrt().clamp(min=size.item())
        assert (error.abs() <= roundings * BF16_ELEMENT * (size + expected.abs())).all()

    def walk(self, states: Tensor | None = None, *, output: bool = True):
        return self.tier.walk(self.tape(), self.cut.every, self.states if states is None else states, output=output)

    def walk_back(self, leaving: Tensor) -> Tensor:
        """The adjoint of entry states."""
        adjoint = self.tier.adjoint_prep(self.tape(), self.do)
        entering, _ = self.tier.adjoint_walk(adjoint, self.cut.every, leaving)
        return entering

    def oracle(self, states: Tensor, *, grads: Tensor | None = None, final: Tensor | None = None):
        """o, final states and gradients of the token recurrence, with the states as every document's initial ones."""
        given = (self.q, self.k, self.v, self.g, self.beta, states)
        leaves = [x.cpu().double().requires_grad_() for x in given]
        kept = [i for i, length in enumerate(LENGTHS) if length]
        initial = torch.zeros(len(LENGTHS), *states.shape[1:], dtype=torch.float64).index_put(
            (torch.tensor(kept),), leaves[5]
        )
        o, last = recurrent_gated_delta_rule(*leaves[:5], self.cu, scale=0.3, initial_state=initial)
        loss = (o * (self.do if grads is None else grads).cpu()).sum()
        if final is not None:
            loss = loss + (last[kept] * final.cpu()).sum()
        loss.backward()
        return o.detach(), last[kept].detach(), [x.grad for x in leaves]


@pytest.fixture(params=TIERS)
def problem(request, rng) -> Problem:
    return Problem(rng, request.param)


@pytest.fixture
def trained(rng) -> Problem:
    """Of the torch tier, in FP64."""
    return Problem(rng, "torch")


def test_walk_gives_outputs_and_exit_states_of_the_recurrence(problem):
    entry = problem.states.clone()
    o, exit, _ = problem.walk(entry)
    expected, last, _ = problem.oracle(problem.states)
    problem.close(o, expected)
    problem.close(exit, last)
    assert torch.equal(entry, problem.states), "the entry states were written to"


def test_walk_without_output_walks_the_same_states(problem):
    o, exit, states = problem.walk(output=False)
    _, exit_too, states_too = problem.walk()
    assert o is None
    assert torch.equal(exit, exit_too)
    if not problem.hopper:  # which makes states of its own for the gradients
        assert all(map(torch.equal, states, states_too))


def test_summary_is_the_affine_map_of_a_walk(problem):
    """exit(entry + added) = M added + b, for every fragment at once and for some of them in another order."""
    tape = problem.tape()
    added = torch.randn_like(problem.states)
    M = problem.tier.transfer(tape, problem.cut.every)
    b = problem.tier.exit_states(tape, problem.cut.every, problem.states)
    _, exit, _ = problem.tier.walk(tape, problem.cut.every, problem.states + added, output=True)
    problem.close(M @ added + b, exit)
    problem.close(problem.tier.merge(M, added, b), exit)


def test_adjoint_summary_is_the_adjoint_of_the_summary(problem):
    """d(leaving + added) = M^T added + d(leaving), with the forward's M."""
    tape = problem.tape()
    leaving, added = torch.randn_like(problem.states), torch.randn_like(problem.states)
    before = leaving.clone()
    M = problem.tier.transfer(tape, problem.cut.every)
    adjoint = problem.tier.adjoint_prep(tape, problem.do)
    d = problem.tier.adjoint_summary(adjoint, problem.cut.every, leaving)
    entering, _ = problem.tier.adjoint_walk(adjoint, problem.cut.every, leaving + added)
    problem.close(problem.tier.merge(M.mT, added, d), entering)
    assert torch.equal(leaving, before), "the adjoints of exit states were written to"


def test_adjoint_walk_gives_the_gradients_of_initial_states(problem):
    final = torch.randn_like(problem.states)
    *_, (*_, expected) = problem.oracle(problem.states, final=final)
    problem.close(problem.walk_back(final), expected)


def test_backward_stages_give_the_gradients_of_the_recurrence(problem):
    gradients_are_true(problem)


def test_backward_stages_of_the_form_for_long_keys(trained):
    trained.unit_keys = False
    gradients_are_true(trained)


def gradients_are_true(problem: Problem, bound: float = EXACT, roundings: float = 1.0) -> None:
    final = torch.randn_like(problem.states)
    entering, found = run_backward(problem, final)
    *_, expected = problem.oracle(problem.states, final=final)
    assert found[5:] == (None, None)
    # The first token's dg is <D, S> of its document's initial state and that one's adjoint: of unrelated matrices
    # |D| |S| / 128, give or take, and as much of it is lost as S and D lose in bf16, however small it is itself.
    sizes = (x.flatten(2).norm(dim=2).cpu() for x in (expected[5], problem.states))
    terms = (torch.stack([*sizes]).prod(0).norm() / problem.states.flatten(2).shape[2] ** 0.5).item()
    for i, (tensor, truth) in enumerate(zip((*found[:5], entering), expected, strict=True)):
        # roundings are of the size of a row, and rows of dq and dk differ as the states and adjoints that they meet
        problem.close(tensor, truth, bound, roundings, by_row=True, terms=terms * (i == 3))


def run_backward(problem: Problem, final: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    tape = problem.tape()
    _, _, states = problem.tier.walk(tape, problem.cut.every, problem.states, output=False)
    adjoint = problem.tier.adjoint_prep(tape, problem.do)
    entering, *found = problem.tier.pull_back(adjoint, problem.cut.every, states, final)
    return entering, tuple(found)


def strong(p: Problem) -> dict:
    return {"g": -16 * torch.nn.functional.softplus(torch.randn_like(p.g))}


def slow(p: Problem) -> dict:
    return {"g": -1e-4 * torch.rand_like(p.g)}


def no_decay(p: Problem) -> dict:
    return {"g": torch.zeros_like(p.g)}


def cut_off(p: Problem) -> dict:
    g = p.g.clone()
    g[[3, 75, 140]] = -torch.inf
    g[20, 1] = -5000.0
    return {"g": g}


def collinear(p: Problem) -> dict:
    k = torch.nn.functional.normalize(p.k[:1] + 1e-3 * torch.randn_like(p.k), dim=-1)
    return {"k": k, "beta": 1 - 1e-3 * torch.rand_like(p.beta)}


def reflecting(p: Problem) -> dict:
    return {"beta": 2 * torch.rand_like(p.beta)}


def writing_nothing(p: Problem) -> dict:
    return {"beta": torch.where(torch.rand_like(p.beta) < 0.5, 0.0, p.beta)}


HARD = [strong, slow, no_decay, cut_off, collinear, reflecting, writing_nothing]


def hardened(rng: torch.Generator, tier: str, change) -> Problem:
    return Problem(rng, tier, **{name: x.cpu() for name, x in change(Problem(rng, tier)).items()})


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("change", HARD)
def test_outputs_of_hard_inputs(rng, tier, change):
    """Outputs and exit states stay those of the recurrence where decay, keys and write strengths are extreme."""
    problem = hardened(rng, tier, change)
    o, exit, _ = problem.walk()
    expected, last, _ = problem.oracle(problem.states)
    # Nearly equal keys at beta near 1 make I + tril(beta K K^T) of condition 64^2: it takes four digits more.
    bound = 1e-8 if change is collinear else 1e-11
    problem.close(o, expected, bound)
    problem.close(exit, last, bound)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("change", HARD)
def test_gradients_of_hard_inputs(rng, tier, change):
    # Nearly equal keys at beta near 1 make I + tril(beta K K^T) of condition 64^2: it takes four digits more. dv is
    # then nearly dU less that of the next token: what they share cancels, but not its roundings.
    bound, roundings = (1e-8, 3.0) if change is collinear else (1e-11, 1.5)
    gradients_are_true(hardened(rng, tier, change), bound, roundings)


def with_a_long_key(problem: Problem) -> Problem:
    problem.k[66] *= 2
    problem.beta = problem.beta * 0.4
    return problem


def test_the_form_for_long_keys(trained):
    """Keys of length 2 need the decay inside the inverse."""
    with_a_long_key(trained).unit_keys = False
    o, exit, _ = trained.walk()
    expected, last, _ = trained.oracle(trained.states)
    close(o, expected)
    close(exit, last)


def test_a_key_that_breaks_the_promise_is_loud(problem):
    """Under unit_keys a long key gives NaN from there on, not numbers."""
    o, exit, _ = with_a_long_key(problem).walk()
    expected, last, _ = problem.oracle(problem.states)
    problem.close(o[:66], expected[:66])
    assert o[66:70, 0].isnan().all() and exit[0].isnan().all()
    problem.close(o[70:], expected[70:])
    problem.close(exit[1:], last[1:])


def test_adjoints_of_a_key_that_breaks_the_promise_are_loud(problem):
    final = torch.randn_like(problem.states)
    entering = with_a_long_key(problem).walk_back(final)
    *_, (*_, expected) = problem.oracle(problem.states, final=final)
    assert entering[0].isnan().all()
    problem.close(entering[1:], expected[1:])


def test_gradients_of_a_key_that_breaks_the_promise(problem):
    dq, dk, dv, *_ = run_backward(with_a_long_key(problem), torch.randn_like(problem.states))[1]
    assert dq[66:70].isnan().all() and dk[:70].isnan().all() and dv[:70].isnan().all()
    assert all(x[70:].isfinite().all() for x in (dq, dk, dv))


def test_rounded_unit_keys_pass(problem):
    for dtype in (torch.bfloat16, torch.float16):
        drawn = torch.nn.functional.normalize(torch.randn_like(problem.k.double()), dim=-1)
        problem.k = drawn.to(dtype).to(problem.k.dtype)
        assert problem.walk()[0].isfinite().all()


def test_nothing_reads_another_documents_rows(problem):
    """Rows past a fragment's end in a chunk are the next document's: NaN there must not reach this one."""
    start, stop = problem.cu[3], problem.cu[4]
    for name in ("q", "k", "v", "g", "beta", "do"):
        poisoned = getattr(problem, name).clone()
        poisoned[start:stop] = torch.nan
        setattr(problem, name, poisoned)
    o, exit, _ = problem.walk()
    others = [0, 1, 3, 4]
    final = torch.randn_like(problem.states)
    entering, found = run_backward(problem, final)
    by_token, states = [o, *found[:5]], [exit, entering]
    for x in by_token:
        assert x[:start].isfinite().all() and x[stop:].isfinite().all() and x[start:stop].isnan().any()
    assert all(x[others].isfinite().all() for x in states)


def test_fragments_do_not_depend_on_their_neighbours(problem):
    """A document gives the same bits alone and beside others: chunks are padded, batches are independent."""
    o, exit, _ = problem.walk()
    start, stop = problem.cu[4], problem.cu[5]
    view = ds.build_context(ds.partition([0, stop - start], 1), device=problem.device)._views[0]
    alone = [x[start:stop] for x in (problem.q, problem.k, problem.v, problem.g, problem.beta)]
    tape = problem.tier.prep(*alone, view.grid, scale=0.3, unit_keys=True)
    o_alone, exit_alone, _ = problem.tier.walk(
        tape, cut(view, 1, problem.HV, 132).every, problem.states[3:4], output=True
    )
    assert torch.equal(o_alone, o[start:stop])
    assert torch.equal(exit_alone[0], exit[3])


def test_products_keep_fp32_whatever_the_process_allows(rng, monkeypatch):
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    seen = []
    solve = torch.linalg.solve_triangular

    def record(*args, **kwargs):
        seen.append([backend.fp32_precision for backend in backends])
        return solve(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, "solve_triangular", record)
    try:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = "tf32", "bf16"
        Problem(rng, "torch").tape()
        assert seen == [["ieee", "ieee"]]
        assert [backend.fp32_precision for backend in backends] == ["tf32", "bf16"]
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def test_grid_rows_and_tokens_are_inverse(rng):
    grid = Problem(rng, "torch").view.grid
    assert grid.token_of_row.shape == (len(grid.start), CHUNK)
    assert torch.equal(grid.token_of_row.flatten()[grid.row_of_token], torch.arange(grid.tokens))
    assert grid.valid.flatten()[grid.row_of_token].all() and int(grid.valid.sum()) == grid.tokens


@pytest.mark.parametrize("tier", ["torch"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_merge_does_not_depend_on_those_beside_it(rng, tier, device, dtype):
    """So that owners of a few heads and homes of all of them get the same bits."""
    M, X, b = (torch.randn(9, 5, 48, 48, generator=rng, dtype=dtype).to(device) for _ in range(3))
    merge = select.tier(tier).merge
    together = merge(M, X, b)
    for i in range(9):
        for heads in (slice(0, 1), slice(1, 5), slice(None)):
            assert torch.equal(merge(M[i, heads], X[i, heads], b[i, heads]), together[i, heads])
            alone = merge(M[i : i + 1, heads].mT.contiguous().mT, X[i : i + 1, heads], b[i : i + 1, heads])
            assert torch.equal(alone[0], together[i, heads])
    close(together, M @ X + b, 1e-12 if dtype == torch.float64 else 1e-4)
