"""`deltaspan verify`: what the options ask for, and one line for a wrong wish."""

from typing import Any

import pytest
from typer.testing import CliRunner

import deltaspan.verify
from deltaspan.cli import app
from deltaspan.verify import Report, Row


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple, dict]]:
    """What the command asks for; it is told that all holds."""
    asked = []

    def answering(name: str) -> Any:
        def run(*args: Any, progress: Any, **options: Any) -> Report:
            asked.append((name, args, options))
            return Report({"torch": "2"}, [Row("forward", "a case", True, {})], seed=options["seed"] or 77)

        return run

    for name in ("run_suite", "run_mutants"):
        monkeypatch.setattr(deltaspan.verify, name, answering(name))
    return asked


def test_options_reach_the_suite_and_the_seed_is_shown(asked: list) -> None:
    done = CliRunner().invoke(app, ["verify", "--device", "cpu", "--seed", "41"])
    assert done.exit_code == 0
    assert asked == [("run_suite", ("quick",), {"device": "cpu", "seed": 41})]
    assert "seed 41" in " ".join(done.stdout.split())


def test_without_a_seed_the_fresh_one_is_shown(asked: list) -> None:
    assert "seed 77" in " ".join(CliRunner().invoke(app, ["verify"]).stdout.split())
    assert asked == [("run_suite", ("quick",), {"device": None, "seed": None})]


def test_mutants_instead_of_a_suite(asked: list) -> None:
    assert CliRunner().invoke(app, ["verify", "--mutants", "--seed", "41"]).exit_code == 0
    assert asked == [("run_mutants", (), {"device": None, "seed": 41})]


@pytest.mark.parametrize("mutants", [[], ["--mutants"]])
@pytest.mark.parametrize(
    ("seed", "said"),
    [("-1", "at least 0, got -1"), (str(1 << 63), f"at most {(1 << 63) - 1:,}, got {1 << 63}")],
)
def test_a_wrong_wish_is_one_line_and_exit_2(mutants: list[str], seed: str, said: str) -> None:
    done = CliRunner().invoke(app, ["verify", "--seed", seed, *mutants])
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr == f"error: --seed must be {said}\n"


def test_the_largest_seed_is_served(asked: list) -> None:
    assert CliRunner().invoke(app, ["verify", "--seed", str((1 << 63) - 1)]).exit_code == 0
    assert asked[0][2]["seed"] == (1 << 63) - 1
