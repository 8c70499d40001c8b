"""Covering arrays: few rows in which every two factors meet in every pair of their values."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from random import Random

CANDIDATES = 12  # rows tried for each one taken; more shorten the array hardly

Setting = tuple[str, str]  # a factor and its value


def pairs(row: Mapping[str, str]) -> Iterator[tuple[Setting, Setting]]:
    """Every two settings of a row, the factors in the row's order."""
    return combinations(row.items(), 2)


def cover(factors: Mapping[str, Sequence[str]], rng: Random) -> list[dict[str, str]]:
    """Rows, each with one value for every factor, in which every pair of values of two factors occurs.

    The same factors and generator state give the same rows. Greedy, row by row, after the AETG method (Cohen, Dalal,
    Fredman and Patton, "The AETG System", 1997).
    """
    # A dict for its order: a set of strings iterates differently in every process.
    missing = dict.fromkeys(
        ((a, x), (b, y)) for (a, xs), (b, ys) in combinations(factors.items(), 2) for x in xs for y in ys
    )
    rows = []
    while missing:
        row, gained = max((_grow(factors, missing, rng) for _ in range(CANDIDATES)), key=lambda found: len(found[1]))
        rows.append(row)
        for pair in gained:
            del missing[pair]
    return rows


def _grow(factors: Mapping[str, Sequence[str]], missing: Mapping, rng: Random) -> tuple[dict[str, str], list]:
    """One row around a random missing pair, every further factor set to what meets most missing pairs; and those."""
    row = dict(rng.choice(list(missing)))
    for name in rng.sample(list(factors), len(factors)):
        if name not in row:
            values = rng.sample(list(factors[name]), len(factors[name]))
            row[name] = max(values, key=lambda value, name=name: _met((name, value), row, missing))
    row = {name: row[name] for name in factors}
    return row, [pair for pair in pairs(row) if pair in missing]


def _met(setting: Setting, row: Mapping[str, str], missing: Mapping) -> int:
    return sum((setting, other) in missing or (other, setting) in missing for other in row.items())
