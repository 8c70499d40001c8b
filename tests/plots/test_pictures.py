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
        ([1, 1, 1], 8, "contiguous"),
        ([5000], 64, "zigzag"),
    ],
)
def test_any_size_is_drawn(tmp_path: Path, lengths: list[int], cp: int, layout: str) -> None:
    assert save_partition(record(lengths, cp, layout), tmp_path / "a.png").stat().st_size > 5000


def test_documents_of_one_token_and_rows_of_a_pixel_are_seen(tmp_path: Path) -> None:
    path = save_partition(record([20000, 1, 20000], 1, "contiguous"), tmp_path / "a.png")
    sliver = (abs(imread(path)[..., :3] - colour(1)) < 0.1).all(-1).any(axis=1)
    assert sliver.sum() > 30  # rows: the whole height of the bar, where the legend's patch has some ten
    path = save_partition(record([300, 700], 500, "contiguous"), tmp_path / "a.png")
    seen = (abs(imread(path)[..., :3] - colour(0)) < 0.1).all(-1).any(axis=1)
    assert seen.mean() > 0.2  # of the height; 0.3 of the ranks hold it


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved, instead of files."""
    saved: list[Any] = []
    monkeypatch.setattr(picture.Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    return saved


def test_segments_are_ticked_and_p_stands_at_the_right(tmp_path: Path, figures: list[Any]) -> None:
    # rank 0: 10 chunks in 3 segments, from chunks 3 and 6; rank 1 is whole
    made = record([640, 640], 2, "contiguous") | {"segments": [3, 1]}
    save_partition(made, tmp_path / "a.png")
    axes = figures[0].axes[0]
    ticks = next(each for each in axes.collections if isinstance(each, picture.LineCollection)).get_segments()
    assert sorted({float(x) for tick in ticks for x, _ in tick}) == [192, 384]
    assert all(-0.5 < y < 0.5 for tick in ticks for _, y in tick) and len(ticks) == 4
    assert [text.get_text() for text in axes.texts if text.get_text().startswith("P ")] == ["P 3", "P 1"]
    assert "P: segments of each piece, by the rule one" in axes.get_title("left")
    save_partition(made | {"segments": [1, 1]}, tmp_path / "a.png")
    assert "not cut" in figures[1].axes[0].get_title("left")


def test_state_is_seen_to_pass_between_ranks_and_within_one(tmp_path: Path, figures: list[Any]) -> None:
    save_partition(WORKED, tmp_path / "a.png")
    axes = figures[0].axes[0]
    ends = [(tuple(map(float, text.xyann)), tuple(map(float, text.xy))) for text in axes.texts if text.get_text() == ""]
    half = picture.BAR_HEIGHT / 2
    assert ends == [
        ((25, half), (0, 1 - half)), ((25, 1 - half), (25, 1 - half)), ((50, 1 - half), (25, half)),
        ((51, half), (50, 1 - half)), ((51, 1 - half), (51, 1 - half)),
    ]  # fmt: skip
    assert "(3 to another rank and 2 to the same rank's next piece)" in axes.get_title("left")


def test_ranks_without_tokens_say_so(tmp_path: Path, figures: list[Any]) -> None:
    save_partition(record([2], 4, "contiguous"), tmp_path / "a.png")
    assert [text.get_position() for text in figures[0].axes[0].texts if "no tokens" in text.get_text()] == [
        (0, 2),
        (0, 3),
    ]


@pytest.mark.parametrize(
    ("arrows", "marks", "said"), [(150, 1500, "Arrows"), (2, 1500, "Black marks"), (0, 2, "No arrows")]
)
def test_the_title_says_how_seams_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: list[Any], arrows: int, marks: int, said: str
) -> None:
    monkeypatch.setattr(picture, "ARROWS_AT_MOST", arrows)
    monkeypatch.setattr(picture, "MARKS_AT_MOST", marks)
    save_partition(WORKED, tmp_path / "a.png")
    title = figures[0].axes[0].get_title("left")
    assert said in title and "3 to another rank" in title
    drawn = figures[0].axes[0]
    assert bool(drawn.lines) == (said == "Black marks") and any(not text.get_text() for text in drawn.texts) == (
        said == "Arrows"
    )
    save_partition(record([64, 64], 2, "contiguous"), tmp_path / "a.png")
    assert "no state is passed" in figures[1].axes[0].get_title("left")
    save_partition(record([900], 200, "contiguous"), tmp_path / "a.png")
    assert "No arrows" in figures[2].axes[0].get_title("left") and not figures[2].axes[0].lines


@pytest.mark.parametrize("last", [2.0, float("nan")])
def test_curves_are_drawn(tmp_path: Path, last: float) -> None:
    made: dict[str, Any] = {
        "settings": {"ranks": 4, "layout": "zigzag"},
        "losses": {"ranks": [5.0, 4.0, last], "one": [5.0, 4.000001, 2.0]},
        "bounds": {"loss": 1e-4, "judged_steps": 20},
    }
    assert save_curves(made, tmp_path / "a.png").stat().st_size > 5000
