"""The demo from start to end on real ranks, and what it does when something is wrong."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from deltaspan.demo import DemoSettings, RankFailed, prepare
from deltaspan.demo.corpus import Document, library_documents, text_packs
from deltaspan.demo.processes import train_on_ranks
from deltaspan.demo.run import JUDGED_STEPS, _checks, worst_error
from deltaspan.demo.settings import Placement, place
from deltaspan.demo.training import RankOutcome

ROOT = Path(__file__).parents[2]


def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deltaspan", "demo", "--ranks", "2", "--steps", "2", "--device", "cpu"]
    out = tmp_path / "out"
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "All holds" in done.stdout and done.stderr == ""
    assert {path.name for path in out.iterdir()} == {"demo.json", "losses.png", "partition.png"}

    record = json.loads((out / "demo.json").read_text())
    assert record["ok"] and [check["ok"] for check in record["checks"]] == [True] * 3
    assert record["settings"]["ranks"] == 2 and record["settings"]["backend"] == "gloo"
    assert len(record["losses"]["ranks"]) == 2
    assert record["losses"]["one"][1] < record["losses"]["one"][0]
    packs = text_packs(library_documents(), 2, record["settings"]["capacity"])
    tokens = [rank["tokens"] for rank in record["ranks"]]
    assert [sum(step) for step in zip(*tokens, strict=True)] == [sum(pack.lengths) for pack in packs]
    sent, received = ([sum(rank[side]) for rank in record["ranks"]] for side in ("sent_bytes", "received_bytes"))
    assert sum(sent) == sum(received) > 0
    # the checks would have seen ranks that tell each other nothing
    assert record["without_exchange"]["error"] > 100 * record["bounds"]["gradient"]


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_that_were_started_together_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    documents = [Document(str(size), b"x" * size) for size in (2_600, 300)]
    monkeypatch.setenv(name, "1")
    assert prepare(DemoSettings(steps=1), "cpu", documents).placement.backend == "gloo"
    monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match=f"{name} is 2: start it once"):
        prepare(DemoSettings(steps=1), "cpu", documents)


class Broken(Placement):
    """Rank 1 has no device, and never joins the group in which rank 0 waits for it."""

    def device_of(self, rank: int) -> torch.device:
        if rank == 1:
            raise RuntimeError("no device for this rank")
        return super().device_of(rank)


class Deadly(Placement):
    """A rank is killed, as for want of memory."""

    def device_of(self, rank: int) -> torch.device:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("ranks", "placement", "message"),
    [
        (2, Broken, r"(?s)rank 1 failed:.*Traceback.*no device for this rank"),
        (1, Deadly, "rank 0 ended with exit code -9"),
    ],
)
def test_a_rank_that_fails_ends_the_others(
    settings: DemoSettings, documents: list[Document], ranks: int, placement: type[Placement], message: str
) -> None:
    packs, before = prepare(settings, "cpu", documents).packs, multiprocessing.active_children()
    with pytest.raises(RankFailed, match=message):
        train_on_ranks(settings, ranks, packs, placement("cpu", "gloo"), lambda step, loss: None)
    assert multiprocessing.active_children() == before


def outcome(gradient: list[float], losses: list[float]) -> RankOutcome:
    return RankOutcome(
        losses=losses, first_gradients={"w": np.array(gradient, np.float32), "u": np.ones(1, np.float32)}
    )


@pytest.mark.parametrize(
    ("gradient", "losses", "failing"),
    [
        ([3.0, 4.0], [5.0, 4.0], []),
        ([3.0, 4.001], [5.0, 4.0], [1]),
        ([3.0, np.nan], [5.0, 4.0], [1]),
        ([3.0, 4.0], [5.0, 4.001], [0]),
        ([3.0, 4.0], [np.nan, 4.0], [0]),
        ([3.0, 4.0], [5.0, *[4.0] * JUDGED_STEPS, 3.9], []),
        ([3.0, 4.0], [5.0, *[4.0] * JUDGED_STEPS, np.nan], [0]),
    ],
)
def test_checks_fail_where_they_must(gradient: list[float], losses: list[float], failing: list[int]) -> None:
    exact = {"u": np.ones(1), "w": np.array([3.0, 4.0])}
    checks = _checks(2, outcome(gradient, losses), outcome([3.0, 4.0], [5.0, *[4.0] * (len(losses) - 1)]), exact)
    assert [i for i, check in enumerate(checks) if not check["ok"]] == failing


def test_the_worst_error_is_relative_to_the_gradient() -> None:
    exact = {"u": np.array([300.0, 400.0]), "w": np.array([3.0, 4.0])}
    found = {"u": np.array([300.0, 401.0], np.float32), "w": np.array([3.0, 4.5], np.float32)}
    assert worst_error(found, exact) == ("w", pytest.approx(0.1))


def test_ranks_take_the_devices_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    gpus(0)
    assert place(4) == place(4, "cpu") == Placement("cpu", "gloo")
    with pytest.raises(ValueError, match="without a usable GPU"):
        place(4, "cuda")
    gpus(2)
    assert place(2) == Placement("cuda", "nccl", 2)
    shared = place(4, "cuda")
    assert shared.backend == "gloo" and shared.note is not None
    assert [shared.device_of(rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert place(4, "cpu").device_of(3) == torch.device("cpu")


@pytest.mark.parametrize(
    ("settings", "device"), [({"ranks": 0}, None), ({"steps": 0}, None), ({"layout": "spiral"}, "cpu"), ({}, "tpu")]
)
def test_bad_wishes_are_refused_before_any_rank_starts(settings: dict, device: str | None) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        prepare(DemoSettings(**settings), device)
