"""The token recurrence against a scalar loop and against finite differences, and the promises of its edges."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from deltaspan.reference import chunked_gated_delta_rule, recurrent_gated_delta_rule

RULES = pytest.mark.parametrize("rule", [recurrent_gated_delta_rule, chunked_gated_delta_rule])


def scalar_loop(q, k, v, g, beta, initial_state, cu_seqlens, scale):
    """The recurrence, number by number: S' = alpha S;  e = beta (v - S'^T k);  S = S' + k e^T;  o = scale S^T q."""
    (H, K), (T, HV, V) = q.shape[1:], v.shape
    o, final_state = np.zeros((T, HV, V)), np.zeros((len(cu_seqlens) - 1, HV, K, V))
    for n in range(len(cu_seqlens) - 1):
        for j in range(HV):
            h = j // (HV // H)
            S = [[float(initial_state[n, j, a, b]) for b in range(V)] for a in range(K)]
            for t in range(cu_seqlens[n], cu_seqlens[n + 1]):
                alpha = math.exp(g[t, j])
                for a in range(K):
                    for b in range(V):
                        S[a][b] *= alpha
                e = [beta[t, j] * (v[t, j, b] - sum(S[a][b] * k[t, h, a] for a in range(K))) for b in range(V)]
                for a in range(K):
                    for b in range(V):
                        S[a][b] += k[t, h, a] * e[b]
                for b in range(V):
                    o[t, j, b] = scale * sum(S[a][b] * q[t, h, a] for a in range(K))
            final_state[n, j] = S
    return o, final_state


