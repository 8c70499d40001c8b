"""The planner's benchmark runs at any size and says what its times hold for; no time is judged."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import deltaspan as ds
from deltaspan.bench.planner import Batch, batches, measure

ROOT = Path(__file__).parents[2]


def test_the_module_writes_a_record_and_shows_it(tmp_path):
    made = tmp_path / "planner.json"
    command = [sys.executable, "-m", "deltaspan.bench.planner", "--ranks", "4", "--json", str(made)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    record = json.loads(made.read_text())
    assert record["settings"]["rule"] == "row_cost_lpt"
    assert record["versions"]["deltaspan"] == ds.__version__
    assert record["machine"]["cpus_used"] >= 1
    assert len(record["rows"]) == len(list(batches(4)))
    assert all(row["total_ms"] >= row["plan_ms"] / 2 > 0 for row in record["rows"])  # medians, each of its own
    assert "zigzag_per_document" in done.stdout


def test_the_largest_batches_are_those_of_record():
    sizes = {(batch.layout, batch.ranks, batch.documents) for batch in batches(1024) if batch.shows == "largest"}
    assert sizes == {
        ("contiguous", 1024, 10_000),
        ("zigzag", 1024, 10_000),
        ("zigzag_per_document", 1024, 500),
    }
    ranks = {batch.ranks for batch in batches(1024) if batch.shows == "ranks"}
    assert ranks == {64, 128, 256, 512, 1024}


def test_a_batch_is_the_same_in_every_run_and_as_long_as_it_says():
    batch = Batch("", "contiguous", ranks=8, documents=50)
    offsets = batch.offsets()
    assert offsets.tolist() == batch.offsets().tolist()
    assert len(offsets) == 51 and np.diff(offsets).min() >= 1
    assert offsets[-1] == pytest.approx(8 * batch.tokens_per_rank, abs=50)  # lengths are rounded


def test_random_cuts_leave_no_two_ranks_alike():
    batch = Batch("", "zigzag_per_document", ranks=16, documents=40, random_cuts=True)
    assert measure(batch, repeats=1)["fragments"] == 2 * 16 * 40
    offsets = batch.offsets()
    part = ds.partition(offsets, 16, batch.layout, cut_points=batch.cut_points(offsets))
    assert len(set(ds.plan.rank_chunks(part))) == 16
