"""How far a result of a whole pack is from the truth, and where: over the tensor, by document and head, around every
seam, and by element."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import deltaspan as ds

SEAM_REACH = 64  # tokens on each side of a seam that are judged by themselves: one chunk


class Seam(NamedTuple):
    """A border between two fragments of a document."""

    document: int
    offset: int  # of the first token behind it, within the document
    before: int  # the ranks that hold the tokens before and behind it
    behind: int

    def __str__(self) -> str:
        return f"rank {self.before}|{self.behind} at token {self.offset}"


class Place(NamedTuple):
    """Where an error is; None for what does not apply."""

    document: int | None = None
    head: int | None = None
    token: int | None = None  # within the document
    seam: Seam | None = None  # the nearest one of the document


class Error(NamedTuple):
    """One measure of a tensor's error, at its worst place."""

    measure: str
    value: float
    place: Place


MEASURES = ("tensor", "document", "seam", "element")
"""The first three are RMS errors over the RMS of the truth: over the whole tensor; by document and head; by head within
64 tokens of a seam, over the greater RMS of the truth, there or in the document. The last is |error| / (r + |truth|), r
the RMS of the truth within document and head."""


@dataclass(frozen=True)
class Rows:
    """What the rows of a tensor are: the document of each, and the seams between them."""

    document: Tensor  # [rows] int64
    offsets: Tensor | None = None  # [N + 1], of rows that are tokens
    seams: tuple[Seam, ...] = ()
    windows: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.int64))
    # [seams, 2 SEAM_REACH], the rows around each, -1 beyond the document

    @classmethod
    def tokens(cls, part: ds.Partition) -> "Rows":
        table, offsets = part.table, torch.tensor(part.cu_seqlens)
        behind = np.flatnonzero(table.prev >= 0)
        document = torch.from_numpy(table.doc[behind])
        columns = (document, table.offset[behind], table.rank[table.prev[behind]], table.rank[behind])
        seams = map(Seam._make, zip(*(column.tolist() for column in columns), strict=True))
        around = torch.from_numpy(table.start[behind])[:, None] + torch.arange(-SEAM_REACH, SEAM_REACH)
        inside = (around >= offsets[document, None]) & (around < offsets[document + 1, None])
        return cls(torch.repeat_interleave(offsets.diff()), offsets, tuple(seams), torch.where(inside, around, -1))

    @classmethod
    def documents(cls, count: int) -> "Rows":
        """One row a document, such as states."""
        return cls(torch.arange(count))

    @classmethod
    def one(cls) -> "Rows":
        """One row for the whole pack, such as parameters."""
        return cls(torch.zeros(1, dtype=torch.int64))

    def to(self, device: torch.device) -> "Rows":
        """The same where tensors on `device` are judged."""
        return replace(self, document=self.document.to(device), windows=self.windows.to(device))

    def place(self, row: int, head: int) -> Place:
        document = int(self.document[row])
        if self.offsets is None:
            return Place(document, head)
        token = row - int(self.offsets[document])
        own = [seam for seam in self.seams if seam.document == document]
        return Place(document, head, token, min(own, key=lambda seam: abs(seam.offset - token), default=None))


def errors(found: Tensor, truth: Tensor, rows: Rows, smallest: float, terms: Tensor | None = None) -> list[Error]:
    """Every measure that applies, worst places included.

    found, truth: [rows, heads, features] in float64.
    smallest: added to what errors are divided by, for truths that are zero or nearly so.
    terms: [rows, heads], at least so large is what errors are divided by: the RMS is of the greater one.
    An error that is no number counts as infinite.
    """
    error = (found - truth).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    error_squares, squares = (x.square().mean(-1) for x in (error, truth))  # [rows, heads]
    if terms is not None:
        squares = torch.maximum(squares, terms.square())
    over_tensor, *_ = _worst(error_squares.mean().sqrt()[None, None] / (squares.mean().sqrt() + smallest))

    count = rows.document.bincount().clamp(min=1)[:, None]
    sums = torch.zeros(2, len(count), truth.shape[1], dtype=torch.float64, device=truth.device)
    sums.index_add_(1, rows.document, torch.stack([error_squares, squares]))
    in_document, r = (sums / count).sqrt()  # [N, heads]
    value, document, head = _worst(in_document / (r + smallest))
    measured = [Error("tensor", over_tensor, Place()), Error("document", value, Place(document, head))]

    if rows.seams:
        there = (rows.windows >= 0)[..., None]
        near, size = (
            (torch.where(there, x[rows.windows], 0).sum(1) / there.sum(1)).sqrt() for x in (error_squares, squares)
        )
        own = r[[seam.document for seam in rows.seams]]
        value, i, head = _worst(near / (torch.maximum(size, own) + smallest))  # of [seams, heads]
        seam = rows.seams[i]
        measured.append(Error("seam", value, Place(seam.document, head, seam.offset, seam)))

    value, row, head = _worst((error / (r[rows.document, :, None] + truth.abs() + smallest)).amax(-1))
    return [*measured, Error("element", value, rows.place(row, head))]


def _worst(x: Tensor) -> tuple[float, int, int]:
    """The greatest element of [m, n], its row and its column; what is no number is greatest of all."""
    x = x.nan_to_num(nan=torch.inf, posinf=torch.inf)
    row, column = divmod(int(x.argmax()), x.shape[1])
    return x[row, column].item(), row, column