@pytest.mark.parametrize(("H", "HV"), [(1, 1), (2, 2), (2, 4), (1, 3), (2, 8)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_recurrence_is_the_scalar_loop(draw: Callable, H: int, HV: int, scale: float | None) -> None:
    case = draw([4, 0, 1, 9], H, HV, K=3, V=2, tail=2)
    o, final_state = recurrent_gated_delta_rule(
        *case.inputs[:5], case.cu_seqlens, scale=scale, initial_state=case.initial_state
    )
    expected = scalar_loop(*(x.numpy() for x in case.inputs), case.cu_seqlens, 3**-0.5 if scale is None else scale)
    # Nine steps of a dozen operations on numbers of order 1, in another order: some 100 eps = 2e-14 at worst.
    np.testing.assert_allclose(o, expected[0], rtol=0, atol=1e-13)
    np.testing.assert_allclose(final_state, expected[1], rtol=0, atol=1e-13)


def test_gradients_are_the_finite_differences(draw: Callable) -> None:
    case = draw([3, 0, 2], H=1, HV=2, K=2, V=3, tail=1)
    leaves = [x.requires_grad_() for x in case.inputs]

    def rule(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return recurrent_gated_delta_rule(*inputs[:5], case.cu_seqlens, initial_state=inputs[5])

    # Steps of 1e-6 in numbers of order 1: differences are off by 1e-12 of curvature and 1e-10 of rounding.
    assert torch.autograd.gradcheck(rule, leaves, atol=1e-7, rtol=1e-6)


@RULES
def test_no_initial_state_is_a_zero_state(draw: Callable, rule: Callable) -> None:
    case = draw([70, 3])
    o, final_state = rule(*case.inputs[:5], case.cu_seqlens)
    zero_o, zero_final_state = rule(*case.inputs[:5], case.cu_seqlens, initial_state=0 * case.initial_state)
    assert torch.equal(o, zero_o) and torch.equal(final_state, zero_final_state)
    assert final_state.abs().min() > 0


@RULES
def test_an_empty_document_keeps_its_state(draw: Callable, rule: Callable) -> None:
    case = draw([0, 5, 0, 0])
    out = case.run(rule)
    for n in (0, 2, 3):
        assert torch.equal(out["final_state"][n], case.initial_state[n])
        assert torch.equal(out["dinitial_state"][n], case.dfinal_state[n])


@RULES
@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_a_pack_without_tokens_still_has_gradients(draw: Callable, rule: Callable, lengths: list[int]) -> None:
    out = draw(lengths, tail=3).run(rule)
    assert out["o"].shape == (3, 4, 5) and out["final_state"].shape == (len(lengths), 4, 6, 5)
    assert all(not out[name].any() for name in ("o", "dq", "dk", "dv", "dg", "dbeta"))


@RULES
def test_the_tail_is_never_read(draw: Callable, rule: Callable) -> None:
    case = draw([66, 4], tail=5)
    for x in (*case.inputs[:5], case.do):
        x[-5:] = torch.nan
    out = case.run(rule)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not out[name][-5:].any(), name
        assert out[name][:-5].isfinite().all(), name


@RULES
def test_g_below_minus_1000_forgets_everything_and_has_no_gradient(draw: Callable, rule: Callable) -> None:
    case = draw([100])
    at = torch.tensor([20, 50, 51, 99])
    case.g[at] = torch.tensor([-torch.inf, -1e30, -1001.0, -torch.inf]).double()[:, None]
    out = case.run(rule)
    assert all(x.isfinite().all() for x in out.values())
    assert not out["dg"][at].any()
    rest = case._replace(**{x: getattr(case, x)[51:] for x in ("q", "k", "v", "g", "beta", "do")}, cu_seqlens=[0, 49])
    # The tokens behind a forgetting one do not know what came before. The chunk grid of `rest` is another: 100 eps.
    torch.testing.assert_close(rest.run(rule)["o"], out["o"][51:], rtol=0, atol=1e-13)


@RULES
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("operand", ["q", "k", "v", "g", "beta", "do", "initial_state"])
def test_nan_stays_in_its_document(draw: Callable, rule: Callable, operand: str, poison: float) -> None:
    case = draw([3, 66, 5])
    clean = case.run(rule)
    getattr(case, operand)[1 if operand == "initial_state" else 40] = poison
    poisoned = case.run(rule)
    assert any(not x.isfinite().all() for x in poisoned.values())
    for name, x in poisoned.items():
        own = slice(1, 2) if "state" in name else slice(3, 69)
        x[own] = clean[name][own]
        assert torch.equal(x, clean[name]), name


@RULES
def test_float64_inside_whatever_the_inputs(draw: Callable, rule: Callable) -> None:
    case = draw([70])
    dtypes = [torch.bfloat16] * 3 + [torch.float32] * 3
    low = [x.to(dtype).requires_grad_() for x, dtype in zip(case.inputs, dtypes, strict=True)]
    o, final_state = rule(*low[:5], case.cu_seqlens, initial_state=low[5])
    high = rule(*(x.double() for x in low[:5]), case.cu_seqlens, initial_state=low[5].double())
    assert torch.equal(o, high[0]) and torch.equal(final_state, high[1])
    assert [grad.dtype for grad in torch.autograd.grad(o.sum(), low)] == dtypes


@RULES
def test_a_batch_axis_may_stand_on_any_operand(draw: Callable, rule: Callable) -> None:
    case = draw([7, 3])
    o, final_state = rule(*case.inputs[:5], case.cu_seqlens)
    for i in range(5):
        operands = [x[None] if j == i else x for j, x in enumerate(case.inputs[:5])]
        o_i, final_state_i = rule(*operands, torch.tensor(case.cu_seqlens))
        assert torch.equal(o_i, o[None] if i == 0 else o) and torch.equal(final_state_i, final_state)


@RULES
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda c: {"q": c.q.numpy()}, TypeError, "q is of type ndarray"),
        (lambda c: {"v": c.v.long()}, ValueError, "v has dtype torch.int64"),
        (lambda c: {"q": c.q[0]}, ValueError, "q has shape"),
        (lambda c: {"q": c.q.expand(2, *c.q.shape)}, ValueError, "q has shape"),
        (lambda c: {"k": c.k[:-1]}, ValueError, "k has shape"),
        (lambda c: {"v": c.v[:-1]}, ValueError, "v has shape"),
        (lambda c: {"v": c.v[:, :3]}, ValueError, "v has 3 heads and q has 2"),
        (lambda c: {"v": c.v[:, :0]}, ValueError, "v has 0 heads"),
        (lambda c: {"g": c.g[:, :2]}, ValueError, "g has shape"),
        (lambda c: {"beta": c.beta[..., None]}, ValueError, "beta has shape"),
        (lambda c: {"initial_state": c.initial_state[:1]}, ValueError, "initial_state has shape"),
        (lambda c: {"cu_seqlens": [0, 4.5, 10]}, TypeError, "cu_seqlens"),
        (lambda c: {"cu_seqlens": 10}, TypeError, "cu_seqlens"),
        (lambda c: {"cu_seqlens": []}, ValueError, "cu_seqlens"),
        (lambda c: {"cu_seqlens": [1, 4, 10]}, ValueError, "cu_seqlens"),
        (lambda c: {"cu_seqlens": [0, 7, 4]}, ValueError, "cu_seqlens"),
        (lambda c: {"cu_seqlens": [0, 7, 11]}, ValueError, "cu_seqlens"),
    ],
)
def test_bad_operands_are_named(draw: Callable, rule: Callable, change: Callable, error: type, words: str) -> None:
    case = draw([7, 3])
    case = case._replace(**change(case))
    with pytest.raises(error, match=words):
        rule(*case.inputs[:5], case.cu_seqlens, initial_state=case.initial_state)
