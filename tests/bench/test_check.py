"""What is wrong is not timed: the truth is held against planted errors."""

import math
from itertools import accumulate

import pytest
import torch

import deltaspan as ds
from deltaspan.bench.check import BOUND, Truth, objection
from deltaspan.bench.operands import DECAYS, Operands, Results, draw
from deltaspan.bench.sides import Deltaspan

LENGTHS, HEADS = [130, 1, 70], (3, 6)


def found_and_true(rng: torch.Generator, decay: str) -> tuple[Operands, Results, Truth]:
    x = draw(sum(LENGTHS), HEADS, decay, device="cpu", seed=rng.initial_seed())
    part = ds.partition([0, *accumulate(LENGTHS)], 1)
    return x, Deltaspan(ds.build_context(part, device="cpu")).step(x), Truth.of(x, part.cu_seqlens)


@pytest.mark.parametrize("decay", DECAYS)
def test_what_is_right_passes(rng: torch.Generator, decay: str) -> None:
    _, found, truth = found_and_true(rng, decay)
    errors = {name: truth.error(name, x) for name, x in found._asdict().items()}
    # one rounding of each result to bf16, uniform in the last place: 2^-8 / 12^(1/2) = 1.1e-3 of an element at 1,
    # up to twice that of one below 2
    assert objection(errors) is None and max(errors.values()) < 2.3e-3
    assert truth.key_heads == [0, 2]


@pytest.mark.parametrize("name", Results._fields)
def test_an_error_in_any_result_is_found_in_the_first_and_the_last_head(rng: torch.Generator, name: str) -> None:
    _, found, truth = found_and_true(rng, "moderate")
    for head in (0, -1):
        wrong = getattr(found, name).double()
        wrong[:, :, head] *= -1  # off by twice the head's share of the tensor's RMS, which for dg may be small
        assert truth.error(name, wrong) > BOUND
    wrong = getattr(found, name).clone()
    wrong[0, 77, 1].view(-1)[0] = torch.nan  # in a head that has no truth
    assert truth.error(name, wrong) == math.inf


def test_a_neighbour_s_results_are_wrong(rng: torch.Generator) -> None:
    """Value heads in the wrong group, or a pack read one token late."""
    _, found, truth = found_and_true(rng, "moderate")
    for wrong in (found.o.roll(1, dims=2), found.o.roll(1, dims=1)):
        assert truth.error("o", wrong) > 1


def test_an_objection_names_what_is_off() -> None:
    assert objection({"o": 0.002, "dk": 0.03, "dg": math.inf}) == "off by 3.0e-02 (dk), inf (dg), allowed 1e-02"
    assert objection({"o": math.nan}) is not None
    assert objection({"o": BOUND}) is None


def test_operands_are_as_they_are_described(rng: torch.Generator) -> None:
    seed = rng.initial_seed()
    moderate, slow = (draw(500, HEADS, decay, device="cpu", seed=seed) for decay in DECAYS)
    for x in (moderate, slow):
        assert [t.dtype for t in x] == [torch.bfloat16] * 3 + [torch.float32] * 2 + [torch.bfloat16]
        for keys in (x.q, x.k):
            assert keys.shape == (1, 500, 3, 128)
            assert (keys.float().norm(dim=-1) - 1).abs().max() < 2**-8  # every element rounded by at most that
        assert x.beta.min() > 0 and x.beta.max() < 1 and x.v.float().std() == pytest.approx(1, abs=0.02)
    assert slow.g.max() <= 0 and slow.g.min() >= -1e-4 and slow.g.std() > 2e-5
    assert moderate.g.max() < 0
    # A of each head: softplus(x - 4) has a mean of 0.030, known to 5 % from 500 draws
    per_head = -moderate.g.mean((0, 1)) / 0.030
    assert per_head.min() > 0.7 and per_head.max() < 20 and per_head.std() > 0.1
    again = draw(500, HEADS, "moderate", device="cpu", seed=seed)
    assert all(map(torch.equal, moderate, again))
    assert not torch.equal(moderate.q, draw(500, HEADS, "moderate", device="cpu", seed=seed + 1).q)
