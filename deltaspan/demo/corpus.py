"""The demo's text: sources of Python's standard library, which every machine has, packed whole into one pack a step."""

from __future__ import annotations

import os
import sysconfig
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, cycle, islice
from pathlib import Path

import torch
from torch import Tensor

IGNORED_LABEL = -100
# Shares of a pack's capacity. A document of three fifths, with at most half of the rest on either side, begins in the
# first quarter of its pack and ends in the last: it spans all of four ranks even in the contiguous layout.
LONG_SHARE = (0.6, 0.75)
SHORT_SHARE = 0.12
PROSE_SHARE = 0.8
_PROSE = bytes(b for b in range(128) if chr(b).isalpha() or chr(b).isspace())
_SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Document:
    """One source file: its path below the library's root, and its bytes."""

    name: str
    text: bytes


@dataclass(frozen=True)
class TextPack:
    """Documents end to end, as one training step sees them; tensors are whole, on the CPU, one token a byte."""

    documents: tuple[Document, ...]

    @cached_property
    def lengths(self) -> list[int]:
        return [len(document.text) for document in self.documents]

    @cached_property
    def cu_seqlens(self) -> list[int]:
        return [0, *accumulate(self.lengths)]

    @property
    def tokens(self) -> Tensor:
        """[1, T] int64."""
        return torch.tensor([list(b"".join(document.text for document in self.documents))])

    @property
    def labels(self) -> Tensor:
        """[1, T] int64: the next token of the same document; a document's last token has none (IGNORED_LABEL)."""
        labels = self.tokens.roll(-1, dims=1)
        labels[0, torch.tensor(self.cu_seqlens[1:]) - 1] = IGNORED_LABEL
        return labels

    @property
    def predicted(self) -> int:
        """How many tokens have a label, over all ranks: what the loss is divided by."""
        return self.cu_seqlens[-1] - len(self.documents)


def library_documents(root: Path | None = None) -> list[Document]:
    """Source files below `root` (Python's standard library), sorted by name.

    Tests are left out, and files with few letters and spaces: tables of numbers, which would only make the loss jump.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    names = []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED_FOLDERS]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    documents = (Document(name, (root / name).read_bytes()) for name in sorted(names))
    return [document for document in documents if _is_prose(document.text)]


def _is_prose(text: bytes) -> bool:
    return len(text) > 0 and len(text.translate(None, _PROSE)) <= (1 - PROSE_SHARE) * len(text)


def text_packs(documents: list[Document], count: int, capacity: int) -> list[TextPack]:
    """`count` packs of at most `capacity` tokens: a long document in the middle, short ones before and after it.

    Documents are taken in order, and from the first again once all were used.

    Raises:
        ValueError: no document of a length that the packs need.
    """
    low, high = (int(share * capacity) for share in LONG_SHARE)
    long = [document for document in documents if low <= len(document.text) <= high]
    short = [document for document in documents if len(document.text) <= int(SHORT_SHARE * capacity)]
    if not long or not short:
        raise ValueError(
            f"documents hold {len(long)} of {low} to {high} bytes and {len(short)} of at most "
            f"{int(SHORT_SHARE * capacity)}; at least one of each is needed for packs of {capacity} tokens"
        )
    ahead, packs = deque(short), []
    for middle in islice(cycle(long), count):
        half = (capacity - len(middle.text)) // 2
        before, after = _take(ahead, half), _take(ahead, half)
        packs.append(TextPack((*before, middle, *after)))
    return packs


def _take(ahead: deque[Document], room: int) -> list[Document]:
    """The next documents, each at most once, as many as fit in order; `ahead` then begins with the one after them."""
    taken: list[Document] = []
    while len(taken) < len(ahead) and len(ahead[0].text) <= room:
        taken.append(ahead[0])
        room -= len(ahead[0].text)
        ahead.rotate(-1)
    return taken
