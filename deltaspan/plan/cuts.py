"""How a fragment is cut into segments: how many of one length, or how long each is beside the others.

Lengths of several kinds are for devices that are filled badly by one: of 48 heads in three pieces 2 : 1 : 2, 96 long
ones leave 36 of 132 multiprocessors, which walk the 48 short ones meanwhile.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

Cut: TypeAlias = int | tuple[int, ...]  # how many, or relative lengths, in the order of chunks


def shares(cut: Cut) -> tuple[int, ...]:
    """Relative lengths."""
    return (1,) * cut if isinstance(cut, int) else cut


def count_of(cut: Cut) -> int:
    """How many segments a fragment has that is long enough."""
    return cut if isinstance(cut, int) else len(cut)


def lengths(chunks: int, cut: Cut) -> list[int]:
    """Chunks of each segment of a fragment, where it is long enough."""
    behind = [*accumulate(shares(cut), initial=0)]
    found = [stop * chunks // behind[-1] - start * chunks // behind[-1] for start, stop in pairwise(behind)]
    return [length for length in found if length]


def pieces(chunks: int, cut: Cut) -> list[tuple[int, int]]:
    """(chunks, how many such) of a fragment's segments; of P alike all are as long as the longest, as the published
    planner has it."""
    return [(-(-chunks // cut), cut)] if isinstance(cut, int) else [*Counter(lengths(chunks, cut)).items()]


def segment_starts(count: np.ndarray, cut: Cut) -> np.ndarray:
    """[n_frag * P + 1]: the chunk at which each segment starts, and the count of all chunks.

    count: chunks of each fragment, [n_frag]. Of n chunks, a segment behind shares of s in S begins at floor(s n / S);
    so segment p of P alike holds floor(p n / P) .. floor((p + 1) n / P).
    """
    first = np.cumsum(count) - count
    behind = np.array([*accumulate(shares(cut), initial=0)])
    return np.append(first[:, None] + behind[:-1] * count[:, None] // behind[-1], count.sum())


def in_words(cut: Cut) -> str:
    """3, or 2:1:2."""
    return str(cut) if isinstance(cut, int) else ":".join(map(str, cut))
