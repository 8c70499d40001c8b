"""Partitions are values: equal from equal inputs, immutable, copied and digested alike."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from deltaspan.layout import LAYOUTS, partition

from .cases import partitions


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_inputs_of_any_type_give_equal_partitions(layout):
    offsets = [0, 5, 5, 23]
    part = partition(offsets, 3, layout)
    for same in (tuple(offsets), np.array(offsets, dtype=np.int32), torch.tensor(offsets), torch.tensor(offsets).int()):
        other = partition(same, np.int64(3), layout)
        assert other == part
        assert hash(other) == hash(part)
        assert other.digest() == part.digest()


def test_forms_of_an_explicit_table_are_the_same():
    per_rank = [[(0, 0, 2), (1, 0, 4)], [], [(0, 2, 3), (0, 5, 0)]]
    flat = [(0, 2, 3, 2), (0, 0, 2, 0), (0, 5, 0, 2), (1, 0, 4, 0)]
    expected = partition([0, 5, 9], 3, fragments=per_rank)
    assert expected.layout == "explicit"
    arrays = [np.array(held).reshape(-1, 3) for held in per_rank]
    for form in (
        flat,
        tuple(flat),
        np.array(flat),
        torch.tensor(flat),
        arrays,
        [[list(f) for f in held] for held in per_rank],
    ):
        assert partition([0, 5, 9], 3, fragments=form) == expected
    assert partition([0, 5, 9], 3, "no such layout", fragments=flat, cut_points=7) == expected


@pytest.mark.parametrize("form", [[], [[], []]])
def test_an_explicit_table_of_nothing(form):
    assert partition([0, 0], 2, fragments=form).fragments == ((), ())


def test_what_ranks_must_share_is_in_the_digest():
    base = partition([0, 6, 12], 2)
    others = [
        partition([0, 5, 12], 2),
        partition([0, 6, 6, 12], 2),
        partition([0, 6, 12], 3),
        partition([0, 6, 12], 2, "zigzag"),
        partition([0, 6, 12], 2, fragments=[[(0, 0, 6)], [(1, 0, 6)]]),
        partition([0, 6, 12], 2, fragments=[[(1, 0, 6)], [(0, 0, 6)]]),
        partition([0, 6, 12], 2, fragments=[[(0, 0, 6), (0, 6, 0)], [(1, 0, 6)]]),
        partition([0, 6, 12], 2, "zigzag_per_document"),
        partition([0, 6, 12], 2, "zigzag_per_document", cut_points=[[0, 1, 2, 3, 6], [0, 2, 3, 5, 6]]),
    ]
    assert len({base.digest(), *(other.digest() for other in others)}) == 1 + len(others)
    assert all(base != other for other in others)
    assert base != "contiguous"


# Pairs of tables, over three documents of which two are empty, that differ in one thing alone.
ONE_THING = {
    "rank": ([(0, 0, 6, 0), (1, 0, 0, 0)], [(0, 0, 6, 0), (1, 0, 0, 1)]),
    "document": ([(0, 0, 6, 0), (1, 0, 0, 0)], [(0, 0, 6, 0), (2, 0, 0, 0)]),
    "offset": ([(0, 0, 6, 0), (0, 3, 0, 0)], [(0, 0, 6, 0), (0, 6, 0, 0)]),
    "length": ([(0, 0, 0, 0), (0, 0, 6, 0)], [(0, 0, 6, 0), (0, 0, 0, 0)]),
}


@pytest.mark.parametrize(("one", "other"), ONE_THING.values(), ids=ONE_THING)
def test_partitions_that_differ_in_one_column(one, other):
    one, other = (partition([0, 6, 6, 6], 2, fragments=table) for table in (one, other))
    assert one != other
    assert one.digest() != other.digest()


def test_partitions_that_differ_in_the_world_size_alone():
    one, other = (partition([0, 6], world_size, fragments=[(0, 0, 6, 0)]) for world_size in (2, 3))
    assert one != other
    assert one.digest() != other.digest()


@settings(max_examples=100, deadline=None)
@given(partitions())
def test_copies_are_equal(part):
    for same in (pickle.loads(pickle.dumps(part)), copy.deepcopy(part), copy.copy(part)):
        assert same == part
        assert same.fragments == part.fragments
        assert same.digest() == part.digest()


def test_a_partition_is_immutable_and_opaque():
    part = partition([0, 5, 9], 2, "zigzag")
    for name in ("world_size", "layout", "table", "invented"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(part, name, 1)
    with pytest.raises(AttributeError, match="immutable"):
        del part.table
    columns = [getattr(part.table, field.name) for field in dataclasses.fields(part.table)]
    for array in (
        *columns,
        part.rank_rows,
        part.crossing_in,
        part.crossing_out,
        part.chains().rows,
        part.chains().first,
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = 0
    assert all(column.dtype == np.int64 for column in columns)
    assert not dataclasses.is_dataclass(part)
    assert not isinstance(part, (tuple, list, dict, set))
    assert repr(part) == "<Partition zigzag: 9 tokens in 2 documents, 4 fragments on 2 ranks>"
    assert part.fragments is part.fragments
