"""Records that lack something or have it wrong are refused before anything is drawn, and whole ones are not."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deltaspan.plots.draw import draw
from deltaspan.plots.whole import check_bench, check_demo, check_plan

from .test_record import WORKED, record

SIDE = {
    "forward_ms": 2.0,
    "step_ms": 7.5,
    "spread": {what: {"min": 1.0, "quartile_1": 2.0, "quartile_3": 8, "max": 9.0} for what in ("forward", "step")},
}
ABSENT = {"forward_ms": None, "step_ms": None, "spread": {}}
BENCH = {
    "decay": "slow",
    "asked": 1,
    "heads": [16, 48],
    "machine": {"platform": "Linux", "gpu": "a GPU"},
    "rows": [SIDE | {"name": "1x70", "tokens": 70, "steady": True, "peers": {"fla": SIDE, "flash_qla": ABSENT}}],
}
DEMO = {
    "settings": {"ranks": 2, "layout": "zigzag"},
    "losses": {"ranks": [5.0, 4.0], "one": [5.0, float("nan")]},
    "bounds": {"loss": 1e-4, "judged_steps": 2},
    "partition": record([300, 200], 2, "zigzag", segments=[2, 1]),
}
CHECKS = {check_bench: BENCH, check_demo: DEMO, check_plan: WORKED}
NOT_DRAWN = {"asked", "hv", "sms", "pack", "min", "max", "gpu", "platform"}
DRAWN_SHARE = 0.06
ODD = ["$\\frac$", -1, 1.5, 10**400, True, [], {}, [None], None]


def paths(holder: Any, at: tuple = ()) -> Iterator[tuple]:
    """Where something stands in a record, as the keys that lead to it."""
    for key in holder if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ():
        yield (*at, key)
        yield from paths(holder[key], (*at, key))


def changed(made: dict, path: tuple, *value: Any) -> dict:
    """A copy with something else at a path, or nothing there."""
    made = copy.deepcopy(made)
    *above, key = path
    holder = made
    for step in above:
        holder = holder[step]
    if value:
        holder[key] = value[0]
    else:
        del holder[key]
    return made


@pytest.mark.parametrize(("check", "made"), CHECKS.items())
def test_all_that_is_drawn_must_be_there(check: Any, made: dict) -> None:
    check(made)
    for path in paths(made):
        if isinstance(path[-1], str) and path[-1] not in NOT_DRAWN and "peers" not in path[:-1]:
            with pytest.raises(ValueError, match=rf"^record must have .* as \S*{path[-1]}, and has nothing there$"):
                check(changed(made, path))


@pytest.mark.parametrize(("check", "made"), CHECKS.items())
def test_what_passes_the_check_can_be_drawn(check: Any, made: dict, tmp_path: Path, rng: torch.Generator) -> None:
    """Something odd in every place, one after another; of what still passes a few are drawn: all take a minute."""
    refused = passed = 0
    for path in paths(made):
        for value in ODD:
            odd = changed(made, path, value)
            try:
                check(odd)
            except ValueError as error:
                refused += 1
                assert str(error).startswith("record must ") and "\n" not in str(error)
            else:
                passed += 1
                if torch.rand(1, generator=rng) < DRAWN_SHARE:
                    draw(json.dumps(odd), tmp_path)
    assert refused > passed > 0


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (BENCH | {"rows": []}, r"a row or more as rows, got \[\]"),
        (BENCH | {"rows": [{}]}, r"a name as rows\[0\]\.name, and has nothing there"),
        (DEMO | {"losses": []}, r"a mapping as losses, got \[\]"),
        (DEMO | {"partition": {}}, r"as partition\.lengths, and has nothing there"),
        (DEMO | {"losses": {"ranks": [1.0], "one": [1.0, 2.0]}}, r"a list of 1 numbers as losses\.one"),
        (WORKED | {"cp": 9}, "a list of 9, one for each rank, of fragments as fragments, got "),
        (
            WORKED | {"segments": [1]},
            "a list of 2, one for each rank, of numbers from 1 on or lists of such as segments",
        ),
        (WORKED | {"lengths": [100, "a"]}, r"a list of whole numbers from 0 on as lengths, got \[100, 'a'\]"),
        (WORKED | {"cp": 0, "fragments": [], "segments": []}, "a whole number from 1 on as cp, got 0"),
        (WORKED | {"lengths": [100, 4]}, "every token once, and its fragments: tokens .* belong to no rank"),
        (WORKED | {"layout": "$x$"}, "a name as layout"),
    ],
)
def test_broken_records_say_what_is_wrong(odd: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^record must (have|hold) .*{said}"):
        draw(json.dumps(odd), tmp_path / "p")
    assert not (tmp_path / "p").exists()
