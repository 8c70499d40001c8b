"""Holds the repository to its own word: README against the files that it names, versions, and file sizes."""

import re
from pathlib import Path

import deltaspan as ds

ROOT = Path(__file__).parents[1]
LINES, KERNEL_LINES = 300, 500


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_readme_shows_the_example_as_it_is() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", read("README.md"), re.MULTILINE | re.DOTALL)
    assert read("examples/train_step.py") in blocks


def test_readme_pictures_the_layouts_as_they_are() -> None:
    rows = re.findall(
        r"^    (pack|contiguous|zigzag|zigzag_per_document) +((?:\w )+\w)$", read("README.md"), re.MULTILINE
    )
    (_, pack), *layouts = [(name, cells.split()) for name, cells in rows]
    assert len(layouts) == 3
    for layout, owners in layouts:
        part = ds.partition([0, pack.count("A"), len(pack)], 4, layout=layout)
        assert [[str(rank) == owner for owner in owners] for rank in range(4)] == [
            [token in part.token_ids(rank) for token in range(len(pack))] for rank in range(4)
        ]


def test_readme_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", read("README.md"))
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_readme_names_only_targets_that_make_has() -> None:
    named = set(re.findall(r"(?:`|^    )make ([a-z]+)", read("README.md"), re.MULTILINE))
    assert {"demo", "test"} <= named
    assert named <= set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))


def test_changelog_opens_with_this_version() -> None:
    newest = re.search(r"^## \[([^]]+)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert newest and newest[1] == ds.__version__


def test_no_file_of_the_package_outgrows_a_reader() -> None:
    def limit(file: Path) -> int:
        return KERNEL_LINES if file.is_relative_to(ROOT / "deltaspan/kernels") else LINES

    sizes = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in (ROOT / "deltaspan").rglob("*.py")}
    assert sizes
    assert {str(file.relative_to(ROOT)): size for file, size in sizes.items() if size > limit(file)} == {}
