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
