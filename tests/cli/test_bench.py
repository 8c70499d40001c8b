"""`deltaspan bench` and `plot`: what is written and when, exit codes, and one line for a wrong wish."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from deltaspan.bench.peers import PEERS
from deltaspan.cli import app
from tests.bench.peers import Right, Wrong
from tests.plots.test_record import record as plan_record

ROOT = Path(__file__).parents[2]
TOY = ["bench", "--heads", "1,2", "--device", "cpu"]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in (Right, Wrong):
        monkeypatch.setitem(PEERS, peer.name, peer)


def test_rows_are_told_and_written(tmp_path: Path, known: None) -> None:
    made, table = tmp_path / "a.json", tmp_path / "a.md"
    done = run(*TOY, "--shards", "1x70,2x9", "--peers", "right", "--json", made, "--md", table)
    assert done.exit_code == 0
    rows = json.loads(made.read_text())["rows"]
    assert [row["name"] for row in rows] == ["1x70", "2x9"]
    told = done.stderr.splitlines()
    assert [text.split(":")[0] for text in told] == ["[1/2] 1x70", "1x70", "[2/2] 2x9", "2x9"]
    assert table.read_text() == done.stdout and "| 1x70 | 70 |" in done.stdout


def test_a_row_is_written_before_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Right):
        name = "late"

        def __init__(self, lengths: list[int], device: str) -> None:
            super().__init__(lengths, device)
            if lengths == [9, 9]:
                raise KeyboardInterrupt

    monkeypatch.setitem(PEERS, "late", Late)
    made = tmp_path / "a.json"
    assert run(*TOY, "--shards", "1x7,2x9", "--peers", "late", "--json", made).exit_code != 0
    assert [row["name"] for row in json.loads(made.read_text())["rows"]] == ["1x7"]


def test_json_alone_on_stdout() -> None:
    done = run(*TOY, "--shards", "1x5", "--json", "-")
    assert done.exit_code == 0 and json.loads(done.stdout)["rows"][0]["pack"] == "1x5"


def test_a_pack_by_name_in_its_default_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(*TOY, "--pack", "C3", "--cp", "2", "--json", "-")
    assert done.exit_code == 0
    alone, together = json.loads(done.stdout)["rows"]
    assert (alone["layout"], together["layout"], together["cp"]) == ("local", "contiguous", 2)


def test_what_is_wrong_fails_the_command(known: None) -> None:
    done = run("bench", "--device", "cpu", "--heads", "2,2", "--shards", "1x80", "--peers", "right,wrong")
    assert done.exit_code == 1 and "wrong not timed: off by" in done.stdout


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ([], "one of --shards and --pack is needed, or both"),
        (["--shards", ""], "one of --shards and --pack is needed, or both"),
        (["--shards", "P4/3"], "--shards must be all, or some of P4/2, "),
        (["--shards", "1x5", "--cp", "2"], "--cp and --layout go with --pack, which is not given"),
        (["--pack", "P9"], "--pack must be one of P1, "),
        (["--pack", "C3", "--cp", "0"], "--cp must be at least 1, got 0"),
        (["--pack", "C3", "--cp", "two"], "--cp must be whole numbers"),
        (["--pack", "C3", "--layout", "zag"], "--layout must be one of"),
        (["--shards", "1x5", "--heads", "3,4"], "--heads must be H,HV, two numbers from 1 on"),
        (["--shards", "1x5", "--heads", "3"], "--heads must be H,HV, two numbers from 1 on"),
        (["--shards", "1x5", "--peers", "fla"], "--peers must be able to run here, and fla is not: it needs a CUDA"),
        (["--shards", "1x5", "--peers", "zla"], "--peers must be some of fla, flash_qla, flashinfer, got 'zla'"),
        (["--shards", "1x5", "--decay", "none"], "--decay must be one of moderate, slow, got 'none'"),
        (["--shards", "1x5", "--backend", "tpu"], "--backend must be one of"),
        (["--shards", "1x5", "--device", "tpu"], "--device must be cpu or cuda, got 'tpu'"),
        (["--shards", "1x5", "--samples", "7"], "--samples must be at least 8, got 7"),
        (["--shards", "1x5", "--seed", "-1"], f"--seed must be from 0 to {(1 << 63) - 1:,}, got -1"),
        (["--shards", "1x5", "--seed", "9" * 23], f"--seed must be from 0 to {(1 << 63) - 1:,}, got {'9' * 23}"),
        (["--shards", "9" * 11 + "x" + "9" * 11], "--shards must have at most 16,777,216 tokens each, got '99"),
        (["--shards", "1x" + "9" * 23], "--shards must have at most 16,777,216 tokens each, got '1x99"),
        (
            ["--shards", "1x5", "--heads", "1,65537"],
            "--heads must be whole numbers from 0 to 65,536 with commas between, got '1,65537'",
        ),
        (
            ["--pack", "C3", "--cp", "2,65537"],
            "--cp must be whole numbers from 0 to 65,536 with commas between, got '2,65537'",
        ),
        (["--shards", "1x5", "--json", "."], "--json must be a file, and '.' is a folder"),
        (["--shards", "1x5", "--json", ""], "--json must be a file, and '.' is a folder"),
        (["--shards", "1x5", "--md", "/"], "--md must be a file, and '/' is a folder"),
        (
            ["--shards", "1x5", "--json", "a.out", "--md", "x/../a.out"],
            "--json and --md must be two files, got 'x/../a.out'",
        ),
        (["--shards", "1x5", "--json", "/no/such/folder/a"], "[Errno 2] No such file"),
    ],
)
def test_a_wrong_wish_is_one_line_and_exit_2(
    wish: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # the device last, so that a wish of its own comes first
    done = run("bench", *wish, *([] if "--device" in wish else ["--device", "cpu"]))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {said}") and done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["bench", "plot"])
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        "import sys; from deltaspan.cli import app\n"
        f"try: app(['{command}', '--help'])\n"
        "finally: print(sorted({'torch', 'numpy', 'matplotlib'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "[]\n" and "--" in done.stdout


def test_a_benchmark_is_drawn(tmp_path: Path, known: None) -> None:
    made = tmp_path / "a.json"
    run("bench", "--heads", "2,2", "--device", "cpu", "--shards", "1x80", "--peers", "right,wrong", "--json", made)
    done = run("plot", made, "--out", tmp_path / "new" / "folder")
    assert done.exit_code == 0
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {"times.png", "ratios.png"}
    picture = imread(tmp_path / "new" / "folder" / "times.png")[..., :3]
    for colour in ((0x1F, 0x77, 0xB4), (0x94, 0x67, 0xBD)):  # our bars, and those of a peer without its own colour
        assert (abs(picture - [channel / 255 for channel in colour]) < 1 / 200).all(-1).mean() > 0.01


def test_a_benchmark_without_peers_has_no_ratios(tmp_path: Path) -> None:
    made = tmp_path / "a.json"
    run(*TOY, "--shards", "1x5", "--json", made)
    assert run("plot", made, "--out", tmp_path / "p").exit_code == 0
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["times.png"]


def test_plans_and_demos_are_drawn(tmp_path: Path) -> None:
    plan = plan_record([300, 200], 2, "zigzag")
    demo = {
        "settings": {"ranks": 2, "layout": "zigzag"},
        "losses": {"ranks": [5.0, 4.0], "one": [5.0, 4.1]},
        "bounds": {"loss": 1e-4, "judged_steps": 2},
        "partition": plan,
    }
    for content, names in ((plan, {"partition.png"}), (demo, {"losses.png", "partition.png"})):
        file, folder = tmp_path / "a.json", tmp_path / str(len(names))
        file.write_text(json.dumps(content))
        assert run("plot", file, "--out", folder).exit_code == 0
        assert {path.name for path in folder.iterdir()} == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"checks": [], "ok": true}',
            "must be what deltaspan plan, demo or bench wrote; this one has the keys checks, ok",
        ),
        ("[1]", "must be what deltaspan plan, demo or bench wrote; this one has none of their keys"),
        ("# no JSON", "must be JSON, and this is not: Expecting value: line 1 column 1 (char 0)"),
        ('{"decay": "slow", "asked": 1, "rows": []}', "must have two whole numbers as heads, and has nothing there"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    done = run("plot", file, "--out", tmp_path / "p")
    assert (done.exit_code, done.stderr) == (2, f"error: {file} {said}\n")
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("content", [b"\x80\xff\x01\n\xfe", bytes(range(256)), b"[" * 100_000, b"1" * 5000])
def test_bytes_that_are_no_json_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    done = run("plot", file, "--out", tmp_path / "p")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {file} must be JSON, and this is not: ")


def test_kernels_that_are_asked_for_shards_nobody_knows() -> None:
    wish = [sys.executable, "-m", "deltaspan.bench.kernels", "--shards", "1x64,typo"]
    done = subprocess.run(wish, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: --shards must be all, or some of") and "got 'typo'" in done.stderr
