"""The record of errors on a whole pack, on the CPU with the torch tier: what is within bounds, and what is told."""

import re

import pytest
import torch
from typer.testing import CliRunner

from deltaspan.bench import accuracy
from deltaspan.bench.operands import REGIMES, draw
from deltaspan.bench.peers import PEERS
from tests.bench.peers import Right, Wrong

TOY = {"cps": [1, 2], "heads": (2, 4), "backend": "torch", "device": "cpu"}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in (Right, Wrong):
        monkeypatch.setitem(PEERS, peer.name, peer)


def test_all_regimes_are_within_bounds(known: None) -> None:
    record = accuracy.report([130, 1, 200], peers=["right"], **TOY)
    assert [row["decay"] for row in record["rows"]] == list(REGIMES)
    for row in record["rows"]:
        assert row["out"] == []
        assert list(row["errors"]) == ["right", "one rank", *(f"CP2 {layout}" for layout in accuracy.LAYOUTS)]
        assert "seam" in row["errors"]["CP2 zigzag"] and "seam" not in row["errors"]["one rank"]
        assert all(0 < figures["tensor"] < 4e-3 for figures in row["errors"].values())
    assert accuracy.table(record).row_count == len(REGIMES) * 5


def test_what_is_out_of_bounds_is_told(known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = accuracy.Deltaspan.forward, []

    def wrong(side, x):
        o = right(side, x)
        if isinstance(o, list):
            o[0][:, 3] *= 1.05
            calls.append(1)
            o[0][:, 4] += 1e-3 * len(calls)
        return o

    monkeypatch.setattr(accuracy.Deltaspan, "forward", wrong)
    (row,) = accuracy.report([130, 70], decays=["slow"], peers=["right"], **TOY)["rows"]
    told = "; ".join(row["out"])
    assert "CP2 zigzag: element" in told and "TF32 changes bits" in told and "one rank" not in told


def test_mixed_decay_is_of_all_kinds() -> None:
    g = draw(300, (2, 8), "mixed", device="cpu", seed=1).g[0]
    moderate, slow, zero, strong = (g[:, i::4] for i in range(4))
    assert not zero.any() and -1e-4 <= slow.min() < slow.max() < 0
    assert moderate.min() < -1e-2 and strong.mean() < 5 * moderate.mean() < 0
    assert torch.equal(draw(300, (2, 8), "mixed", device="cpu", seed=1).g[0], g)


@pytest.mark.parametrize(
    ("given", "word"),
    [(["--pack", "typo"], "typo"), (["--peers", "typo"], "typo"), ([], "9.0"), (["--peers", "fla"], "9.0")],
)
def test_refusals(given: list[str], word: str) -> None:
    app = accuracy.typer.Typer()
    app.command()(accuracy.main)
    if word == "9.0" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2 and word in done.stderr and len(done.stderr.splitlines()) == 1


def test_usage_names_every_option_and_peer() -> None:
    usage = accuracy.__doc__.split("\n\n")[1]
    assert re.findall(r"--\w+", usage) == ["--pack", "--peers", "--json"] and ",".join(PEERS) in usage
