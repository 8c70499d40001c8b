"""The table of cases: what its names promise, the same in every draw of a seed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deltaspan.verify.cases import BETAS, DECAYS, FACTORS, KEYS, PACKS, Case, Inputs, draw, quick_cases
from tests.verify.support import SMALL, small


def tensors(inputs: Inputs) -> list[Tensor]:
    values = [x for value in vars(inputs).values() for x in (value if isinstance(value, tuple) else (value,))]
    return [x for x in values if x is not None]


def test_a_case_draws_the_same_inputs_again_and_others_from_another_seed(rng: torch.Generator) -> None:
    case = small(rng)
    first, again, other = (tensors(draw(c)) for c in (case, case, replace(case, seed=case.seed + 1)))
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, other))


def test_the_packs_are_awkward() -> None:
    lengths = [length for pack in PACKS.values() for length in pack]
    assert {0, 1} <= set(lengths)
    assert any(length % 64 == 0 for length in lengths if length)
    assert max(map(sum, PACKS.values())) <= 2000
    assert min(map(sum, PACKS.values())) < 8  # the most ranks of a case
    assert all(sum(pack) > 0 for pack in PACKS.values())


@pytest.mark.parametrize("pack", PACKS)
def test_ragged_partitions_cut_at_random_and_repeat(pack: str, rng: torch.Generator) -> None:
    case = small(rng, pack=pack, layout="ragged", ranks="8 ranks")
    part = case.partition()  # raises if a token is missed or given twice
    assert part.layout == "explicit"
    assert part == case.partition()


def test_decays_are_what_their_names_say(rng: torch.Generator) -> None:
    drawn = {name: sample(rng, 500, 6) for name, sample in DECAYS.items()}
    assert all((g <= 0).all() and g.shape == (500, 6) for g in drawn.values())
    assert drawn["one g of -inf"].isinf().sum() == 1
    assert not drawn["no decay"].any()
    assert drawn["slow decay"].min() >= -1e-4
    assert drawn["strong decay"].mean() < -8
    assert set(drawn["heads with and without decay"].unique().tolist()) == {-10.0, 0.0}
    assert -1 < drawn["moderate decay"].mean() < -0.05


def test_betas_are_what_their_names_say(rng: torch.Generator) -> None:
    drawn = {name: sample(rng, 500, 6) for name, sample in BETAS.items()}
    assert all((beta >= 0).all() and (beta <= 2).all() for beta in drawn.values())
    assert drawn["beta up to 2"].max() > 1.9
    assert drawn["beta near 1"].min() >= 0.999
    assert 0.3 < (drawn["some beta of 0"] == 0).double().mean() < 0.7


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("dtype", FACTORS["dtype"])
def test_keys_keep_what_they_promise_to_the_op(keys: str, dtype: str, rng: torch.Generator) -> None:
    inputs = draw(small(rng, pack="off the chunk grid", keys=keys, dtype=dtype, beta="beta up to 2"))
    squares = inputs.k.double().square().sum(-1)
    if KEYS[keys].unit_keys:
        assert squares.max() < 1.03
    writes = inputs.beta.double() * squares.repeat_interleave(2, dim=-1)
    assert writes.max() <= 2 * (1 + 2**-7)  # keys rounded to bf16 are up to 2^-8 longer, both factors of |k|^2
    longest = squares.max().sqrt()
    assert longest > 1.5 if keys == "long keys" else longest < 1.02
    cosines = torch.nn.functional.cosine_similarity(inputs.k[:100, 0].double(), inputs.k[100:200, 0].double(), dim=-1)
    assert (cosines.mean() > 0.9) == (keys == "collinear keys")


def test_a_label_names_every_choice() -> None:
    assert all(getattr(SMALL, name) in SMALL.label for name in FACTORS)
    cases: list[Case] = quick_cases(1)
    assert len({case.label for case in cases}) == len(cases)
