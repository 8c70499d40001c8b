"""Compile reports: kernels within their budgets, and budgets that can be exceeded."""

import ast
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaspan.bench import compile as ahead


@pytest.mark.triton
def test_every_kernel_keeps_its_budget() -> None:
    made = ahead.report()
    assert [row["name"] for row in made["kernels"]] == list(ahead.CASES)
    for row in made["kernels"]:
        assert row["over"] == [], row
        products = max(row["opcodes"].get(op, 0) for op in ("HGMMA", "HMMA", "FFMA"))
        assert 0 < row["registers"] <= 255 and products > 10
    without_tiles = ("convolution", "rows of", "gradient of raw rows")
    assert all(row["shared"] > 0 for row in made["kernels"] if not row["name"].startswith(without_tiles))


def test_every_kernel_is_held_to_a_budget() -> None:
    home = Path(ahead.__file__).parents[1] / "kernels/hopper"
    found = {
        f"deltaspan.kernels.hopper.{file.stem}:{node.name}"
        for file in home.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert found == {case.kernel for case in ahead.CASES.values()}


@pytest.mark.triton
@pytest.mark.parametrize("limit", ["registers", "shared", "instructions"])
def test_a_kernel_over_budget_is_told(limit: str) -> None:
    name, case = next(iter(ahead.CASES.items()))
    (row,) = ahead.report({name: replace(case, **{limit: 100})})["kernels"]
    (over,) = row["over"]
    assert over.startswith(f"{limit} ") and over.endswith(" > 100")


@pytest.mark.triton
def test_spills_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a compiler that is given too few registers."""
    gluon = import_module("deltaspan.kernels.hopper.ahead")
    compiled = gluon.triton.compile

    def starved(source, target, options):
        return compiled(source, target=target, options=options | {"maxnreg": 96})

    monkeypatch.setattr(gluon.triton, "compile", starved)
    name, case = next(iter(ahead.CASES.items()))
    (row,) = ahead.report({name: case})["kernels"]
    assert row["spills"] > 0 and any("spills" in over for over in row["over"])


@pytest.mark.triton
@pytest.mark.parametrize(("way", "found"), [("fenced", False), ("used", False), ("neither", True)])
def test_loads_that_an_arrival_overtakes_are_told(way: str, found: bool) -> None:
    arguments = {"tiles": "tiles<bf16[64, 128]>", "out": "*bf16", "n": "i32"}
    case = ahead.Case("tests.bench.overtaken:copy", arguments, {"WAY": way}, 4, 255, ahead.WHOLE, 1000, "a test")
    made = ahead.report({"copy": case})
    (row,) = made["kernels"]
    assert row["opcodes"]["UTMALDG"] > 0 and row["opcodes"]["LDS"] > 8
    assert row["in_flight"] == (8 if found else 0), "a thread loads 128 bytes, 16 at a time"
    assert row["over"] == (["in_flight 8 > 0"] if found else [])
    assert ahead.IN_FLIGHT in [column.header for column in ahead.table(made).columns]


def test_every_case_says_why_its_limits_are_as_they_are() -> None:
    assert all(case.reason and case.kernel.startswith("deltaspan.kernels.") for case in ahead.CASES.values())


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(ahead, "report", missing)
    app = ahead.typer.Typer()
    app.command()(ahead.main)
    done = CliRunner().invoke(app, [])
    assert done.exit_code == 2 and "deltaspan[kernels]" in done.stderr
