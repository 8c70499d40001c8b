"""Planted faults: each is caught by the checks that it names, what catches none is told, and nothing stays planted."""

import io
import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import deltaspan.verify
from deltaspan import cli
from deltaspan.verify import checks, mutants, run_mutants
from deltaspan.verify.mutants import MUTANT, MUTANTS, Mutant
from tests.verify.support import small

NAMED = {
    "drop the halo", "swap two ranks' summaries", "transpose M", "skip a document reset",
    "reduce dq over the wrong group", "zero entry state in one rank's backward", "wrong owner of a head",
    "off-by-one cut", "unmasked tail", "adjoint chain in forward order", "decay of the wrong head", "stale tables",
}  # fmt: skip


def harmless(merge: Callable) -> Callable:
    return lambda M, X, b: merge(M, X, b)


def raising(merge: Callable) -> Callable:
    def wrong(*args: object) -> None:
        raise ZeroDivisionError("broken on purpose")

    return wrong


def mutant(fault: Callable) -> Mutant:
    return Mutant("odd", "Nothing.", ("forward", "gradients"), "deltaspan.kernels.torch.walk:merge", fault)


@pytest.fixture
def one_small_case(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [small(rng, decay="no decay")]  # in zigzag, document 0 is in three fragments
    monkeypatch.setattr(mutants, "mutant_cases", lambda seed: cases)


def shown(report: mutants.MutantReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(report.table())
    return console.file.getvalue()


def test_every_mutant_is_caught_by_every_check_that_it_names(rng: torch.Generator) -> None:
    seed, seen = rng.initial_seed() % 2**32, []
    report = run_mutants(device="cpu", seed=seed, progress=lambda *said: seen.append(said))
    assert report.ok, (seed, [row for row in report.rows if not row.ok])
    rows = {row.row: row for row in report.rows if row.name == MUTANT}
    assert list(rows) == [m.name for m in MUTANTS]
    assert set(rows) >= NAMED
    for m in MUTANTS:
        assert all("tensor " in rows[m.name].figures[check] for check in m.checks)
        assert rows[m.name].figures["breaks"] == m.breaks
    assert seen[-1] == ("mutants", len(MUTANTS), len(MUTANTS))
    text = shown(report)
    assert all(name in text for name in rows)
    assert "survived" not in text


def test_every_check_of_simulated_ranks_has_a_mutant() -> None:
    assert {check for m in MUTANTS for check in m.checks} == checks.CHECKS.keys() - {"processes = simulated ranks"}
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("m", MUTANTS, ids=lambda m: m.name)
def test_planting_replaces_one_function_and_puts_it_back(m: Mutant) -> None:
    module, name = m.where.split(":")
    owner = import_module(module)
    before = dict(vars(owner))
    with m.planted():
        assert [key for key, value in vars(owner).items() if value is not before[key]] == [name]
    assert vars(owner) == before
    with pytest.raises(ZeroDivisionError), m.planted():
        raise ZeroDivisionError
    assert all(value is before[key] for key, value in vars(owner).items())


@pytest.mark.parametrize("fault", [harmless, raising])
def test_a_survivor_is_a_failure(fault: Callable, one_small_case: None, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = (mutant(harmless), mutant(fault)) if fault is raising else (mutant(harmless),)
    monkeypatch.setattr(deltaspan.verify, "run_mutants", partial(run_mutants, mutants=planted))
    done = CliRunner().invoke(cli.app, ["verify", "--mutants", "--device", "cpu", "--seed", "3", "--json", "-"])
    assert done.exit_code == 1
    record = json.loads(done.stdout)
    assert set(record) == {"machine", "checks", "ok"} and record["ok"] is False
    rows = [check for check in record["checks"] if check["name"] == "mutant"]
    assert [(row["row"], row["ok"]) for row in rows] == [("odd", False)] * len(planted)
    assert rows[0]["figures"] == {"breaks": "Nothing.", "forward": "not noticed", "gradients": "not noticed", "seed": 3}
    if fault is raising:
        assert rows[1]["figures"]["forward"] == "not noticed, but ZeroDivisionError: broken on purpose"
    assert "survived" in shown(run_mutants(device="cpu", seed=3, mutants=planted))


def test_half_caught_is_not_caught(one_small_case: None) -> None:
    half = Mutant("half", "Maps.", ("forward", "convolution"), "deltaspan.kernels.torch.walk:merge", transposed)
    (row,) = (row for row in run_mutants(device="cpu", seed=4, mutants=[half]).rows if row.name == MUTANT)
    assert not row.ok
    assert "tensor " in row.figures["forward"] and row.figures["convolution"] == "not noticed"


def transposed(merge: Callable) -> Callable:
    return lambda M, X, b: merge(M.mT, X, b)


def test_nothing_is_planted_where_the_cases_fail_as_they_are(
    one_small_case: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "bound", lambda dtype, tensor, measure: 1e-30)
    report = run_mutants(device="cpu", seed=5)
    assert not report.ok
    assert MUTANT not in {row.name for row in report.rows}
    assert "nothing was planted" in shown(report)


def test_the_documentation_has_every_mutant_and_its_checks() -> None:
    rows = [f"| {m.name} | {m.breaks} | {'; '.join(m.checks)} |" for m in MUTANTS]
    text = (Path(__file__).parents[2] / "docs/exactness.md").read_text(encoding="utf-8")
    assert "\n".join(rows) in text
