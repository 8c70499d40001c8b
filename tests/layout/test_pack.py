import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deltaspan.layout import Pack, Span
from deltaspan.layout.pack import expand_spans


@given(st.lists(st.integers(0, 50)))
def test_lengths_and_offsets_are_two_readings_of_one_pack(lengths):
    pack = Pack.from_lengths(lengths)
    assert pack == Pack(pack.cu_seqlens)
    assert pack.lengths == tuple(lengths)
    assert pack.total_tokens == sum(lengths)
    assert pack.num_documents == len(lengths)
    documents = [pack.document(doc) for doc in range(pack.num_documents)]
    assert [t for span in documents for t in range(span.start, span.stop)] == list(range(sum(lengths)))


@pytest.mark.parametrize(
    "given_as",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda x: np.array(x, dtype=np.int32),
        lambda x: np.array(x, dtype=np.uint16),
        lambda x: torch.tensor(x, dtype=torch.int32),
        lambda x: [np.int64(i) for i in x],
    ],
)
def test_every_accepted_type_gives_the_same_pack(given_as):
    pack = Pack(given_as([0, 3, 3, 10]))
    assert pack == Pack((0, 3, 3, 10))
    assert pack.cu_seqlens == (0, 3, 3, 10)
    assert all(type(offset) is int for offset in pack.cu_seqlens)


def test_a_pack_keeps_no_hold_on_the_callers_array():
    mine = np.array([0, 4, 9])
    pack = Pack(mine)
    mine[1] = 7
    assert pack.cu_seqlens == (0, 4, 9)
    with pytest.raises(ValueError, match="read-only"):
        pack.offsets[1] = 7


@pytest.mark.parametrize(
    ("cu_seqlens", "error", "says"),
    [
        ([], ValueError, "must start with 0, but are empty"),
        ([5, 10], ValueError, "must start with 0, but start with 5"),
        ([0, 10, 5], ValueError, r"cu_seqlens\[2\] = 5 follows cu_seqlens\[1\] = 10"),
        (torch.zeros(2, 2, dtype=torch.int64), ValueError, r"1 dimension, got shape \(2, 2\)"),
        (torch.tensor(0), ValueError, r"1 dimension, got shape \(\)"),
        (torch.tensor([0.0, 5.0]), ValueError, "float32"),
        (torch.tensor([0.0, 5.0], dtype=torch.bfloat16), ValueError, "cu_seqlens must be integers"),
        ([0, 2.5], ValueError, "float64"),
        ([False, True], ValueError, "bool"),
        ([[0], [1, 2]], ValueError, "cu_seqlens must be integers"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), ValueError, "host memory, because reading it from meta"),
        (7, TypeError, "got int"),
        (None, TypeError, "got NoneType"),
        ("0, 5", TypeError, "got str"),
    ],
)
def test_refuses_what_are_no_offsets(cu_seqlens, error, says):
    with pytest.raises(error, match=says) as caught:
        Pack(cu_seqlens)
    assert type(caught.value) is error
    assert "cu_seqlens" in str(caught.value)


def test_refuses_a_negative_length():
    with pytest.raises(ValueError, match=r"lengths\[1\] = -4"):
        Pack.from_lengths([3, -4])


def test_a_span_is_half_open_and_frozen():
    span = Span(3, 7)
    assert len(span) == 4
    assert str(span) == "[3, 7)"
    assert span == Span(3, 7) != Span(3, 8)
    with pytest.raises(AttributeError):
        span.stop = 9


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5))))
def test_expand_spans_writes_out_every_token(spans):
    starts = np.array([start for start, _ in spans], dtype=np.int64)
    stops = np.array([start + length for start, length in spans], dtype=np.int64)
    index, token = expand_spans(starts, stops)
    expected = [(i, start + k) for i, (start, length) in enumerate(spans) for k in range(length)]
    assert list(zip(index.tolist(), token.tolist(), strict=True)) == expected
