"""The covering arrays: every pair occurs, in few rows, the same ones for the same seed."""

import json
import os
import subprocess
import sys
from itertools import combinations, product
from random import Random

import pytest
import torch

from deltaspan.verify import pairwise
from deltaspan.verify.cases import FACTORS, quick_cases

Factors = dict[str, tuple[str, ...]]

TABLES: list[Factors] = [
    {"a": ("1",), "b": ("1",)},
    {"a": ("1", "2", "3"), "b": ("1", "2")},
    {name: ("x", "y") for name in "abcdefg"},
    {"a": ("1", "2"), "b": tuple("abcdefgh"), "c": ("1", "2", "3"), "d": tuple("pqrs")},
    FACTORS,
]


def missing(rows: list[dict[str, str]], factors: Factors) -> set:
    """The pairs of values that no row has, found by looking for each."""
    wanted = {
        (a, x, b, y) for (a, xs), (b, ys) in combinations(factors.items(), 2) for x, y in product(xs, ys)
    }  # fmt: skip
    return {(a, x, b, y) for a, x, b, y in wanted if not any(row[a] == x and row[b] == y for row in rows)}


@pytest.mark.parametrize("factors", TABLES)
def test_every_pair_occurs_in_few_rows(factors: Factors, rng: torch.Generator) -> None:
    rows = pairwise.cover(factors, Random(rng.initial_seed()))
    assert not missing(rows, factors)
    assert all(list(row) == list(factors) and all(row[name] in factors[name] for name in factors) for row in rows)
    widest = sorted(map(len, factors.values()))[-2:]
    # no fewer rows than the two longest factors have pairs; the greedy choice stays below twice that, or ten rows
    assert widest[0] * widest[1] <= len(rows) <= max(10, 2 * widest[0] * widest[1])


def test_without_its_only_row_a_pair_is_missed() -> None:
    factors = {"a": ("1", "2", "3"), "b": ("1", "2")}
    rows = pairwise.cover(factors, Random(0))
    assert len(missing(rows[1:], factors)) == 1


def test_the_quick_cases_cover_the_table(rng: torch.Generator) -> None:
    rows = [vars(case) for case in quick_cases(rng.initial_seed())]
    assert not missing(rows, FACTORS)
    assert len({row["seed"] for row in rows}) == len(rows)


def test_rows_depend_on_the_seed_alone_in_every_process() -> None:
    factors = {"a": ("u", "v", "w"), "b": ("x", "y"), "c": ("p", "q", "r", "s")}
    script = (
        "import json, random, runpy, sys; cover = runpy.run_path(sys.argv[1])['cover'];"
        "print(json.dumps(cover(json.loads(sys.argv[2]), random.Random(7))))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", script, pairwise.__file__, json.dumps(factors)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]  # fmt: skip
    assert json.loads(printed[0]) == json.loads(printed[1]) == pairwise.cover(factors, Random(7))
    assert pairwise.cover(factors, Random(8)) != pairwise.cover(factors, Random(7))
