"""The checks turn red for what they are there for, and name it."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from deltaspan.exchange import EXCHANGES, simulated
from deltaspan.kernels import torch as tier
from deltaspan.verify import checks, step
from deltaspan.verify.bounds import BF16_ROUNDING, bound
from deltaspan.verify.cases import WAYS, Case, Inputs
from deltaspan.verify.processes import RanksFailed
from deltaspan.verify.run import CaseRun, cancelled
from deltaspan.verify.step import GRADIENTS, OUTPUTS, Results
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


ALIKE = {"every way alike": "way", "all_to_all = ring = all_gather": "exchange"}


@pytest.mark.parametrize("check", ALIKE)
def test_ways_and_exchanges_are_compared_to_the_last_bit(run: CaseRun, check: str) -> None:
    row = row_of(run, check)
    assert row.ok
    assert row.figures["tensors"] == 2 * 3 * 8  # two others, on three ranks, all results of the op
    run.simulated[2]["dk"].view(-1)[0] *= 1 + 2**-52
    row = row_of(run, check)
    assert not row.ok
    compared = row.figures.pop(ALIKE[check])
    assert row.figures == {"tensor": "dk", "rank": 2}
    own, other = compared.split(" and ")
    assert (own, other) in {"way": [("autograd", "replay"), ("autograd", "replay under autograd")]}.get(
        ALIKE[check], [("all_to_all", "ring")]
    )


def others(case: Case, factor: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a case's own value of a factor is compared with, without doing it."""
    run, asked = CaseRun(case, "cpu"), []
    run.simulated = [{name: torch.zeros(1) for name in (*OUTPUTS, *GRADIENTS)}]

    def operation(case: Case, *_: object) -> list[Results]:
        asked.append(getattr(case, factor))
        return run.simulated

    with monkeypatch.context() as patched:
        patched.setattr(checks.step, "operation", operation)
        assert {"way": checks.ways, "exchange": checks.exchanges}[factor](run).ok
    return asked


