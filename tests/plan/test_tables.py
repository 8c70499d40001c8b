"""The integer tables: chunks, walking orders and the links along which states pass."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deltaspan as ds
from deltaspan.plan import CHUNK, chain_links, chunk_grid, crossings, head_ranges, walk_order

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "plan_tables.json").read_text())
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document")

packs = st.lists(st.integers(0, 300), max_size=6).map(lambda lengths: [0, *np.cumsum(lengths).tolist()])
parts = st.builds(ds.partition, packs, st.integers(1, 5), st.sampled_from(LAYOUTS))


@pytest.mark.parametrize("cu, _, tables", VECTORS["chunk_tables"])
def test_chunk_tables_of_record(cu, _, tables):
    pieces = [[(0, start, stop - start) for start, stop in itertools.pairwise(cu)]]
    part = ds.partition([0, cu[-1]] if cu[-1] else [0] * 2, 1, fragments=pieces)
    grid = chunk_grid(part, 0)
    count = len(grid.start)
    assert grid.start.tolist() == tables["chunk_bos"][:count] and not any(tables["chunk_bos"][count:])
    assert grid.length.tolist() == tables["chunk_len"][:count] and not any(tables["chunk_len"][count:])
    assert [*grid.first.tolist(), count] == tables["seq_chunk_start"]
    assert walk_order(grid.first, grid.count).order.tolist() == tables["seq_order"]


@pytest.mark.parametrize("hv, world_size, expected", VECTORS["head_groups"])
def test_head_ranges_of_record(hv, world_size, expected):
    ranges = head_ranges(hv, world_size)
    assert [len(r) for r in ranges] == expected[2]
    assert [h for r in ranges for h in r] == list(range(hv))


@given(parts, st.data())
def test_chunks_cover_every_token_once(part, data):
    rank = data.draw(st.integers(0, part.world_size - 1))
    grid = chunk_grid(part, rank)
    tokens = [t for start, n in zip(grid.start, grid.length, strict=True) for t in range(start, start + n)]
    assert tokens == list(range(part.tokens(rank)))
    for fragment, first, count in zip(part.fragments[rank], grid.first, grid.count, strict=True):
        assert grid.length[first : first + count].tolist() == [
            min(CHUNK, fragment.length - i) for i in range(0, fragment.length, CHUNK)
        ]


@given(st.lists(st.integers(0, 40), max_size=12))
def test_walk_order_is_longest_first_and_its_active_runs_are_a_prefix(counts):
    count = np.array(counts, dtype=np.int64)
    first = np.cumsum(count) - count
    walk = walk_order(first, count)
    assert sorted(walk.order.tolist()) == list(range(len(counts)))
    assert walk.count.tolist() == sorted(counts, reverse=True)
    assert walk.first.tolist() == first[walk.order].tolist()
    assert len(walk.active) == max(counts, default=0)
    for step, n in enumerate(walk.active):
        assert n == sum(c > step for c in counts)


@given(parts)
def test_links_are_the_seams_of_every_chain_in_both_orders(part):
    names = [(r, s) for r, fragments in enumerate(part.fragments) for s in range(len(fragments))]
    out = [n for n in names if part.fragments[n[0]][n[1]].next is not None]
    entered = [n for n in names if part.fragments[n[0]][n[1]].prev is not None]
    n_out, n_in, _ = crossings(part)
    assert n_out.tolist() == [sum(r == rank for r, _ in out) for rank in range(part.world_size)]
    assert n_in.tolist() == [sum(r == rank for r, _ in entered) for rank in range(part.world_size)]

    chains = {}  # document -> its links as (left, entered), in order
    for left in out:
        fragment = part.fragments[left[0]][left[1]]
        chains.setdefault(fragment.doc, []).append((fragment.offset, left, fragment.next))
    chains = [[(left, right) for _, left, right in sorted(links)] for links in chains.values()]

    links = chain_links(part)
    forward, backward = links.forward.steps, [(o, i, e) for e, i, o in links.backward.steps]
    assert all((a == b).all() for a, b, _ in forward)
    forward = [(o, i) for o, _, i in forward]
    for step, (o, i) in enumerate(forward):
        found = {(out[a], entered[b]) for a, b in zip(o, i, strict=True)}
        assert found == {chain[step] for chain in chains if len(chain) > step}
    for step, (o, i, _) in enumerate(backward):
        found = {(out[a], entered[b]) for a, b in zip(o, i, strict=True)}
        assert found == {chain[-1 - step] for chain in chains if len(chain) > step}
    assert len(forward) == len(backward) == max(map(len, chains), default=0)
    # the chains of a step are a prefix of the step's before, each link following its own chain's
    for (_, i0), (o1, _) in itertools.pairwise(forward):
        assert [entered[b] for b in i0[: len(o1)]] == [out[a] for a in o1]
    for (o0, _, _), (o1, i1, e1) in itertools.pairwise(backward):
        assert [out[a] for a in o0[: len(o1)]] == [entered[b] for b in i1]
        assert [out[a] for a in e1] == [entered[b] for b in i1]
