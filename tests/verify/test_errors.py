"""The measures of an error: they see what is planted, and say where."""

import pytest
import torch
from torch import Tensor

import deltaspan as ds
from deltaspan.verify.errors import MEASURES, Error, Rows, Seam, errors

LENGTHS = [100, 0, 150, 60]
HEADS, FEATURES = 4, 8
PART = ds.partition([0, 100, 100, 250, 310], 3, layout="zigzag_per_document")
ROWS = Rows.tokens(PART)
SMALLEST = 1e-300


def measured(found: Tensor, truth: Tensor, rows: Rows = ROWS, **options: Tensor) -> dict[str, Error]:
    return {error.measure: error for error in errors(found, truth, rows, SMALLEST, **options)}


@pytest.fixture
def truth(rng: torch.Generator) -> Tensor:
    return torch.randn(PART.total_tokens, HEADS, FEATURES, dtype=torch.float64, generator=rng)


def test_the_seams_are_those_of_the_partition() -> None:
    # 150 tokens in 6 pieces of 25, held by ranks 0 1 2 2 1 0
    ranks = [0, 1, 2, 2, 1, 0]
    expected = [Seam(2, 25 * i, ranks[i - 1], ranks[i]) for i in range(1, 6)]
    assert sorted(seam for seam in ROWS.seams if seam.document == 2) == expected
    assert {seam.document for seam in ROWS.seams} == {0, 2, 3}


def test_no_error_measures_nothing(truth: Tensor) -> None:
    found = measured(truth.clone(), truth)
    assert tuple(found) == MEASURES
    assert all(error.value == 0 for error in found.values())


def test_one_wrong_element_beside_a_seam_is_found_with_its_seam(truth: Tensor) -> None:
    wrong = truth.clone()
    wrong[100 + 76, 2, 5] += 0.5  # document 2, one token behind the seam at 75
    error = measured(wrong, truth)
    document, head, token, seam = error["element"].place
    assert (document, head, token, seam) == (2, 2, 76, Seam(2, 75, 2, 2))
    assert error["document"].place[:2] == (2, 2)
    assert error["seam"].place[:2] == (2, 2)
    r = truth[100:250, 2].square().mean().sqrt()
    expected = 0.5 / (r + truth[176, 2, 5].abs())
    torch.testing.assert_close(error["element"].value, expected.item(), rtol=1e-12, atol=0.0)
    # 0.5 in one of 150 * 8 elements of the document and head, or of 310 * 4 * 8 of the tensor
    torch.testing.assert_close(error["document"].value, (0.5 / 1200**0.5 / r).item(), rtol=1e-12, atol=0.0)
    whole = 0.5 / truth.square().sum().sqrt()
    torch.testing.assert_close(error["tensor"].value, whole.item(), rtol=1e-12, atol=0.0)


def test_a_bad_seam_counts_for_more_than_a_tensor(rng: torch.Generator) -> None:
    part = ds.partition([0, 4000], 2, layout="contiguous")
    rows = Rows.tokens(part)
    truth = torch.randn(4000, 1, FEATURES, dtype=torch.float64, generator=rng)
    wrong = truth.clone()
    wrong[2000:2064] *= 1.1
    error = measured(wrong, truth, rows)
    assert error["seam"].place == (0, 0, 2000, Seam(0, 2000, 0, 1))
    there, wide = truth[1936:2064], max(truth.square().mean().sqrt(), truth[1936:2064].square().mean().sqrt())
    expected = (wrong[1936:2064] - there).square().mean().sqrt() / wide
    torch.testing.assert_close(error["seam"].value, expected.item(), rtol=1e-12, atol=0.0)
    # 64 wrong tokens of the seam's 128, of the tensor's 4,000: sqrt(4000 / 128) apart, but for the draw
    assert 4 < error["seam"].value / error["tensor"].value < 7


def test_swapped_heads_are_found_in_one_of_them(truth: Tensor) -> None:
    wrong = truth.clone()
    wrong[:, [1, 3]] = truth[:, [3, 1]]
    error = measured(wrong, truth)
    assert error["document"].place.head in (1, 3)
    assert error["document"].value > 1
    assert error["element"].place.head in (1, 3)


def test_a_dropped_document_is_named(truth: Tensor) -> None:
    wrong = truth.clone()
    wrong[250:] = 0
    error = measured(wrong, truth)
    assert error["document"].place.document == error["element"].place.document == 3
    torch.testing.assert_close(error["document"].value, 1.0, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_is_infinitely_wrong(bad: float, truth: Tensor) -> None:
    wrong = truth.clone()
    wrong[30, 1, 0] = bad
    error = measured(wrong, truth)
    assert all(error[measure].value == torch.inf for measure in MEASURES)
    assert error["element"].place[:3] == (*error["document"].place[:2], 30) == (0, 1, 30)


def test_a_truth_that_is_no_number_is_no_excuse(truth: Tensor) -> None:
    found = truth.clone()
    truth[30, 1, 0] = torch.nan
    assert all(error.value == torch.inf for error in measured(found, truth).values())


def test_a_truth_of_zero_is_measured_against_the_smallest(truth: Tensor) -> None:
    zero = torch.zeros_like(truth)
    assert all(error.value == 0 for error in measured(zero, zero).values())
    wrong = zero.clone()
    wrong[7] = 1e-9
    assert all(error.value > 1e200 for error in measured(wrong, zero).values())
    terms = torch.ones(truth.shape[:2], dtype=torch.float64)
    assert all(0 < error.value <= 1e-9 for error in measured(wrong, zero, terms=terms).values())


def test_states_are_named_by_document_and_parameters_by_nothing(rng: torch.Generator) -> None:
    states = torch.randn(len(LENGTHS), HEADS, 6, dtype=torch.float64, generator=rng)
    wrong = states.clone()
    wrong[3, 1, 2] += 1
    error = measured(wrong, states, Rows.documents(len(LENGTHS)))
    assert "seam" not in error
    assert error["element"].place == (3, 1, None, None)
    weight = torch.randn(1, 1, 12, dtype=torch.float64, generator=rng)
    assert measured(weight + 1, weight, Rows.one())["tensor"].value > 0.1
