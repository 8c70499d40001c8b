"""Small cases of the table, for tests that run one."""

from dataclasses import replace

import torch

from deltaspan.verify.cases import Case

SMALL = Case(
    pack="fragments shorter than a halo",
    ranks="3 ranks",
    layout="zigzag",
    dtype="float64",
    decay="moderate decay",
    heads="1:2 16x48",
    keys="unit keys",
    beta="beta in [0, 1]",
    conv="4 taps",
    states="initial and final states",
    segments="segments as planned",
    exchange="all_to_all",
    way="autograd",
    seed=0,
)


def small(rng: torch.Generator, **changed: str) -> Case:
    """A case of 19 tokens in 4 documents on 3 ranks, with fresh inputs."""
    return replace(SMALL, seed=int(torch.randint(2**31, (), generator=rng)), **changed)
