"""How fragments are cut into segments and chunks: data in, data out, the same on every rank."""

from deltaspan.plan.ahead import walked_ahead
from deltaspan.plan.cost import RankChunks, in_halves, lpt_makespan, rank_chunks, rank_cost, rank_walk_steps, walk_steps
from deltaspan.plan.rules import (
    DEFAULT_RULE,
    HOPPER_RULE,
    MOST_SEGMENTS,
    RULES,
    check_rule,
    plan_segments,
    rank_segments,
    row_segments,
)
from deltaspan.plan.segments import Passage, SegmentTable, numbers, passages, segment_starts, segment_table
from deltaspan.plan.sizes import collective_bytes, head_ranges, retained_bytes
from deltaspan.plan.tables import (
    CHUNK,
    Chains,
    ChunkGrid,
    Links,
    WalkOrder,
    chain_links,
    chains_of,
    chunk_grid,
    crossings,
    ring_hops,
    walk_order,
)
from deltaspan.plan.wire import NVLINK, Wire, WireTime, wire_time

__all__ = [
    "CHUNK",
    "DEFAULT_RULE",
    "HOPPER_RULE",
    "MOST_SEGMENTS",
    "NVLINK",
    "RULES",
    "Chains",
    "ChunkGrid",
    "Links",
    "Passage",
    "RankChunks",
    "SegmentTable",
    "WalkOrder",
    "Wire",
    "WireTime",
    "chain_links",
    "chains_of",
    "check_rule",
    "chunk_grid",
    "collective_bytes",
    "crossings",
    "head_ranges",
    "in_halves",
    "lpt_makespan",
    "numbers",
    "passages",
    "plan_segments",
    "rank_chunks",
    "rank_cost",
    "rank_segments",
    "rank_walk_steps",
    "retained_bytes",
    "ring_hops",
    "row_segments",
    "segment_starts",
    "segment_table",
    "walk_order",
    "walk_steps",
    "walked_ahead",
    "wire_time",
]
