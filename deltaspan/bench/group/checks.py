"""Awkward cases of `deltaspan.verify` on the group: every layout, exchange and form of checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from random import Random

import torch.distributed as dist

from deltaspan.bench.group.launch import Member
from deltaspan.exchange import EXCHANGES
from deltaspan.layout import LAYOUTS
from deltaspan.verify import Row, step
from deltaspan.verify.cases import FACTORS, Case
from deltaspan.verify.checks import rows_of
from deltaspan.verify.run import CaseRun

WAYS = ("checkpoint", "reentrant checkpoint", "recompute handle")
CHECKS = ("forward", "gradients", "convolution", "processes = simulated ranks", "shard and unshard")


def cases(world_size: int, seed: int) -> Iterator[Case]:
    """What is not asked for is drawn."""
    rng = Random(seed)
    ranks = f"{world_size} process{'es' if world_size > 1 else ''}"
    for layout, exchange, way in product(LAYOUTS, EXCHANGES, WAYS):
        drawn = {name: rng.choice(values) for name, values in FACTORS.items()}
        asked = {"ranks": ranks, "layout": layout, "exchange": exchange, "way": way}
        yield Case(**drawn | asked, seed=rng.getrandbits(32))


def verified(member: Member, seed: int, tell: Callable[[str], None]) -> Iterator[list[Row]]:
    """By case, on rank 0: errors against float64, and the bits of simulated ranks on its own device."""
    for case in cases(member.world_size, seed):
        everyone = member.gather(step.of_process(case, dist.group.WORLD, str(member.device)))
        if member.rank == 0:
            rows = rows_of(CaseRun(case, str(member.device), everyone), CHECKS)
            red = [row.name for row in rows if not row.ok]
            tell(f"{case.layout}, {case.exchange}, {case.way}: {'; '.join(red) or 'holds'}")
            yield rows
