"""The suite from cases to report, on few small cases, and through the command line."""

import io
import json
import math
import multiprocessing

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from deltaspan import cli
from deltaspan.verify import Report, Row, checks, run_suite, suite
from deltaspan.verify.cases import Case
from tests.verify.support import small


@pytest.fixture
def tiny(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """The quick suite, made of three small cases."""
    cases = [small(rng, ranks="1 rank"), small(rng, ranks="2 processes"), small(rng, dtype="bfloat16")]
    monkeypatch.setitem(suite.SUITES, "quick", lambda seed: cases)
    return cases


def shown(report: Report) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(report.table())
    return console.file.getvalue()


def test_a_tiny_suite_holds(tiny: list[Case]) -> None:
    threads, before, seen = torch.get_num_threads(), multiprocessing.active_children(), []
    report = run_suite(device="cpu", seed=5, progress=lambda *said: seen.append(said))
    assert report.ok, [row for row in report.rows if not row.ok]
    assert {row.name for row in report.rows} == {*checks.CHECKS, "many ranks against one"}
    assert {row.row for row in report.rows if row.name == "forward"} == {case.label for case in tiny}
    assert all(row.figures["seed"] == 5 for row in report.rows)
    assert ("2 processes over gloo", 1, 1) in seen
    assert ("checking cases", 3, 3) in seen
    assert torch.get_num_threads() == threads
    assert multiprocessing.active_children() == before
    record = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert set(record) == {"machine", "checks", "ok"}
    assert all(set(check) == {"name", "row", "ok", "figures"} for check in record["checks"])
    assert {"platform", "cpus", "torch", "blas", "threads"} <= set(record["machine"])
    assert record["machine"]["threads"] == 1


def test_a_check_that_raises_is_a_red_row(tiny: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(run: checks.CaseRun) -> checks.Verdict:
        raise ZeroDivisionError("broken on purpose")

    monkeypatch.setitem(checks.CHECKS, "forward", raises)
    rows = suite.run_cases([tiny[0]], "cpu")
    assert [row.name for row in rows if not row.ok] == ["forward"]
    assert rows[0].figures["trouble"] == "ZeroDivisionError: broken on purpose"


def test_several_ranks_may_not_be_much_worse_than_one() -> None:
    def pool(many: float, one: float) -> Row:
        sides = [[checks_error("tensor", x), checks_error("element", 4 * x)] for x in (many, one)]
        made = suite.Pool()
        made.add(100, sides)
        made.add(300, sides)
        return made.row("bfloat16", "o")

    assert pool(1.09e-3, 1e-3).ok
    row = pool(1.12e-3, 1e-3)
    assert not row.ok
    assert (row.figures["over"], row.figures["tokens"]) == ("tensor", 400)
    assert not pool(math.inf, 1e-3).ok
    assert pool(5e-7, 1e-7).ok  # less than 8 u = 4.8e-7 more
    assert not pool(7e-7, 1e-7).ok


def checks_error(measure: str, value: float) -> suite.Error:
    return suite.Error(measure, value, None)


def test_a_report_is_ok_only_if_every_row_is_and_there_is_one() -> None:
    good, bad = Row("forward", "a", True, {"error": 1.0, "bound": 2.0}), Row("forward", "b", False, {"error": math.inf})
    assert Report({}, [good], 0).ok
    assert not Report({}, [good, bad], 0).ok
    assert not Report({}, [], 0).ok
    record = Report({}, [good, bad], 0).to_json()
    assert [check["figures"]["error"] for check in record["checks"]] == [1.0, "not finite"]


def test_the_table_counts_rows_and_shows_failures_with_their_figures() -> None:
    rows = [
        Row("forward", "case [a]", True, {"tensor": "o", "error": 1e-3, "bound": 2e-3, "seed": 9}),
        Row("forward", "case [b]", True, {"tensor": "o", "error": 1.5e-3, "bound": 2e-3, "head": None}),
        Row("replay", "case [c]", False, {"tensor": "dk", "rank": 2}),
    ]
    text = shown(Report({"torch": "2.0"}, rows, seed=77))
    assert "error 0.0015" in text and "error 0.001," not in text
    assert "case [c]" in text and "tensor dk, rank 2" in text
    assert "case [a]" not in text
    assert "torch 2.0" in text and "77" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"suite": "thorough"}, r"suite must be one of quick, got 'thorough'"),
        ({"device": "tpu"}, r"device must be one of cpu, cuda or None, got 'tpu'"),
        ({"seed": -1}, r"seed must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_had_is_refused(arguments: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        run_suite(**arguments)


@pytest.mark.parametrize("holds", [True, False])
def test_the_command_line_says_it_in_json_and_by_its_exit_code(
    holds: bool, tiny: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(suite.SUITES, "quick", lambda seed: [tiny[0]])
    if not holds:
        monkeypatch.setattr(checks, "bound", lambda dtype, tensor, measure: 1e-30)
    done = CliRunner().invoke(cli.app, ["verify", "--device", "cpu", "--json", "-"])
    assert done.exit_code == (0 if holds else 1)
    record = json.loads(done.stdout)
    assert record["ok"] is holds
    assert {check["name"] for check in record["checks"] if not check["ok"]} == (
        set() if holds else {"forward", "gradients", "convolution"}
    )
