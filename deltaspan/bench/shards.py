"""What is timed: local shards by name, and every pack x CP x layout, as one rank's shard and as all ranks together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import deltaspan as ds
from deltaspan.layout import LAYOUTS, Partition
from deltaspan.plan import plan_segments, walk_steps

LOCAL = "local"  # the layout of a row whose shard exchanges nothing

LOCAL_SHARDS: dict[str, tuple[str, int, tuple[int, ...]]] = {
    # pack, CP, lengths. One document of P4, cut evenly:
    "P4/2": ("P4", 2, (127_488,)),
    "P4/4": ("P4", 4, (63_744,)),
    "P4/8": ("P4", 8, (31_872,)),
    "P4/16": ("P4", 16, (15_936,)),
    # what the last rank holds of P1 under the contiguous layout:
    "3docs": ("P1", 2, (43_443, 41_472, 35_993)),
    "2docs": ("P1", 4, (24_461, 35_993)),
    # documents of one length, which need no pack:
    "1x32768": ("1x32768", 1, (32_768,)),
    "4x8192": ("4x8192", 1, (8_192,) * 4),
}
TOKENS_AT_MOST = 1 << 24  # of NxL: the operands of more, with the default heads, fill several devices
EVEN = re.compile(r"([1-9]\d*)x([1-9]\d*)")


@dataclass(frozen=True)
class Shard:
    """What one row of a record is about.

    part: of one rank for a local shard, else of all ranks.
    slowest_rank: whose fragments a local shard has, None if it is nobody's in particular.
    cut_by: the layout that gave a local shard its fragments.
    """

    name: str
    pack: str
    cp: int
    part: Partition
    layout: str = LOCAL
    slowest_rank: int | None = None
    cut_by: str | None = None

    @property
    def is_local(self) -> bool:
        return self.layout == LOCAL

    @property
    def documents(self) -> list[int]:
        """Lengths of the documents, in tokens."""
        return [int(stop - start) for start, stop in pairwise(self.part.cu_seqlens)]


def local_shard(name: str) -> Shard:
    """A local shard by its name in `LOCAL_SHARDS`, or NxL for N documents of L tokens.

    Raises:
        ValueError: neither of the two, or NxL of more than `TOKENS_AT_MOST` tokens.
    """
    if name in LOCAL_SHARDS:
        pack, cp, lengths = LOCAL_SHARDS[name]
        return Shard(name, pack, cp, _one_rank(lengths))
    if even := EVEN.fullmatch(name):
        documents, tokens = map(int, even.groups())
        if documents * tokens > TOKENS_AT_MOST:
            raise ValueError(f"shards must have at most {TOKENS_AT_MOST:,} tokens each, got {name!r}")
        return Shard(name, name, 1, _one_rank([tokens] * documents))
    raise ValueError(f"shards must be all, or some of {', '.join(LOCAL_SHARDS)} or NxL, such as 2x500; got {name!r}")


def shards_of_packs(
    packs: Mapping[str, Sequence[int]], cps: Sequence[int], layouts: Sequence[str], *, hv: int, sm_count: int, rule: str
) -> Iterator[Shard]:
    """Two shards for each pack x CP x layout: the slowest rank's by itself, without exchange, then all ranks together.

    Args:
        packs: lengths of documents by the pack's name.
        cps: world sizes.
        layouts: names of layouts, or "all".
        hv, sm_count, rule: value heads, multiprocessors and the planner's rule, by whose plan the rank with most walk
            steps is found.

    Raises:
        ValueError: an unknown layout, or a world size below 1.
    """
    for name, lengths in packs.items():
        for cp in cps:
            for layout in LAYOUTS if list(layouts) == ["all"] else layouts:
                part = ds.partition([0, *accumulate(lengths)], cp, layout=layout)
                plan = plan_segments(part, hv=hv, sm_count=sm_count, rule=rule)
                steps = walk_steps(part, plan, hv=hv, sm_count=sm_count)
                slowest = steps.index(max(steps))
                own = part.table.length[part.rows(slowest)].tolist()
                alone = _one_rank([length for length in own if length])
                row = f"{name} CP{cp} {layout}"
                yield Shard(f"{row}, rank {slowest}", name, cp, alone, slowest_rank=slowest, cut_by=layout)
                if cp > 1:
                    yield Shard(row, name, cp, part, layout)


def _one_rank(lengths: Sequence[int]) -> Partition:
    return ds.partition([0, *accumulate(lengths)], 1)
