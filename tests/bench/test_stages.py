"""Stages as the bench calls them, on the emulator, and what it counts; times need a GPU."""

import pytest
import torch
from typer.testing import CliRunner

from deltaspan.bench import stages
from deltaspan.bench.shards import local_shard
from deltaspan.kernels import select
from tests.emulator import load


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = load("deltaspan.kernels.hopper.tier")
    monkeypatch.setattr(select, "tier", lambda name: tier)


def test_every_stage_is_called_and_compared(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(stages, "graph_times", lambda *calls: [called.append(call()) or 0.5 for call in calls])
    rows = stages.stage_rows(local_shard("2x150"), (1, 2), "slow", 3, sm_count=132, device="cpu")
    names = ["prep", "walk", "walk on halves", "exit states", "maps"]
    names += ["adjoint walk", "adjoint walk on halves", "entry adjoints", "states of chunks", "gradients", "chain"]
    assert [row["stage"] for row in rows] == names
    assert len(called) == 11 and torch.equal(called[1], called[2]) and torch.equal(called[5], called[6])
    assert all(row["ok"] for row in rows if row["stage"] in stages.WALKS)
    walk, halves = rows[1], rows[2]
    assert walk["step_us"] == 500.0 and halves["step_us"] == 500.0  # a chunk each, all side by side
    assert walk["gflop"] == pytest.approx(300 * 2 * 155_648 / 1e9)
    assert walk["gigabytes"] == pytest.approx(300 * (2 * (256 + 128 + 4 + 256) + 512) / 1e9)
    gradients = rows[9]
    assert gradients["gflop"] == pytest.approx(300 * 2 * 344_064 / 1e9)
    assert gradients["gigabytes"] == pytest.approx(300 * (2 * (3 * 256 + 128 + 16 + 1024) + 1024) / 1e9)
    back = rows[5]
    assert back["gflop"] == pytest.approx(300 * 2 * 147_456 / 1e9)
    assert back["gigabytes"] == pytest.approx(300 * (2 * (256 + 128 + 4 + 512) + 512) / 1e9)
    assert stages.table({"rows": rows}).row_count == 11


def test_an_error_is_told(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "graph_times", lambda *calls: [0.5 for _ in calls])
    monkeypatch.setattr(stages.Problem, "maps", lambda self: torch.zeros_like(self.states))
    rows = stages.stage_rows(local_shard("1x70"), (1, 1), "slow", 1, sm_count=132, device="cpu")
    assert [row["stage"] for row in rows if not row.get("ok", True)] == ["maps"]


@pytest.mark.parametrize(
    ("given", "word"),
    [(["--shards", "typo"], "typo"), (["--heads", "2,3"], "2,3"), (["--heads", "x"], "heads"), ([], "9.0")],
)
def test_refusals(given: list[str], word: str) -> None:
    app = stages.typer.Typer()
    app.command()(stages.main)
    if not given and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2 and word in done.stderr and len(done.stderr.splitlines()) == 1
