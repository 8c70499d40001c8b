"""How fragments are cut into segments and chunks: data in, data out, the same on every rank."""

from deltaspan.plan.cost import RankChunks, in_halves, lpt_makespan, rank_chunks, rank_cost, rank_walk_steps, walk_steps
from deltaspan.plan.rules import (
    DEFAULT_RULE,
    MOST_SEGMENTS,
    RULES,
    check_rule,
    plan_segments,
    rank_segments,
    row_segments,
)
from deltaspan.plan.segments import Passage, SegmentTable, passages, segment_starts, segment_table
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

__all__ = [
    "CHUNK",
    "DEFAULT_RULE",
    "MOST_SEGMENTS",
    "RULES",
    "Chains",
    "ChunkGrid",
    "Links",
    "Passage",
    "RankChunks",
    "SegmentTable",
    "WalkOrder",
    "chain_links",
    "chains_of",
    "check_rule",
    "chunk_grid",
    "collective_bytes",
    "crossings",
    "head_ranges",
    "in_halves",
    "lpt_makespan",
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
]
