"""Which batches two step costs cut differently, and how they are shown; what is timed needs a GPU."""

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

import deltaspan as ds
from deltaspan.bench import plans
from deltaspan.plan import plan_segments
from deltaspan.plan.cost import StepCosts
from deltaspan.plan.rules import PUBLISHED_COSTS

PACKS = {"long": [60_000, 100, 70_000], "short": [100, 200]}
CHEAP = StepCosts(tape=224, transfer=5, offset=30, compose=600, compose_weight=1)  # summaries cost next to nothing


def test_equal_costs_differ_nowhere() -> None:
    assert plans.differing(PACKS, [1, 2], PUBLISHED_COSTS, hv=48, sm_count=132) == ([], 2 * 2 * 3)


def test_cheap_summaries_cut_more() -> None:
    rows, count = plans.differing(PACKS, [2, 4], CHEAP, hv=48, sm_count=132)
    assert count == 2 * 2 * 3 and 0 < len(rows) < count
    for row in rows:
        name, cp, layout = row.name.split()
        part = ds.partition([0, *plans.accumulate(PACKS[name])], int(cp[2:]), layout=layout)
        assert row.published == plan_segments(part, hv=48, sm_count=132)
        assert row.published != row.measured and len(row.measured) == len(row.lengths) == int(cp[2:])
        assert [sum(of) for of in row.lengths] == [part.tokens(rank) for rank in range(part.world_size)]
        assert all(min(of, default=1) > 0 for of in row.lengths)


def test_table() -> None:
    rows, count = plans.differing(PACKS, [2, 4], CHEAP, hv=48, sm_count=132)
    ms = {"published": [2.0, 1.0], "measured": [1.0, 1.5]}
    record = {
        "costs": {"moderate": CHEAP._asdict(), "slow": CHEAP._asdict()}, "batches": count,
        "rows": [row._asdict() | {"ms": {"moderate": ms, "slow": ms}} for row in rows],
    }  # fmt: skip
    console = Console(width=200, record=True, quiet=False)
    console.print(*plans.table(json.loads(json.dumps(record))), sep="\n")
    text = console.export_text()
    assert "transfer 5" in text and "2.00 -> 1.50 (0.75)" in text and f"{len(rows)} of {count}" in text


@pytest.mark.parametrize(("given", "word"), [(["--packs", "P1,typo"], "typo"), ([], "9.0")])
def test_refusals(given: list[str], word: str) -> None:
    app = plans.typer.Typer()
    app.command()(plans.main)
    if not given and plans.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2 and word in done.stderr and len(done.stderr.splitlines()) == 1
