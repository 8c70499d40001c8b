"""The pictures of a benchmark: a panel for each of what was timed."""

from pathlib import Path
from typing import Any

import pytest

from deltaspan.plots import bench
from deltaspan.plots.whole import check_bench

from .test_whole import BENCH


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved, instead of files."""
    saved: list[Any] = []
    monkeypatch.setattr(bench.Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    return saved


@pytest.mark.parametrize(
    ("timed", "panels"),
    [
        ({}, ["forward", "checkpointed step"]),  # a record from before it said what is timed
        ({"phases": ["forward", "step"]}, ["forward", "checkpointed step"]),
        ({"phases": ["forward"]}, ["forward"]),
    ],
)
def test_a_panel_for_each_of_what_was_timed(
    timed: dict[str, Any], panels: list[str], figures: list[Any], tmp_path: Path
) -> None:
    record = BENCH | timed
    bench.save_times(record, tmp_path / "times.png")
    assert bench.save_ratios(record, tmp_path / "ratios.png")
    assert [axes.get_xlabel() for axes in figures[0].axes] == [f"{name}, ms" for name in panels]
    assert [axes.get_xlabel() for axes in figures[1].axes] == panels
    assert all(axes.patches for axes in figures[0].axes) and all(axes.lines for axes in figures[1].axes)


@pytest.mark.parametrize("phases", [[], ["step"], ["forward", "backward"], "forward", None, 3])
def test_what_was_timed_has_to_be_known(phases: Any) -> None:
    with pytest.raises(ValueError, match=r"record must have forward, with step or alone, as phases, got "):
        check_bench(BENCH | {"phases": phases})
