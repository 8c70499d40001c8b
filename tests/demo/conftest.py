"""A small run that several tests look at."""

import pytest

from deltaspan.demo import DemoSettings
from deltaspan.demo.corpus import Document
from deltaspan.demo.model import ModelShape


@pytest.fixture
def settings() -> DemoSettings:
    return DemoSettings(ranks=2, steps=2, capacity=400, shape=ModelShape(hidden=16, head_dim=8))


@pytest.fixture
def documents() -> list[Document]:
    words = b"state crosses ranks where a document does "
    lengths = [41, 260, 3, 66, 1, 290, 80]
    return [Document(f"text {i}", (words * 9)[i : i + length]) for i, length in enumerate(lengths)]
