"""What `partition` refuses, and whether the user is told where the fault lies."""

import pytest
import torch

from deltaspan.layout import Partition, partition

from .cases import VECTORS

DOCUMENTS = [0, 10, 15]
EXPLICIT = {
    "explicit gap": [[(0, 0, 4), (1, 0, 5)], [(0, 6, 4)]],
    "explicit overlap": [[(0, 0, 6), (1, 0, 5)], [(0, 4, 6)]],
    "explicit short cover": [[(0, 0, 4)], [(0, 4, 6), (1, 0, 3)]],
    "explicit doc out of range": [[(0, 0, 10)], [(1, 0, 5), (2, 0, 1)]],
    "explicit rank out of range (flat)": [(0, 0, 10, 0), (1, 0, 5, 2)],
    "explicit exceeds document": [[(0, 0, 12)], [(1, 0, 5)]],
    "explicit negative length": [[(0, 0, 10), (0, 10, -1)], [(1, 0, 5)]],
    "explicit wrong local order": [[(1, 0, 5), (0, 0, 10)], []],
    "explicit tuple arity": [[(0, 0, 10, 0)], [(1, 0, 5)]],
    "explicit flat form ok": [(0, 0, 10, 0), (1, 0, 5, 1)],
    "explicit zero-length fragment ok": [[(0, 0, 10), (0, 10, 0)], [(1, 0, 5)]],
}
CUTS = {
    "cut_points wrong count": [[0, 5, 10], [0, 1, 2, 3, 5]],
    "cut_points wrong end": [[0, 2, 5, 7, 9], [0, 1, 2, 3, 5]],
    "cut_points decreasing": [[0, 5, 2, 7, 10], [0, 1, 2, 3, 5]],
    "cut_points per-doc list count": [[0, 2, 5, 7, 10]],
    "cut_points with repeated offsets ok": [[0, 0, 10, 10, 10], [0, 0, 0, 0, 5]],
}
GOOD_CUTS = [[0, 2, 5, 7, 10], [0, 1, 2, 3, 5]]
CALLS = {
    "partition cu=[] ": lambda: partition([], 2),
    "partition cu=[5,10]": lambda: partition([5, 10], 2),
    "partition cu=[0,10,5]": lambda: partition([0, 10, 5], 2),
    "partition cu 2-D int64 tensor": lambda: partition(torch.tensor([[0, 5]]), 2),
    "partition cu float tensor": lambda: partition(torch.tensor([0.0, 5.0]), 2),
    "partition cu=[0] (no documents), W=2": lambda: partition([0], 2),
    "partition cu int32 tensor ok": lambda: partition(torch.tensor([0, 5], dtype=torch.int32), 2),
    "partition W=0": lambda: partition([0, 5], 0),
    'partition layout="ring"': lambda: partition([0, 5], 2, "ring"),
    "cut_points with contiguous": lambda: partition(DOCUMENTS, 2, "contiguous", cut_points=GOOD_CUTS),
    "cut_points with zigzag": lambda: partition(DOCUMENTS, 2, "zigzag", cut_points=GOOD_CUTS),
    "explicit table given together with layout/cut_points: table wins, ok": lambda: partition(
        DOCUMENTS, 2, "zigzag", fragments=EXPLICIT["explicit flat form ok"], cut_points=GOOD_CUTS
    ),
    **{name: lambda t=table: partition(DOCUMENTS, 2, fragments=t) for name, table in EXPLICIT.items()},
    **{
        name: lambda c=cuts: partition(DOCUMENTS, 2, "zigzag_per_document", cut_points=c) for name, cuts in CUTS.items()
    },
}


def test_every_recorded_verdict_has_its_call():
    assert CALLS.keys() == {description for description, _ in VECTORS["errors"]}


@pytest.mark.parametrize(("description", "error"), VECTORS["errors"])
def test_recorded_verdicts(description, error):
    if error is None:
        assert isinstance(CALLS[description](), Partition)
    else:
        with pytest.raises(ValueError) as caught:
            CALLS[description]()
        assert type(caught.value).__name__ == error


