"""The command for a real group: on gloo ranks from end to end, what it reads of its surroundings, and its refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import deltaspan as ds
from deltaspan.bench.group import __main__ as group
from deltaspan.bench.group import graphs, launch, steps
from deltaspan.bench.group.checks import WAYS, cases
from deltaspan.bench.group.launch import SLURM, Member
from deltaspan.bench.group.report import document
from deltaspan.bench.operands import Results
from deltaspan.exchange import EXCHANGES, ProcessGroup
from deltaspan.layout import LAYOUTS
from tests.helpers import gloo

ASKED = steps.Asked((1, 2), "slow", "torch", 8, 3)


def member() -> Member:
    return Member(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", torch.zeros(1))


def run_small(to: Path, parts: list[str], wrong: bool) -> bool:
    """With one case, layout and size of each part; wrong: rank 1 computes something else."""
    one_case = lambda *given: [next(cases(*given))]  # noqa: E731
    right = steps.Deltaspan.step

    def step(side: Any, x: Any) -> Any:
        found = right(side, x)
        if side.ctx.rank == 1:
            found.dv[..., 0] *= 1 + 1e-2
        return found

    with (
        mock.patch("deltaspan.bench.group.checks.cases", one_case),
        mock.patch.object(steps, "LAYOUTS", ("zigzag",)),
        mock.patch.object(steps, "EXCHANGES", ("ring",) if wrong else EXCHANGES),
        mock.patch.object(graphs, "SIZES", (1 << 10, 1 << 12)),
        mock.patch.object(steps.Deltaspan, "step", step if wrong else right),
    ):
        return group.run(member(), {"small": [70, 1, 0, 30]}, parts, ASKED, to)


def test_a_group_from_end_to_end(tmp_path: Path) -> None:
    to = tmp_path / "group.json"
    assert gloo(2).run(run_small, to, list(group.PARTS), False) == [True, True]
    record = json.loads(to.read_text())
    assert (record["world_size"], record["over"], record["gpus"], record["ok"]) == (2, "gloo", [None, None], True)
    names = [check["name"] for check in record["checks"]]
    assert {"forward", "gradients", "processes = simulated ranks"} <= set(names)
    rows = record["rows"]
    assert [(row["layout"], row["exchange"]) for row in rows] == [("zigzag", exchange) for exchange in EXCHANGES]
    for row in rows:
        assert row["ok"] and row["bits"] == {} and row["errors"].keys() >= {"o", "dq", "dbeta"}
        assert row["tokens"] == [ds.partition([0, 70, 71, 71, 101], 2, layout="zigzag").tokens(r) for r in range(2)]
        for what in steps.PHASES:
            figures = row[what]
            assert figures["ms"] is None and figures["local_ms"] > 0 and len(figures["ranks"]) == 2
            assert figures["after_ms"] >= max(of["spread"]["min"] for of in figures["ranks"])
            model = figures["local_ms"] + figures["wire_ms"]
            assert figures["measured_to_model"] == pytest.approx(figures["after_ms"] / model, rel=1e-3)
        assert row["step"]["wire_ms"] > 2 * row["forward"]["wire_ms"] > 0
    assert record["graphs"] == {"not_run": graphs.NOT_RUN, "rows": []}
    assert len(record["wire"]["rows"]) == 6 and len(record["wire"]["fitted"]) == 3
    page = to.with_suffix(".md").read_text()
    assert page == document(record) and "All holds." in page and "not run" in page


def test_a_wrong_rank_is_named_on_all(tmp_path: Path) -> None:
    to = tmp_path / "group.json"
    assert gloo(2).run(run_small, to, ["steps"], True) == [False, False]
    record = json.loads(to.read_text())
    (row,) = record["rows"]
    assert row["bits"].keys() == {"1"} and row["off"] is None
    assert row["bits"]["1"]["checkpoint"] == row["bits"]["1"]["recompute handle"] == ["dv"]
    assert "NOT ALL HOLDS" in document(record) and "rank 1, checkpoint: other bits in dv" in steps.line(row)


class Replayed:
    """In the place of a CUDA graph: it calls again what it was made of. `stale`: and leaves results as they are."""

    def __init__(self, call: Any, stale: bool) -> None:
        self.call, self.found, self.stale = call, call(), stale

    def replay(self) -> None:
        found = self.call()
        if isinstance(found, Results) and not self.stale:
            for place, t in zip(self.found, found, strict=True):
                place.copy_(t)


def run_as_over_nccl(to: Path, stale: bool) -> bool:
    """What NCCL alone has, with what stands in for it here: work beside an exchange, and graphs."""
    of_nccl = replace(member(), backend="nccl")
    start = ProcessGroup.__init__

    def started(group: ProcessGroup, *given: Any) -> None:
        start(group, *given)
        group.beside = True

    def captured(of: Member, call: Any) -> tuple[Replayed, Any]:
        made = Replayed(call, stale and of.rank == 1)
        return made, made.found

    with (
        mock.patch.object(ProcessGroup, "__init__", started),
        mock.patch.object(graphs, "capture", captured),
        mock.patch.object(graphs, "SIZES", (1 << 10, 1 << 12)),
        mock.patch.object(group, "_nccl", lambda member: "2.0"),
        mock.patch.object(steps, "LAYOUTS", ("contiguous",)),
        mock.patch.object(graphs, "LAYOUTS", ("contiguous",)),
        mock.patch.object(steps, "EXCHANGES", ("ring",)),
        mock.patch.object(graphs, "EXCHANGES", ("ring",)),
    ):
        parts = ["graphs"] if stale else ["steps", "graphs", "wire"]
        return group.run(of_nccl, {"small": [70, 1, 0, 30]}, parts, ASKED, to)


@pytest.mark.parametrize("stale", [False, True])
def test_what_nccl_alone_has(tmp_path: Path, stale: bool) -> None:
    to = tmp_path / "group.json"
    assert gloo(2).run(run_as_over_nccl, to, stale) == [not stale] * 2
    record = json.loads(to.read_text())
    rows, (graph,) = record["rows"], record["graphs"]["rows"]
    assert len(rows) == (not stale)
    for row in rows:
        assert row["ok"] and row["early"] == [[0, 1], [0, 3]]  # rank 0, where all begins, sends first
        assert all(row[what][name] > 0 for what in steps.PHASES for name in ("ms", "after_ms"))
    assert graph["graph_ms"] > 0 and graph["eager_ms"] > 0
    differs = {"1": ["o, replay 2", "dq, replay 2"]} if stale else {}
    assert {rank: names[:2] for rank, names in graph["bits"].items()} == differs
    assert ("NOT ALL HOLDS" in to.with_suffix(".md").read_text()) == stale


def test_every_layout_exchange_and_checkpoint_has_a_case() -> None:
    drawn = list(cases(6, seed=1))
    assert {(c.layout, c.exchange, c.way) for c in drawn} == {
        (layout, exchange, way) for layout in LAYOUTS for exchange in EXCHANGES for way in WAYS
    }
    assert all(c.world_size == 6 and c.real for c in drawn) and drawn == list(cases(6, seed=1))
    assert len({c.seed for c in drawn}) == len(drawn)


def test_latency_and_rate_are_found_again() -> None:
    rows = [{"bytes": n, "ms": 0.03 + n / 200e6} for n in graphs.SIZES]
    assert graphs._fit(rows) == {"latency_us": 30.0, "gb_per_s": 200.0}


STEP = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}


def test_what_slurm_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SLURM, "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    with mock.patch.dict(launch.os.environ):
        launch._read_slurm()
        read = {name: launch.os.environ[name] for name in (*SLURM, "MASTER_ADDR", "LOCAL_WORLD_SIZE")}
    assert read == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "4"
    }  # fmt: skip
    monkeypatch.setenv("SLURM_NNODES", "2")
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        launch._read_slurm()


@pytest.mark.parametrize(
    ("given", "word"),
    [([], "torchrun"), (["--parts", "typo"], "typo"), (["--device", "tpu"], "tpu"), (["--device", "cuda"], "cuda")],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, given: list[str], word: str) -> None:
    if "cuda" in given and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for name in (*SLURM, *SLURM.values()):
        monkeypatch.delenv(name, raising=False)
    app = group.typer.Typer()
    app.command()(group.main)
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2 and word in done.stderr and len(done.stderr.splitlines()) == 1


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("given", "word"),
    [(["--pack", "P9"], "P9"), (["--heads", "2,3"], "2,3"), (["--decay", "typo"], "typo"), (["--samples", "7"], "7"),
     (["--seed", "-1"], "-1"), (["--backend", "hopper"], "hopper"), (["--json", "docs"], "folder")],
)  # fmt: skip
def test_refusals_of_a_member(monkeypatch: pytest.MonkeyPatch, given: list[str], word: str) -> None:
    for name, value in (ALONE | {"MASTER_PORT": "0"}).items():
        monkeypatch.setenv(name, value)
    app = group.typer.Typer()
    app.command()(group.main)
    done = CliRunner().invoke(app, [*given, "--device", "cpu"])
    assert done.exit_code == 2 and word in done.stderr and len(done.stderr.splitlines()) == 1
    assert not dist.is_initialized()
