"""The checks turn red for what they are there for, and name it."""

import copy
from collections.abc import Callable

import pytest
import torch

from deltaspan.verify import checks
from deltaspan.verify.bounds import BF16_ROUNDING, bound
from deltaspan.verify.cases import Inputs
from deltaspan.verify.processes import RanksFailed
from deltaspan.verify.run import CaseRun
from deltaspan.verify.step import Results
from tests.verify.support import small

# Of 19 tokens in 6 zigzag parts ranks 0 and 1 hold the first two, of 4 and 3 tokens; document 0 has the first 9.
DOCUMENT, TOKEN, SEAM = 0, 4, "rank 0|1 at token 4"
LAST = 3


@pytest.fixture
def run(rng: torch.Generator) -> CaseRun:
    return CaseRun(small(rng), "cpu")


def row_of(run: CaseRun, check: str) -> checks.Row:
    (row,) = (row for row in checks.rows_of(run) if row.name == check)
    return row


def tampered(run: CaseRun, change: Callable[[list[Results]], None]) -> CaseRun:
    """The run as if its ranks had returned something else."""
    shards = copy.deepcopy(run.simulated)
    change(shards)
    return CaseRun(run.case, run.device, processes=shards)


def test_every_check_that_applies_holds(run: CaseRun) -> None:
    rows = checks.rows_of(run)
    assert [row.name for row in rows] == [name for name in checks.CHECKS if name != "processes = simulated ranks"]
    assert all(row.ok for row in rows), rows


@pytest.mark.parametrize(
    ("tensor", "check"),
    [("o", "forward"), ("dq", "gradients"), ("dk", "gradients"), ("dv", "gradients"), ("dg", "gradients"),
     ("dbeta", "gradients"), ("y", "convolution"), ("dx", "convolution")],
)  # fmt: skip
def test_one_element_beside_a_seam_turns_its_row_red_and_is_named(run: CaseRun, tensor: str, check: str) -> None:
    def change(shards: list[Results]) -> None:
        x = shards[1][tensor]  # [1, tokens, ...], its first token is the seam's
        x[0, 0].view(-1)[-1] += 1e-4 * x.abs().max()

    rows = checks.rows_of(tampered(run, change))
    red = [row for row in rows if not row.ok]
    assert [row.name for row in red] == [check]
    figures = red[0].figures
    head = {"dq": 0, "dk": 0, "y": None, "dx": None}.get(tensor, 1)
    assert (figures["tensor"], figures["document"], figures["head"]) == (tensor, DOCUMENT, head)
    if figures["over"] in ("tensor", "element"):
        assert (figures["token"], figures["seam"]) == (TOKEN, SEAM)
    assert figures["error"] > figures["bound"]


@pytest.mark.parametrize("tensor", ["final_state", "dinitial_state", "dweight"])
def test_a_share_that_a_rank_withholds_turns_its_row_red(run: CaseRun, tensor: str) -> None:
    def change(shards: list[Results]) -> None:
        for shard in shards:
            shard[tensor] = shard[tensor].clone()
            shard[tensor][-1] = 0

    rows = [row for row in checks.rows_of(tampered(run, change)) if not row.ok]
    assert [row.figures["tensor"] for row in rows] == [tensor]
    if tensor != "dweight":
        assert rows[0].figures["document"] == LAST


def test_a_missing_result_is_red(run: CaseRun) -> None:
    row = row_of(tampered(run, lambda shards: [shard.pop("dbeta") for shard in shards]), "gradients")
    assert not row.ok
    assert "dbeta" in row.figures["trouble"]


def test_processes_have_to_return_the_same_bits(rng: torch.Generator) -> None:
    case = small(rng, ranks="2 processes")
    shards = CaseRun(case, "cpu").simulated
    assert row_of(CaseRun(case, "cpu", copy.deepcopy(shards)), "processes = simulated ranks").ok
    shards[1]["dg"].view(-1)[3] *= 1 + 2**-52
    row = row_of(CaseRun(case, "cpu", shards), "processes = simulated ranks")
    assert not row.ok
    assert row.figures == {"tensor": "dg", "rank": 1}


def test_processes_that_failed_turn_every_row_of_theirs_red_with_the_reason(rng: torch.Generator) -> None:
    rows = checks.rows_of(CaseRun(small(rng, ranks="2 processes"), "cpu", RanksFailed("rank 1: it rained")))
    red = {row.name: row.figures["trouble"] for row in rows if not row.ok}
    assert {"forward", "gradients", "convolution", "processes = simulated ranks"} <= red.keys()
    assert all("rank 1: it rained" in trouble for trouble in red.values())


@pytest.mark.parametrize("result", ["whole", "dshard", "dz"])
def test_the_round_trip_is_compared_to_the_last_bit(run: CaseRun, result: str) -> None:
    def change(shards: list[Results]) -> None:
        shards[0][result][-1, -1] += 1

    row = row_of(tampered(run, change), "shard and unshard")
    assert not row.ok
    assert row.figures["tensor"] == result


@pytest.mark.parametrize("check", ["forward, backward = autograd", "replay = saved"])
def test_both_directions_are_compared_with_autograd(run: CaseRun, check: str) -> None:
    run.simulated[2]["dk"].view(-1)[0] *= 1 + 2**-52
    assert row_of(run, check).figures == {"tensor": "dk", "rank": 2}


def test_same_bits_are_of_one_type_shape_and_sign() -> None:
    zero = torch.zeros(2)
    assert checks.same_bits(torch.tensor([torch.nan, 1.0])[:1], torch.tensor([torch.nan]))
    for other in (-zero, zero.int(), zero[:1], zero[None]):
        assert not checks.same_bits(zero, other)


class Leaking(CaseRun):
    """A run in which other inputs than its own give something else than they should."""

    change: Callable[[list[Results]], None]

    def simulate(self, inputs: Inputs) -> list[Results]:
        shards = super().simulate(inputs)
        if inputs is not self.inputs:
            self.change(shards)
        return shards


def test_a_nan_in_a_foreign_document_is_named(rng: torch.Generator) -> None:
    run = Leaking(small(rng), "cpu")
    run.change = lambda shards: [shard["dv"].fill_(torch.nan) for shard in shards]
    row = row_of(run, "NaN stays in its document")
    assert not row.ok
    assert row.figures["tensor"] == "dv"
    assert f"document {row.figures['document']}" not in row.figures["planted"]


def test_a_nan_that_shows_nowhere_proves_nothing(rng: torch.Generator) -> None:
    run = Leaking(small(rng), "cpu")
    run.change = lambda shards: shards.__setitem__(slice(None), run.simulated)
    row = row_of(run, "NaN stays in its document")
    assert not row.ok
    assert "no trace" in row.figures["trouble"]


def test_bounds_follow_types() -> None:
    assert all(bound("float64", name, "element") == 1e-10 for name in ("o", "dg", "dweight"))
    assert bound("float32", "o", "tensor") == bound("bfloat16", "dg", "tensor") == 2.0**-16
    assert bound("bfloat16", "o", "element") == 2.0**-12 + BF16_ROUNDING < 2e-2
