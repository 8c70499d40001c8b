"""Holds docs/layouts.md to its word: its commands print what it quotes, and draw the pictures that it shows."""

import doctest
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from deltaspan import cli
from deltaspan.plan import DEFAULT_RULE, RULES

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "layouts.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^```console\n\$ (deltaspan .*)\n([^`]*)^```$", TEXT, re.MULTILINE)
DRAWN = re.findall(r"^(?:\$|   ) (deltaspan .*--png docs/(pictures/\S+))$", TEXT, re.MULTILINE)


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a command of the page prints on a terminal of 80 columns."""
    monkeypatch.setattr(cli, "out", Console(width=80, color_system=None))
    done = CliRunner().invoke(cli.app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    return [line.rstrip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("command", "quoted"), QUOTED, ids=[command for command, _ in QUOTED])
def test_commands_print_what_is_quoted(
    command: str, quoted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs/pictures").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    printed, lines = run(command, monkeypatch), quoted.splitlines()
    assert len(lines) > 5
    # dots stand for what the page leaves out before or after
    if lines[0] == "...":
        assert printed[1 - len(lines) :] == lines[1:]
    elif lines[-1] == "...":
        assert printed[: len(lines) - 1] == lines[:-1]
    else:
        assert printed == lines


@pytest.mark.parametrize(("command", "name"), DRAWN, ids=[name for _, name in DRAWN])
def test_commands_draw_what_is_shown(command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs/pictures").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    run(command, monkeypatch)
    with Image.open(DOCS / name) as shown, Image.open(tmp_path / "docs" / name) as drawn:
        if shown.info["Software"] == drawn.info["Software"]:  # another matplotlib may set text in another way
            assert shown.size == drawn.size
            # a hundredth of a pixel's range leaves room for rounding; one tick more or less costs a whole one
            difference = np.abs(np.asarray(shown, dtype=float) - np.asarray(drawn, dtype=float)).max(axis=-1)
            assert (difference > 2.55).mean() < 1e-5


def test_every_picture_is_shown_drawn_and_small() -> None:
    files = {f"pictures/{file.name}": file.stat().st_size for file in (DOCS / "pictures").iterdir()}
    assert set(files) == set(re.findall(r"!\[[^]]+\]\(([^)]+)\)", TEXT)) == {name for _, name in DRAWN}
    assert len(files) >= 5 and max(files.values()) < 120_000


def test_python_prints_what_is_quoted() -> None:
    failed, attempted = doctest.testfile(str(DOCS / "layouts.md"), module_relative=False, encoding="utf-8")
    assert failed == 0 and attempted == TEXT.count("\n>>> ") > 15


def test_the_table_of_rules_is_whole() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (rank|row) \| (.*) \|$", TEXT, re.MULTILINE)
    assert {name: kind for name, kind, _ in rows} == {
        name: "row" if rule.of_row else "rank" for name, rule in RULES.items()
    }
    assert [name for name, _, what in rows if what.startswith("the default")] == [DEFAULT_RULE]
