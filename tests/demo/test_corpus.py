"""The demo's text: whole files in a fixed order, packs that hold them unchanged, labels that stay in their document."""

import sysconfig
from pathlib import Path

import pytest

import deltaspan as ds
from deltaspan.demo import DemoSettings
from deltaspan.demo.corpus import IGNORED_LABEL, Document, TextPack, library_documents, text_packs

CAPACITY = DemoSettings().capacity


def test_the_library_is_read_alike_every_time() -> None:
    documents = library_documents()
    assert documents == library_documents()
    names = [document.name for document in documents]
    assert names == sorted(set(names)) and len(names) > 100
    root = Path(sysconfig.get_path("stdlib"))
    assert all(document.text == (root / document.name).read_bytes() != b"" for document in documents[::20])
    assert text_packs(documents, 20, CAPACITY) == text_packs(documents, 20, CAPACITY)


def test_tests_and_tables_of_numbers_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "below").mkdir()
    for name, text in {
        "test/test_a.py": "import this\n", "below/b.py": "import that\n", "table.py": "x = [0x17, 0x18, 0x1b]\n",
        "a.py": "import other\n", "empty.py": "", "notes.txt": "words\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    assert [document.name for document in library_documents(tmp_path)] == ["a.py", "below/b.py"]


def test_packs_hold_whole_documents_of_mixed_sizes() -> None:
    documents = library_documents()
    packs = text_packs(documents, 30, CAPACITY)
    known = set(documents)
    assert len(packs) == 30
    for pack in packs:
        assert set(pack.documents) <= known and len(set(pack.documents)) == len(pack.documents)
        assert pack.cu_seqlens[-1] == sum(pack.lengths) <= CAPACITY
        assert len(pack.documents) >= 3 and max(pack.lengths) > 4 * sorted(pack.lengths)[-2]
        assert bytes(pack.tokens[0].tolist()) == b"".join(document.text for document in pack.documents)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag_per_document"])
def test_one_document_spans_all_four_ranks(layout: str) -> None:
    for pack in text_packs(library_documents(), 30, CAPACITY):
        part = ds.partition(pack.cu_seqlens, 4, layout=layout)
        longest = pack.lengths.index(max(pack.lengths))
        holders = part.table.rank[(part.table.doc == longest) & (part.table.length > 0)]
        assert set(holders.tolist()) == {0, 1, 2, 3}


def test_labels_are_the_next_byte_of_the_same_document() -> None:
    pack = TextPack((Document("a", b"xyz"), Document("b", b"q"), Document("c", b"no")))
    none = IGNORED_LABEL
    assert pack.labels.tolist() == [[ord("y"), ord("z"), none, none, ord("o"), none]]
    assert pack.labels.shape == pack.tokens.shape
    assert pack.predicted == (pack.labels != none).sum() == 3


def test_a_library_without_fitting_documents_is_refused() -> None:
    with pytest.raises(ValueError, match="hold 0 of 600 to 750 bytes and 1 of at most 120"):
        text_packs([Document("a", b"x" * 100)], 2, 1000)
