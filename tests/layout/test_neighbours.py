"""Whether the halo plan brings each fragment the tokens before and after it, whoever owns them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltaspan.layout import LAYOUTS, HaloPlan, Partition, halo_plan, partition

from .cases import VECTORS, partitions, recorded

CASES = {case["id"]: case for case in VECTORS["cases"]}
CONTEXTS = {context["case"]: context for context in VECTORS["contexts"]}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=lambda context: str(context["case"]))
def test_recorded_halos(context):
    part = recorded(CASES[context["case"]])
    for rank, expected in enumerate(context["ranks"]):
        plan, halo = halo_plan(part, 4, rank), expected["halo"]
        assert plan.history_row.tolist() == halo["hist_row_off"]
        assert (plan.history_row >= 0).sum(axis=1).tolist() == halo["hist_valid"]
        assert plan.send_index.tolist() == halo["hist_index"]
        assert plan.send_counts.tolist() == halo["fwd_send"]
        assert plan.recv_counts.tolist() == halo["fwd_recv"]
        assert plan.tail_row.tolist() == halo["tail_row_off"]
        assert plan.head_send_counts.tolist() == halo["bwd_send"]
        assert plan.tail_recv_counts.tolist() == halo["bwd_recv"]
        assert plan.head_send_index.tolist() == head_tokens(part, rank, halo["head_row_off"])


def head_tokens(part: Partition, rank: int, head_row_off: list) -> list[int]:
    """Local token of each row sent backward, from the records' inverse: [slot][token of the head][consumer] -> row."""
    token_of_row = {}
    for local_start, tokens in zip(part.table.local_start[part.rows(rank)].tolist(), head_row_off, strict=True):
        for i, rows in enumerate(tokens):
            token_of_row.update({row: local_start + i for row in rows if row >= 0})
    assert sorted(token_of_row) == list(range(len(token_of_row)))
    return [token_of_row[row] for row in range(len(token_of_row))]


def exchange(part: Partition, sent: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """Carries out both halves of an all-to-all on global token ids: sent[rank] = (local tokens, counts)."""
    blocks = [
        np.split(part.token_ids(rank)[index], np.cumsum(counts)[:-1]) for rank, (index, counts) in enumerate(sent)
    ]
    return [
        np.concatenate([blocks[source][rank] for source in range(part.world_size)]) for rank in range(part.world_size)
    ]


def check_halos(part: Partition, width: int) -> list[HaloPlan]:
    """Moves token ids as the plans say and looks whether each fragment finds the tokens before and after it."""
    plans = [halo_plan(part, width, rank) for rank in range(part.world_size)]
    history = exchange(part, [(plan.send_index, plan.send_counts) for plan in plans])
    tail = exchange(part, [(plan.head_send_index, plan.head_send_counts) for plan in plans])
    for rank, plan in enumerate(plans):
        assert plan.send_counts.sum() == plan.send_index.size
        assert plan.head_send_counts.sum() == plan.head_send_index.size
        assert plan.recv_counts.tolist() == [other.send_counts[rank] for other in plans]
        assert plan.tail_recv_counts.tolist() == [other.head_send_counts[rank] for other in plans]
        for rows, pool, counts in (
            (plan.history_row, history[rank], plan.recv_counts),
            (plan.tail_row, tail[rank], plan.tail_recv_counts),
        ):
            assert rows.shape == (len(part.fragments[rank]), width - 1)
            used = rows[rows >= 0]
            assert sorted(used.tolist()) == list(range(pool.size))
            source = np.repeat(np.arange(part.world_size), counts)[used]
            for one in range(part.world_size):  # within a source by slot, then by token
                assert (np.diff(used[source == one]) > 0).all()
        for slot, fragment in enumerate(part.fragments[rank]):
            start, stop = part.cu_seqlens[fragment.doc], part.cu_seqlens[fragment.doc + 1]
            here = start + fragment.offset
            for k in range(width - 1):
                for token, row, pool in (
                    (here - (width - 1) + k, plan.history_row[slot, k], history[rank]),
                    (here + fragment.length + k, plan.tail_row[slot, k], tail[rank]),
                ):
                    if fragment.length and start <= token < stop:
                        assert row >= 0
                        assert pool[row] == token
                    else:
                        assert row == -1
    return plans


@settings(max_examples=200, deadline=None)
@given(partitions(), st.integers(1, 7))
def test_each_fragment_receives_its_documents_tokens_around_it(part, width):
    check_halos(part, width)


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=lambda context: str(context["case"]))
@pytest.mark.parametrize("width", [1, 2, 9])
def test_other_widths_of_recorded_partitions(context, width):
    check_halos(recorded(CASES[context["case"]]), width)


@pytest.mark.parametrize("sizes", [[513, 511], [514, 510], [257, 255, 257, 255], [1, 2], [2, 1], [1, 1, 2, 1]])
def test_ranks_of_any_size(sizes):
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    table = [[(0, start, size)] for start, size in zip(starts, sizes, strict=True)]
    plans = check_halos(partition([0, sum(sizes)], len(sizes), fragments=table), 4)
    for rank, plan in enumerate(plans):
        assert plan.recv_counts.sum() == min(3, starts[rank])
        assert plan.tail_recv_counts.sum() == min(3, sum(sizes[rank + 1 :]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cu_seqlens", [[0, 10], [0, 2], [0, 16, 40, 40, 40], [0, 0, 16], [0, 8, 8, 16], [0]])
def test_empty_documents_and_empty_ranks(layout, cu_seqlens):
    for world_size in (2, 3):
        check_halos(partition(cu_seqlens, world_size, layout), 4)


def test_a_head_token_can_have_several_readers():
    part = partition([0, 4], 4, "contiguous")  # one token a rank
    last = halo_plan(part, 4, 3)
    assert last.history_row.tolist() == [[0, 1, 2]]
    assert last.recv_counts.tolist() == [1, 1, 1, 0]
    assert last.head_send_index.tolist() == [0, 0, 0]
    assert last.head_send_counts.tolist() == [1, 1, 1, 0]


def test_traffic_of_a_rank_with_itself_counts():
    plan = halo_plan(partition([0, 12], 1, "zigzag_per_document"), 4, 0)
    assert plan.send_counts.tolist() == plan.recv_counts.tolist() == [3]
    assert plan.send_index.tolist() == [3, 4, 5]
    assert plan.head_send_index.tolist() == [6, 7, 8]


def test_width_one_needs_no_halo():
    plan = halo_plan(partition([0, 40], 4), 1, 2)
    assert plan.history_row.shape == plan.tail_row.shape == (1, 0)
    assert plan.send_index.size == plan.head_send_index.size == 0


def test_plans_are_int64_and_read_only():
    plan = halo_plan(partition([0, 9, 40], 3, "zigzag"), 4, 1)
    for name in HaloPlan.__slots__:
        array = getattr(plan, name)
        assert array.dtype == np.int64, name
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = 0


@pytest.mark.parametrize(
    ("width", "rank", "error", "says"),
    [
        (0, 0, ValueError, "width must be at least 1, got 0"),
        (4.0, 0, TypeError, "width must be an integer, got 4.0"),
        (4, 2, ValueError, "rank must be below the world size 2, got 2"),
        (4, -1, ValueError, "rank must be at least 0, got -1"),
        (4, None, TypeError, "rank must be an integer, got None"),
    ],
)
def test_refusals(width, rank, error, says):
    with pytest.raises(error, match=says):
        halo_plan(partition([0, 9], 2), width, rank)
