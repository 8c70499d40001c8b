"""The PNG files: they are made for every size of partition, and show what they must."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from deltaspan.plots import partition as picture
from deltaspan.plots.curves import save_curves
from deltaspan.plots.partition import colour, save_partition

from .test_record import WORKED, record


def shows(path: Path, doc: int) -> bool:
    """Whether a picture holds the document's colour, up to the rounding of a byte."""
    return bool((abs(imread(path)[..., :3] - colour(doc)) < 1 / 200).all(-1).any())


def test_every_document_has_its_colour(tmp_path: Path) -> None:
    path = save_partition(record([300, 200, 400], 4, "zigzag"), tmp_path / "a.png")
    assert [shows(path, doc) for doc in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("lengths", "cp", "layout"),
    [
        ([100, 50], 1, "contiguous"),
        ([0, 0], 2, "zigzag_per_document"),
        ([64] * 40, 3, "zigzag"),
        ([5000], 64, "zigzag"),
    ],
)
def test_any_size_is_drawn(tmp_path: Path, lengths: list[int], cp: int, layout: str) -> None:
    assert save_partition(record(lengths, cp, layout), tmp_path / "a.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arrows", "marks", "said"), [(150, 1500, "Arrows"), (2, 1500, "Black marks"), (0, 2, "No arrows")]
)
def test_the_title_says_how_seams_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrows: int, marks: int, said: str
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(picture, "ARROWS_AT_MOST", arrows)
    monkeypatch.setattr(picture, "MARKS_AT_MOST", marks)
    monkeypatch.setattr(
        picture.Figure, "savefig", lambda figure, *_, **__: titles.append(figure.axes[0].get_title("left"))
    )
    save_partition(WORKED, tmp_path / "a.png")
    assert said in titles[0] and "(3 in all)" in titles[0]


@pytest.mark.parametrize("last", [2.0, float("nan")])
def test_curves_are_drawn(tmp_path: Path, last: float) -> None:
    made: dict[str, Any] = {
        "settings": {"ranks": 4, "layout": "zigzag"},
        "losses": {"ranks": [5.0, 4.0, last], "one": [5.0, 4.000001, 2.0]},
        "bounds": {"loss": 1e-4, "judged_steps": 20},
    }
    assert save_curves(made, tmp_path / "a.png").stat().st_size > 5000
