"""Where the layouts put tokens, against recorded and worked tables and as properties of any partition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaspan.layout import LAYOUTS, Fragment, Pack, Partition, Span, near_equal, partition

from .cases import VECTORS, partitions, recorded

CASES = {case["id"]: case for case in VECTORS["cases"]}
RANDOM = settings(max_examples=100, deadline=None)


def as_lists(part: Partition) -> list:
    """Per rank [doc, offset, length, prev, next], as the records write it."""
    pair = lambda name: None if name is None else list(name)  # noqa: E731
    return [[[f.doc, f.offset, f.length, pair(f.prev), pair(f.next)] for f in held] for held in part.fragments]


# Recorded and worked tables


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: f"{case['id']}-{case['layout']}")
def test_recorded_partitions(case):
    part = recorded(case)
    assert as_lists(part) == case["frags"]
    assert part.cu_seqlens == tuple(case["cu"])
    assert part.world_size == case["W"]
    assert part.layout == ("explicit" if case["layout"] == "X" else part.layout)


def test_the_records_cover_every_layout():
    assert len(CASES) == 143
    assert {case["layout"] for case in CASES.values()} == set("CZDX")
    assert any("cut_points" in case for case in CASES.values())


@pytest.mark.parametrize(
    ("total", "n", "intervals"), [*VECTORS["near_equal"], [2, 4, [[0, 1], [1, 2], [2, 2], [2, 2]]]]
)
def test_near_equal(total, n, intervals):
    assert near_equal(total, n) == tuple(Span(start, stop) for start, stop in intervals)


WORKED = [
    (
        ([0, 100, 130], 2, "contiguous"),
        [
            [(0, 0, 65, None, (1, 0))],
            [(0, 65, 35, (0, 0), None), (1, 0, 30, None, None)],
        ],
    ),
    (
        ([0, 100, 130], 2, "zigzag"),
        [
            [(0, 0, 33, None, (1, 0)), (0, 98, 2, (1, 1), None), (1, 0, 30, None, None)],
            [(0, 33, 33, (0, 0), (1, 1)), (0, 66, 32, (1, 0), (0, 1))],
        ],
    ),
    (
        ([0, 100, 103], 2, "zigzag_per_document"),
        [
            [(0, 0, 25, None, (1, 0)), (0, 75, 25, (1, 1), None), (1, 0, 1, None, (1, 2)), (1, 3, 0, None, None)],
            [
                (0, 25, 25, (0, 0), (1, 1)),
                (0, 50, 25, (1, 0), (0, 1)),
                (1, 1, 1, (0, 2), (1, 3)),
                (1, 2, 1, (1, 2), None),
            ],
        ],
    ),
]


@pytest.mark.parametrize(("arguments", "expected"), WORKED, ids=lambda value: value[-1] if "zag" in value[-1] else None)
def test_worked_tables(arguments, expected):
    assert partition(*arguments).fragments == tuple(tuple(Fragment(*f) for f in held) for held in expected)


def test_worked_table_of_two_long_documents():
    part = partition([0, 128102, 128102 + 131072], 4, "zigzag")
    assert part.fragments[3] == (
        Fragment(0, 97191, 30911, (2, 0), None),
        Fragment(1, 0, 1486, None, (3, 2)),
        Fragment(1, 1486, 32397, (3, 1), (2, 1)),
    )
    assert part.fragments[0] == (Fragment(0, 0, 32397, None, (1, 0)), Fragment(1, 98676, 32396, (1, 1), None))


@pytest.mark.parametrize("context", VECTORS["contexts"], ids=lambda context: str(context["case"]))
def test_recorded_chains_and_crossings(context):
    part = recorded(CASES[context["case"]])
    table, chains = part.table, part.chains()
    named = [
        [[int(table.rank[row]), int(table.slot[row])] for row in chains.of(doc)] for doc in range(part.num_documents)
    ]
    assert named == context["chains"]
    assert np.diff(chains.first).max() == context["n_d_max"]
    assert (part.crossing_in.sum(), part.crossing_out.sum()) == (context["N_in"], context["N_out"])
    for rank, expected in enumerate(context["ranks"]):
        into, out = part.crossing_in[part.rows(rank)], part.crossing_out[part.rows(rank)]
        assert part.tokens(rank) == expected["T_r"]
        assert into.size == expected["n_frag"]
        counts = (into.sum(), out.sum(), (into & out).sum())
        assert counts == (expected["n_in"], expected["n_out"], expected["n_io"])


# What holds for every partition


@RANDOM
@given(partitions())
def test_every_token_is_held_once(part):
    ids = [part.token_ids(rank) for rank in range(part.world_size)]
    assert [part.tokens(rank) for rank in range(part.world_size)] == [len(held) for held in ids]
    assert sorted(np.concatenate(ids).tolist()) == list(range(part.total_tokens))
    assert all(held.dtype == np.int64 for held in ids)


@RANDOM
@given(partitions())
def test_token_ids_spell_out_the_fragments_in_local_order(part):
    for rank, held in enumerate(part.fragments):
        spelled = [part.cu_seqlens[f.doc] + f.offset + k for f in held for k in range(f.length)]
        assert part.token_ids(rank).tolist() == spelled
        assert [(f.doc, f.offset) for f in held] == sorted((f.doc, f.offset) for f in held)


@RANDOM
@given(st.lists(st.integers(0, 20), max_size=5), st.integers(1, 6))
def test_each_layout_gives_the_tokens_that_its_rule_names(lengths, world_size):
    pack = Pack.from_lengths(lengths)

    def parts(start: int, total: int, n: int) -> list[list[int]]:
        return [list(range(start + span.start, start + span.stop)) for span in near_equal(total, n)]

    whole = parts(0, pack.total_tokens, world_size)
    halves = parts(0, pack.total_tokens, 2 * world_size)
    documents = [parts(start, length, 2 * world_size) for start, length in zip(pack.cu_seqlens, lengths, strict=False)]
    for rank in range(world_size):
        back = 2 * world_size - 1 - rank
        expected = (whole[rank], halves[rank] + halves[back], [t for doc in documents for t in doc[rank] + doc[back]])
        for layout, tokens in zip(LAYOUTS, expected, strict=True):
            assert partition(pack.cu_seqlens, world_size, layout).token_ids(rank).tolist() == tokens, layout


@RANDOM
@given(partitions())
def test_chains_tile_their_documents_and_neighbours_agree(part):
    chains, table = part.chains(), part.table
    named = {(rank, slot): f for rank, held in enumerate(part.fragments) for slot, f in enumerate(held)}
    assert len(named) == len(table)
    chained = set()
    for doc in range(part.num_documents):
        names = [(int(table.rank[row]), int(table.slot[row])) for row in chains.of(doc)]
        chained.update(names)
        reached = 0
        for before, name, after in zip([None, *names], names, [*names[1:], None], strict=False):
            fragment = named[name]
            assert (fragment.doc, fragment.offset) == (doc, reached)
            assert (fragment.prev, fragment.next) == (before, after)
            assert fragment.length > 0
            reached += fragment.length
        assert reached == part.cu_seqlens[doc + 1] - part.cu_seqlens[doc]
    for name in named.keys() - chained:
        assert named[name][2:] == (0, None, None)


@RANDOM
@given(partitions())
def test_the_table_agrees_with_itself(part):
    table = part.table
    rows = np.arange(len(table))
    assert (np.diff(table.rank) >= 0).all()
    for rank in range(part.world_size):
        held = part.rows(rank)
        assert (table.rank[held] == rank).all()
        assert table.slot[held].tolist() == list(range(held.stop - held.start))
        for row in range(held.start, held.stop):
            local = slice(table.local_start[row], table.local_start[row] + table.length[row])
            assert part.token_ids(rank)[local].tolist() == (table.start[row] + np.arange(table.length[row])).tolist()
    assert (part.rank_rows[0], part.rank_rows[-1]) == (0, len(table))
    assert (table.next[table.prev[part.crossing_in]] == rows[part.crossing_in]).all()
    assert (table.prev[table.next[part.crossing_out]] == rows[part.crossing_out]).all()
    assert (part.crossing_in == ((table.length > 0) & (table.offset > 0))).all()
    assert part.crossing_in.sum() == part.crossing_out.sum()


@pytest.mark.parametrize("documents", [[0, 7], [0, 0, 16], [0, 8, 8, 16]])
def test_zigzag_per_document_gives_each_rank_two_pieces_of_every_document(documents):
    part = partition(documents, 4, "zigzag_per_document")
    assert np.diff(part.rank_rows).tolist() == 4 * [2 * part.num_documents]
    for layout in ("contiguous", "zigzag"):
        assert (partition(documents, 4, layout).table.length > 0).all()


# Awkward sizes that users bring


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("total", [10, 2])
def test_tokens_that_do_not_divide_by_the_ranks(layout, total):
    part = partition([0, total], 3, layout)
    sizes = [part.tokens(rank) for rank in range(3)]
    assert sum(sizes) == total
    assert sorted(np.concatenate([part.token_ids(rank) for rank in range(3)]).tolist()) == list(range(total))
    if layout == "contiguous":
        assert sizes == {10: [4, 3, 3], 2: [1, 1, 0]}[total]


@pytest.mark.parametrize("sizes", [[513, 511], [514, 510], [257, 255, 257, 255], [1, 2], [2, 1], [1, 1, 2, 1]])
def test_ranks_of_any_size(sizes):
    total, starts = sum(sizes), np.cumsum([0, *sizes[:-1]]).tolist()
    part = partition([0, total], len(sizes), fragments=[[(0, a, n)] for a, n in zip(starts, sizes, strict=True)])
    assert [part.tokens(rank) for rank in range(len(sizes))] == sizes
    assert part.crossing_in.tolist() == [False] + [True] * (len(sizes) - 1)
    assert part.crossing_out.tolist() == [True] * (len(sizes) - 1) + [False]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cu_seqlens", [[0, 16, 40, 40, 40], [0, 0, 16], [0, 8, 8, 16], [0, 0], [0]])
def test_empty_documents(layout, cu_seqlens):
    part = partition(cu_seqlens, 2, layout)
    assert sorted(np.concatenate([part.token_ids(0), part.token_ids(1)]).tolist()) == list(range(cu_seqlens[-1]))
    for doc, length in enumerate(np.diff(cu_seqlens)):
        assert (part.chains().of(doc).size > 0) == (length > 0)
        if length == 0:
            fragments_of_doc = int((part.table.doc == doc).sum())
            assert fragments_of_doc == (4 if layout == "zigzag_per_document" else 0)