@pytest.mark.parametrize(
    ("fragments", "says"),
    [
        (EXPLICIT["explicit gap"], r"tokens \[4, 6\) of document 0 \(10 tokens\) belong to no rank"),
        (EXPLICIT["explicit overlap"], r"tokens \[4, 6\) of document 0 are given twice, to ranks 0 and 1"),
        (EXPLICIT["explicit short cover"], r"tokens \[3, 5\) of document 1 \(5 tokens\) belong to no rank"),
        ([[(1, 0, 5)], []], r"tokens \[0, 10\) of document 0 \(10 tokens\) belong to no rank"),
        ([[(0, 0, 7)], [(1, 2, 3)]], r"tokens \[7, 10\) of document 0 \(10 tokens\) belong to no rank"),
        ([[(0, 0, 10)], [(0, 3, 2), (1, 0, 5)]], r"tokens \[3, 5\) of document 0 are given twice, to ranks 0 and 1"),
        ([[(0, 0, 10), (1, 0, 5), (1, 0, 5)], []], r"tokens \[0, 5\) of document 1 are given twice, to ranks 0 and 0"),
        ([], r"tokens \[0, 10\) of document 0 \(10 tokens\) belong to no rank"),
        (EXPLICIT["explicit doc out of range"], r"\(doc 2, offset 0, length 1\), but the pack has 2 documents"),
        ([[(-1, 0, 10)], []], r"\(doc -1, offset 0, length 10\), but the pack has 2 documents"),
        (EXPLICIT["explicit rank out of range (flat)"], r"rank 2 is given \(doc 1, .*\), but the world size is 2"),
        ([(0, 0, 10, -1)], "rank -1 is given"),
        (EXPLICIT["explicit exceeds document"], r"\(doc 0, offset 0, length 12\), but the document is shorter"),
        ([[(0, 2**62, 2**62)], []], "but the document is shorter"),
        (EXPLICIT["explicit negative length"], r"\(doc 0, offset 10, length -1\), but neither"),
        ([[(0, -1, 11)], [(1, 0, 5)]], r"\(doc 0, offset -1, length 11\), but neither"),
        (EXPLICIT["explicit wrong local order"], r"rank 0 is given \(doc 0, .*\), but it comes after a later one"),
        ([[(0, 5, 5), (0, 0, 5)], [(1, 0, 5)]], r"\(doc 0, offset 0, length 5\), but it comes after a later one"),
        (EXPLICIT["explicit tuple arity"], r"fragments\[0\]\[0\] must be \(doc, offset, length\), got \(0, 0, 10, 0\)"),
        ([(0, 0, 10)], r"fragments\[0\] must be \(doc, offset, length, rank\), got \[0, 0, 10\]"),
        ([[(0, 0, 10)], [(1, 0, 5)], []], "one list for each of 2 ranks, got 3"),
        ([[(0, 0, 10.0)], [(1, 0, 5)]], r"fragments\[0\] must be integers.*float64"),
    ],
)
def test_a_refused_table_is_told_where(fragments, says):
    with pytest.raises(ValueError, match=says):
        partition(DOCUMENTS, 2, fragments=fragments)


@pytest.mark.parametrize(
    ("cut_points", "says"),
    [
        (CUTS["cut_points wrong count"], r"cut_points\[0\] must be 5 offsets .* length 10 .* got 3: \[ 0  5 10\]"),
        (CUTS["cut_points decreasing"], r"cut_points\[0\] must be 5 offsets"),
        ([[0, 2, 5, 7, 10], [1, 1, 2, 3, 5]], r"cut_points\[1\] .* length 5 "),
        (CUTS["cut_points per-doc list count"], "one list for each of 2 documents, got 1"),
        ([[0, 2, 5, 7, 10], [0, 1, 2, 3.5, 5]], r"cut_points\[1\] must be integers.*float64"),
    ],
)
def test_refused_cut_points_are_told_where(cut_points, says):
    with pytest.raises(ValueError, match=says):
        partition(DOCUMENTS, 2, "zigzag_per_document", cut_points=cut_points)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: partition(DOCUMENTS, 2.0), "world_size must be an integer, got 2.0 of type float"),
        (lambda: partition(DOCUMENTS, True), "world_size must be an integer, got True"),
        (lambda: partition(DOCUMENTS, 2, None), "layout must be a string, got None"),
        (lambda: partition(DOCUMENTS, 2, fragments=5), "fragments must be a list or a tuple, got 5"),
        (lambda: partition(DOCUMENTS, 2, fragments=[3]), r"fragments\[0\] must be a list or a tuple, got 3"),
        (lambda: partition(DOCUMENTS, 2, fragments=[[(0, 0, 10), 4], []]), r"fragments\[0\]\[1\] must be a list"),
        (lambda: partition(DOCUMENTS, 2, "zigzag_per_document", cut_points=4), "cut_points must be a list"),
        (
            lambda: partition(DOCUMENTS, 2, "zigzag_per_document", cut_points=[4, 5]),
            r"cut_points\[0\] must be integers",
        ),
        (lambda: partition(DOCUMENTS, 2).tokens(0.0), "rank must be an integer"),
    ],
)
def test_wrong_python_types(call, says):
    with pytest.raises(TypeError, match=says):
        call()


def test_unknown_layouts_and_ranks_name_what_is_accepted():
    with pytest.raises(ValueError, match="contiguous, zigzag, zigzag_per_document; got 'ring'"):
        partition(DOCUMENTS, 2, "ring")
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        partition(DOCUMENTS, 0)
    part = partition(DOCUMENTS, 2)
    for rank, says in ((2, "below the world size 2, got 2"), (-1, "at least 0, got -1")):
        for method in (part.tokens, part.token_ids, part.rows):
            with pytest.raises(ValueError, match=says):
                method(rank)
