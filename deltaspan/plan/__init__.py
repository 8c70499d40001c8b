"""How fragments are cut into segments and chunks: data in, data out, the same on every rank."""

from deltaspan.plan.costs import collective_bytes, crossings, head_ranges, retained_bytes
from deltaspan.plan.rules import RULES, check_rule, plan_segments
from deltaspan.plan.tables import CHUNK, ChunkGrid, Links, WalkOrder, chain_links, chunk_grid, ring_hops, walk_order

__all__ = [
    "CHUNK",
    "RULES",
    "ChunkGrid",
    "Links",
    "WalkOrder",
    "chain_links",
    "check_rule",
    "chunk_grid",
    "collective_bytes",
    "crossings",
    "head_ranges",
    "plan_segments",
    "retained_bytes",
    "ring_hops",
    "walk_order",
]
