"""How batches are cut by several step costs, what is timed of them, and how that is shown; to time needs a GPU."""

import json
from collections import Counter

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import deltaspan as ds
from deltaspan.bench import plans
from deltaspan.bench.operands import draw
from deltaspan.bench.shards import LOCAL_SHARDS
from deltaspan.layout import LAYOUTS
from deltaspan.plan import plan_segments, rank_chunks
from deltaspan.plan.cost import StepCosts
from deltaspan.plan.rules import PUBLISHED_COSTS
from deltaspan.plan.step_time import H200_TIMES, forward_time

PACKS = {"long": [60_000, 100, 70_000], "short": [100, 200]}
CHEAP = StepCosts(tape=224, transfer=5, offset=30, compose=600, compose_weight=1)  # summaries cost next to nothing
COSTS = {"published": PUBLISHED_COSTS, "moderate": CHEAP, "slow": PUBLISHED_COSTS}


def rows() -> list[plans.Row]:
    return list(plans.planned(PACKS, [2, 4], COSTS, hv=48, sm_count=132))


def test_every_batch_is_planned_by_all_costs() -> None:
    made = rows()
    names = [f"{pack} CP{cp} {layout}" for pack in PACKS for cp in (2, 4) for layout in LAYOUTS]
    assert [row.name for row in made] == [*LOCAL_SHARDS, *names]
    for row in made:
        assert list(row.plans) == [*COSTS, "least_time"]
        assert row.plans["published"] == row.plans["slow"] == plan_segments(row.part, hv=48, sm_count=132)
        assert row.plans["least_time"] == plan_segments(row.part, hv=48, sm_count=132, rule="least_time")
        assert all(len(plan) == row.part.world_size for plan in row.plans.values())
    assert all(any(row.plans[of] != row.plans["published"] for row in made) for of in ("moderate", "least_time"))


def test_the_rank_that_takes_longest_stands_for_a_plan() -> None:
    ranks = set()
    for row in rows():
        chunks = rank_chunks(row.part)
        for of, plan in row.plans.items():
            times = [forward_time(rank, cut, 48, 132, H200_TIMES) for rank, cut in zip(chunks, plan, strict=True)]
            assert times[row.slowest[of]].moderate == max(time.moderate for time in times)
            ranks.add(row.slowest[of])
    assert len(ranks) > 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_alone_summarises_what_it_would_among_others(layout: str) -> None:
    part = ds.partition([0, 700, 700, 764, 3000, 3001], 3, layout=layout)
    for rank in range(3):
        alone, rows = plans.on_one_rank(part, rank), part.rows(rank)
        (chunks,), there = rank_chunks(alone), rank_chunks(part)[rank]
        enters, leaves = part.crossing_in[rows].sum(), part.crossing_out[rows].sum()
        assert alone.total_tokens == part.tokens(rank) + enters + leaves
        # a fragment of one token leaves for every one that is entered, and one that nothing leaves ends what is left
        counts = Counter({(1, True, False): -int(enters), (1, False, True): -int(leaves)})
        counts.update({run[:3]: run.count for run in chunks.runs})
        assert +counts == {run[:3]: run.count for run in there.runs}


def test_a_rank_alone_is_run() -> None:
    part = ds.partition([0, 500, 900], 2, layout="zigzag")
    alone = plans.on_one_rank(part, 0)
    assert alone.total_tokens > part.tokens(0)
    x = draw(alone.total_tokens + 9, (1, 2), "moderate", device="cpu", seed=0)
    whole, cut = (plans._forward(ds.build_context(alone, device="cpu"), n, x, backend="torch") for n in (1, 3))
    assert whole.shape[1] == alone.total_tokens
    torch.testing.assert_close(whole.float(), cut.float(), rtol=0.05, atol=0.05)  # some roundings to bf16


def test_table() -> None:
    ms = {"published": 2.0, "least_time": 1.25}
    record = {
        "costs": {of: cost._asdict() for of, cost in COSTS.items()} | {"least_time": H200_TIMES._asdict()},
        "rows": [
            {"name": row.name, "plans": row.plans, "slowest": row.slowest}
            | {"ms": {"moderate": ms | {"moderate": 1.5}, "slow": ms | {"slow": 3.0}}}
            for row in rows()
        ],
    }
    console = Console(width=240, record=True, quiet=False)
    console.print(*plans.table(json.loads(json.dumps(record))), sep="\n")
    text = console.export_text()
    assert "transfer 5" in text and f"state {H200_TIMES.state}" in text
    assert "2.00 1.50 1.25" in text and "2.00 3.00 1.25" in text
    means = [line.split()[-1] for line in text.splitlines() if "mean of 20 rows" in line]
    assert means == ["0.750", "0.625", "1.500", "0.625"]


@pytest.mark.parametrize(("given", "word"), [(["--packs", "P1,typo"], "typo"), ([], "9.0")])
def test_refusals(given: list[str], word: str) -> None:
    app = plans.typer.Typer()
    app.command()(plans.main)
    if not given and plans.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2 and word in done.stderr and len(done.stderr.splitlines()) == 1
