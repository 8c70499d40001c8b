"""A pack is documents laid end to end: document d holds the tokens [cu_seqlens[d], cu_seqlens[d + 1])."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

Int64 = np.ndarray  # an int64 array; its shape stands in the comment or docstring beside it


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Half-open run of tokens [start, stop); it may be empty."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, (self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclass(frozen=True)
class Pack:
    """Documents end to end, some of them possibly empty.

    cu_seqlens: N + 1 offsets in tokens, from 0, non-decreasing; [0] is a pack without documents. Ints, a numpy array
    or a one-dimensional integer CPU tensor are taken and kept as a tuple of ints.
    Raises ValueError when they are not such offsets or lie on a device (reading them would synchronise with it), and
    TypeError for what is no sequence of numbers.
    """

    cu_seqlens: tuple[int, ...]

    def __post_init__(self) -> None:
        offsets = as_int64("cu_seqlens", self.cu_seqlens)
        if not offsets.size or offsets[0] != 0:
            found = f"start with {offsets[0]}" if offsets.size else "are empty"
            raise ValueError(f"cu_seqlens must start with 0, but {found}")
        falls = np.diff(offsets) < 0
        if falls.any():
            at = int(falls.argmax())
            raise ValueError(
                f"cu_seqlens must not decrease, but cu_seqlens[{at + 1}] = {offsets[at + 1]} "
                f"follows cu_seqlens[{at}] = {offsets[at]}"
            )
        object.__setattr__(self, "cu_seqlens", tuple(offsets.tolist()))

    @classmethod
    def from_lengths(cls, lengths: ArrayLike) -> Pack:
        """The pack of documents of these lengths in tokens, in this order."""
        sizes = as_int64("lengths", lengths)
        if (sizes < 0).any():
            doc = int((sizes < 0).argmax())
            raise ValueError(f"lengths must not be negative, but lengths[{doc}] = {sizes[doc]}")
        return cls((0, *np.cumsum(sizes).tolist()))

    @cached_property
    def offsets(self) -> Int64:
        """cu_seqlens as a read-only int64 array [N + 1]."""
        return read_only(np.array(self.cu_seqlens, dtype=np.int64))

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(np.diff(self.offsets).tolist())

    @property
    def num_documents(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def total_tokens(self) -> int:
        return self.cu_seqlens[-1]

    def document(self, doc: int) -> Span:
        """The global tokens of one document."""
        return Span(self.cu_seqlens[doc], self.cu_seqlens[doc + 1])


def as_int(name: str, value: int, minimum: int) -> int:
    """`value` as a Python int; TypeError if it is no integer, ValueError below `minimum`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
    number = operator.index(value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def as_list(name: str, values: Iterable) -> list:
    """`values` as a list; TypeError if it holds no items."""
    if isinstance(values, str | bytes | dict | set) or not hasattr(values, "__iter__"):
        raise TypeError(f"{name} must be a list or a tuple, got {values!r} of type {type(values).__name__}")
    return list(values)


def as_int64(name: str, values: ArrayLike, ndim: int = 1) -> Int64:
    """`values`, integers of any kind on the host in `ndim` dimensions, as an int64 array."""
    accepted = "integers, given as a list, a tuple, a numpy array or a CPU tensor"
    if isinstance(values, str | bytes | dict | set) or not hasattr(values, "__len__"):
        raise TypeError(f"{name} must be {accepted}; got {type(values).__name__}")
    device = getattr(values, "device", "cpu")
    if getattr(device, "type", device) != "cpu":
        raise ValueError(f"{name} must lie in host memory, because reading it from {device} would synchronise")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:  # ragged lists, dtypes unknown to numpy
        raise ValueError(f"{name} must be {accepted}; {error}") from error
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension{'s' * (ndim > 1)}, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be {accepted}; got {array.dtype}")
    return array.astype(np.int64)


def read_only(array: np.ndarray) -> np.ndarray:
    """The same array, closed to writing: what several readers share must not change under them."""
    array.flags.writeable = False
    return array


def expand_spans(starts: Int64, stops: Int64) -> tuple[Int64, Int64]:
    """Writes out many half-open spans: for each of their tokens, in order, the span's index and the token.

    starts, stops: int64 [n], stops >= starts. Both results are int64 [sum(stops - starts)].
    """
    counts = stops - starts
    before = np.cumsum(counts) - counts  # tokens of all earlier spans
    span = np.repeat(np.arange(counts.size), counts)
    return span, np.arange(span.size) + (starts - before)[span]
