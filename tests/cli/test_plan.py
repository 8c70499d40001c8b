"""`deltaspan plan`: the JSON that is promised, alone where that is asked for, and one line for a wrong wish."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deltaspan import cli
from deltaspan.cli import app
from deltaspan.plan import DEFAULT_RULE, RULES

ROOT = Path(__file__).parents[2]
P3 = ["plan", "--pack", "P3", "--cp", "4", "--layout", "zigzag", "--hv", "48"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_json_alone_on_stdout() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deltaspan", *P3, "--json", "-"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout) == {
        "pack": "P3",
        "lengths": [128102, 131072],
        "cp": 4,
        "layout": "zigzag",
        "rule": "row_cost_lpt",
        "hv": 48,
        "sms": 132,
        "fragments": [
            [[0, 0, 32397], [1, 98676, 32396]],
            [[0, 32397, 32397], [1, 66280, 32396]],
            [[0, 64794, 32397], [1, 33883, 32397]],
            [[0, 97191, 30911], [1, 0, 1486], [1, 1486, 32397]],
        ],
        "segments": [4, 4, 4, 4],
    }


def test_json_into_a_file_beside_the_table(tmp_path: Path) -> None:
    done = run("plan", "--lengths", "100,0,30", "--cp", "2", "--layout", "contiguous", "--hv", "4",
               "--json", str(tmp_path / "plan.json"), "--png", str(tmp_path / "plan.png"))  # fmt: skip
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "plan.json").read_text())
    assert made["pack"] is None and made["lengths"] == [100, 0, 30]
    assert made["fragments"] == [[[0, 0, 65]], [[0, 65, 35], [2, 0, 30]]]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "rank 1 <" in done.stdout and "received" in done.stdout


def test_two_rules_are_compared(tmp_path: Path) -> None:
    wish = ("plan", "--pack", "P3", "--cp", "4", "--layout", "contiguous", "--hv", "48", "--sms", "152")
    made = json.loads(run(*wish, "--compare", "row_cost", "--json", "-").stdout)
    assert made["rule"] == "row_cost_lpt" and made["segments"] == [6, 6, 6, 6]
    assert made["compare"] == {"rule": "row_cost", "segments": [6, 11, 6, 6]}
    assert list(json.loads(run(*wish, "--json", "-").stdout)) == [key for key in made if key != "compare"]
    done = run(*wish, "--compare", "row_cost", "--png", str(tmp_path / "plan.png"))
    assert done.exit_code == 0 and done.stdout.rstrip().endswith("row_cost_lpt is shorter.")
    turned = run(*wish, "--rule", "row_cost", "--compare", "row_cost_lpt").stdout
    assert "2,880 / 2,704 = 1.0651." in " ".join(turned.split()) and turned.rstrip().endswith(
        "row_cost_lpt is shorter."
    )


def test_help_lists_the_planners_rules() -> None:
    assert cli.RULES.replace(" or ", ", ").split(", ") == list(RULES) and cli.DEFAULT_RULE == DEFAULT_RULE
    words = run("plan", "--help").stdout
    assert all(words.count(rule) >= 2 for rule in RULES)  # for --rule and for --compare


def test_a_thousand_ranks_are_shown_in_part() -> None:
    done = run("plan", "--pack", "P1", "--cp", "1024", "--layout", "zigzag", "--hv", "48", "--compare", "occ")
    assert done.exit_code == 0 and done.stdout.count("rank 1023") == 1
    assert len(done.stdout.splitlines()) < 200 and "1,024 ranks" in done.stdout


def test_the_table_marks_the_slowest_rank() -> None:
    done = run("plan", "--lengths", "64,640", "--layout", "contiguous", "--cp", "2", "--hv", "1", "--sms", "1",
               "--rule", "one")  # fmt: skip
    # rank 0 walks 1 and 5 chunks, and the 5 once more in each summary: 3 x 6 + 5 x 5; rank 1 walks 6: 3 x 6
    assert done.exit_code == 0 and [line.split()[-2:] for line in done.stdout.splitlines() if line.endswith("*  ")] == [
        ["43", "*"]
    ]
    assert "The slowest is rank 0 at 43 walk steps." in done.stdout


def test_known_packs_are_whole() -> None:
    totals = {"P1": 241817, "P2": 261987, "P3": 259174, "P4": 254976, "P5": 249856}
    for name in [*totals, "A1", "A2", "A3", "A4", "C3", "C6", "C8"]:
        done = run("plan", "--pack", name, "--cp", "2", "--layout", "contiguous", "--hv", "48", "--json", "-")
        made = json.loads(done.stdout)
        assert sum(made["lengths"]) == totals.get(name, sum(made["lengths"]))
        assert sum(length for row in made["fragments"] for _, _, length in row) == sum(made["lengths"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--layout", "spiral"], "--layout must be one of contiguous"),
        (["--cp", "0"], "--cp must be at least 1, got 0"),
        (["--hv", "0"], "--hv must be at least 1, got 0"),
        (["--sms", "0"], "--sms must be at least 1, got 0"),
        (["--cp", "65537"], "--cp must be at most 65,536, got 65537"),
        (["--hv", "9" * 20, "--sms", "1"], f"--hv must be at most 65,536, got {'9' * 20}"),
        (["--sms", "9" * 20], f"--sms must be at most 65,536, got {'9' * 20}"),
        (["--rule", "luck"], "--rule must be one of one, chain_min"),
        (["--compare", "luck"], "--compare must be one of one, chain_min"),
        (["--compare", "row_cost_lpt"], "--compare must be another rule than --rule, got 'row_cost_lpt'"),
        (["--pack", "P9"], "--pack must be one of P1, P2"),
        (["--lengths", "1,2"], "one of --pack and --lengths"),
        (["--json", "no/such/folder/plan.json"], "No such file"),
    ],
)
def test_a_wrong_wish_is_one_line_and_exit_2(changes: list[str], message: str) -> None:
    done = run(*P3, *changes)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("lengths", ["1,x", "", "5,-1", "10,-1", "9" * 30])
def test_wrong_lengths_are_refused(lengths: str) -> None:
    done = run("plan", "--lengths", lengths, "--cp", "2", "--layout", "zigzag", "--hv", "4")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and done.stdout == ""
    assert done.stderr.startswith("error: --lengths must be ")


def test_lengths_are_bounded() -> None:
    wish = ("plan", "--cp", "2", "--layout", "zigzag", "--hv", "4", "--json", "-", "--lengths")
    done = run(*wish, f"{10**12 + 1},1")
    assert done.exit_code == 2
    said = f"--lengths must be whole numbers from 0 to {10**12:,} with commas between, got '{10**12 + 1},1'"
    assert done.stderr == f"error: {said}\n"
    assert run(*wish, ",".join([str(10**12)] * 3)).exit_code == 0


def test_what_does_not_fit_in_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("deltaspan.layout.partition", full)
    done = run(*P3)
    assert (done.exit_code, done.stderr.count("\n")) == (
        2,
        1,
    ) and "does not fit in this machine's memory" in done.stderr


def test_demo_refuses_wrong_wishes_in_one_line(tmp_path: Path) -> None:
    for wish in (["--ranks", "0"], ["--layout", "spiral"], ["--device", "tpu"]):
        done = run("demo", "--out", str(tmp_path), *wish)
        assert done.exit_code == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_an_unknown_option_is_bad_usage() -> None:
    assert run("plan", "--no-such-option").exit_code == 2
    assert run("plan", "--pack", "P3").exit_code == 2


def test_help_loads_nothing_heavy() -> None:
    listing = "import sys, deltaspan.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "matplotlib"} & set(done.stdout.split())
    assert all(command in run("--help").stdout for command in ("demo", "plan", "verify"))