@pytest.mark.parametrize("own", EXCHANGES)
def test_every_exchange_is_run(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    assert sorted([own, *others(small(rng, exchange=own), "exchange", monkeypatch)]) == sorted(EXCHANGES)


@pytest.mark.parametrize("own", WAYS)
def test_a_way_meets_every_other_sooner_or_later(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    """And in each case one that keeps where it replays, or the other way round; the same ones for the same seed."""
    met, draws = set(), 0
    while met != WAYS.keys() - {own}:
        draws += 1
        assert draws < 200  # a way is missed by chance in fewer than (1 - 1/9)^200 of all runs of this test
        case = small(rng, way=own)
        first, second = others(case, "way", monkeypatch)
        assert [first, second] == others(case, "way", monkeypatch)
        assert len({own, first, second}) == 3
        assert {WAYS[own].again, WAYS[first].again} == {True, False}
        met |= {first, second}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", ["1 rank", "3 ranks"])
def test_every_way_gives_the_same_bits(rng: torch.Generator, ranks: str, way: str) -> None:
    case = small(rng, ranks=ranks, states="no states" if ranks == "1 rank" else "initial and final states")
    run = CaseRun(case, "cpu")
    found = step.operation(replace(case, way=way), run.inputs, run.context)
    expected = [{name: row[name] for name in found[0]} for row in run.simulated]
    assert set(found[0]) == {*OUTPUTS, *GRADIENTS} - (
        {"final_state", "dinitial_state"} if ranks == "1 rank" else set()
    )  # fmt: skip
    assert checks.compare(expected, found).ok


def test_ways_do_what_their_names_say(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the collectives of a step, all ranks' taken together, and by how often the first stage is run."""
    runs, asked = [], []
    prep, send = tier.prep, simulated._exchange
    monkeypatch.setattr(tier, "prep", lambda *args, **kwargs: (runs.append(1), prep(*args, **kwargs))[1])
    monkeypatch.setattr(simulated, "_exchange", lambda sent: (asked.append(sent[0].name), send(sent))[1])
    states = ("summaries", "entry_states")
    for way in WAYS:
        run = CaseRun(small(rng, way=way), "cpu")
        run.inputs, run.context  # noqa: B018, made before what is counted
        runs.clear(), asked.clear()
        step.operation(run.case, run.inputs, run.context)
        twice = WAYS[way].again or (WAYS[way].checkpoint is not None and not WAYS[way].handle)
        assert sorted(asked) == sorted([*states * (2 if twice else 1), "adjoint_offsets", "exit_adjoints"]), way
        assert len(runs) == 3 * {"full": 1, "reentrant checkpoint": 3}.get(way, 2), way


def test_exchanges_need_a_seam(rng: torch.Generator) -> None:
    assert checks.exchanges(CaseRun(small(rng, ranks="1 rank", layout="contiguous"), "cpu")) is None


def test_same_bits_are_of_one_type_shape_and_sign() -> None:
    zero = torch.zeros(2)
    assert checks.same_bits(torch.tensor([torch.nan, 1.0])[:1], torch.tensor([torch.nan]))
    for other in (-zero, zero.int(), zero[:1], zero[None]):
        assert not checks.same_bits(zero, other)
    broadcast = torch.ones(3).as_strided((3, 1), (1, 0))
    assert checks.same_bits(broadcast, broadcast.clone())


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


@pytest.mark.parametrize(("spared", "missed"), [("dx", "x or dy"), ("dv", "an operand of the op")])
def test_each_of_the_two_nans_has_to_show(spared: str, missed: str, rng: torch.Generator) -> None:
    """One is planted in the op, one in the convolution: neither's trace covers for the other's."""
    ours = (*OUTPUTS, *GRADIENTS) if spared == "dv" else ("y", "dx")
    run = Leaking(small(rng), "cpu")

    def without_trace(shards: list[Results]) -> None:
        for shard, clean in zip(shards, run.simulated, strict=True):
            shard.update({name: clean[name] for name in ours})

    run.change = without_trace
    row = row_of(run, "NaN stays in its document")
    assert not row.ok
    traceless = row.figures["trouble"].removesuffix(" left no trace in its own document")
    assert (traceless in ("x", "dy")) == (missed == "x or dy")


def test_a_nan_that_shows_nowhere_proves_nothing(rng: torch.Generator) -> None:
    run = Leaking(small(rng), "cpu")
    run.change = lambda shards: shards.__setitem__(slice(None), run.simulated)
    row = row_of(run, "NaN stays in its document")
    assert not row.ok
    assert "no trace" in row.figures["trouble"]


def test_what_may_cancel_is_measured_against_its_terms(rng: torch.Generator) -> None:
    run = CaseRun(small(rng, decay="one g of -inf", beta="some beta of 0"), "cpu")
    inputs, truth = run.inputs, run.truth
    terms = cancelled(inputs, truth)
    assert set(terms) == {"dg", "dbeta"}
    for t in range(len(inputs.q)):
        for head in range(2):  # both read key head 0
            g, beta = inputs.g[t, head].exp(), inputs.beta[t, head]
            sizes = [x[t, h].norm() for x, h in ((inputs.q, 0), (inputs.k, 0), (inputs.v, head))]
            dsizes = [truth[name][t, h].norm() for name, h in (("dq", 0), ("dk", 0), ("dv", head))]
            products = [size * dsize for size, dsize in zip(sizes, dsizes, strict=True)]
            dbeta = products[2] / beta / 64 if beta else torch.zeros_like(beta)
            torch.testing.assert_close(terms["dg"][t, head], g * (products[0] + products[1]) / 64)
            torch.testing.assert_close(terms["dbeta"][t, head], dbeta)


def test_bounds_follow_types() -> None:
    assert all(bound("float64", name, "element") == 1e-10 for name in ("o", "dg", "dweight"))
    assert bound("float32", "o", "tensor") == bound("bfloat16", "dg", "tensor") == 2.0**-16
    assert bound("bfloat16", "o", "element") == 2.0**-12 + BF16_ROUNDING < 2e-2
