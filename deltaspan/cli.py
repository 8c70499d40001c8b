"""The command line: `demo`, `plan`, `verify`, `bench` and `plot`; it parses, calls and prints, and knows no more.

Exit codes: 0 if all that was asked for holds, 1 if not, 2 for bad usage.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

FAILED, BAD_USAGE = 1, 2
LAYOUTS = "contiguous, zigzag or zigzag_per_document."
# As the planner has them, which only a plan loads: help answers at once.
DEFAULT_RULE = "row_cost_lpt"
RULES = "one, chain_min, occ, wave, wave_fill1, wave_fill, row_cost, row_cost_lpt, small_one, fill_down, fill_small"
RULES += " or least_time"
PLAN_OPTIONS = {"world_size": "--cp", "sm_count": "--sms", "cu_seqlens": "--lengths"}  # by a message's argument
PLAN_OPTIONS |= {name: f"--{name}" for name in ("layout", "hv", "rule")}
BENCH_NAMES = "shards", "layout", "heads", "peers", "decay", "backend", "device", "samples", "seed"
BENCH_OPTIONS = {"world_size": "--cp"} | {name: f"--{name}" for name in BENCH_NAMES}
COUNTS_AT_MOST = 1 << 16  # ranks, heads, multiprocessors: beyond any machine, and still planned in seconds
TOKENS_AT_MOST = 10**12  # of a document: beyond any corpus, and sums of thousands stay within int64

app = typer.Typer(
    help="Exact context-parallel training of Gated DeltaNet layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
out = Console()
err = Console(stderr=True)


def main() -> None:
    """Runs the command line."""
    app(prog_name="deltaspan")


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Processes that share every pack.")] = 4,
    layout: Annotated[str, typer.Option(help=LAYOUTS)] = "zigzag_per_document",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 20,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: one GPU a rank, else the CPU.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="For the pictures and the record.")] = Path("deltaspan-demo"),
) -> None:
    """Train a small model on several ranks and on one, and check both against float64."""
    with _waiting("reading the documents"), _usage_errors():
        from deltaspan.demo import DemoSettings, RankFailed, opening, prepare, report, run_demo

        run = prepare(DemoSettings(ranks=ranks, layout=layout, steps=steps), device)
        folder.mkdir(parents=True, exist_ok=True)
    out.print(opening(run))
    try:
        with _progress() as advance:
            record = run_demo(run, advance)
    except RankFailed as failure:
        err.print(str(failure), style="red", markup=False, highlight=False)
        raise typer.Exit(FAILED) from None
    out.print(report(record))
    written = [_write_json(record, folder / "demo.json")]
    try:
        written += [
            _draw("curves", "save_curves", record, folder / "losses.png"),
            _draw("partition", "save_partition", record["partition"], folder / "partition.png"),
        ]
    except ModuleNotFoundError as missing:
        err.print(f"no pictures: {missing.name} is not installed (pip install 'deltaspan\\[plots]')", highlight=False)
    out.print("Written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)
    raise typer.Exit(0 if record["ok"] else FAILED)


@app.command()
def plan(
    cp: Annotated[int, typer.Option(help="Ranks of the context-parallel group.")],
    layout: Annotated[str, typer.Option(help=LAYOUTS)],
    hv: Annotated[int, typer.Option(help="Value heads.")],
    pack: Annotated[str | None, typer.Option(help="A pack by name: P1 to P5, A1 to A4, C3, C6, C8.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Or document lengths, such as 128102,131072.")] = None,
    sms: Annotated[int, typer.Option(help="Multiprocessors of a rank's device.")] = 132,
    rule: Annotated[str, typer.Option(help=f"How fragments are cut into segments: {RULES}.")] = DEFAULT_RULE,
    compare: Annotated[str | None, typer.Option(help=f"Plan by a second rule too, and compare both: {RULES}.")] = None,
    json_to: Annotated[str | None, typer.Option("--json", help="Write the plan to a file; - prints it alone.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the partition into a file.")] = None,
) -> None:
    """Show where the tokens of a pack would live, and what each rank would have to do."""
    with _waiting("planning"), _usage_errors(PLAN_OPTIONS):
        from deltaspan.layout import partition
        from deltaspan.plan import plan_segments

        for option, count in (("--cp", cp), ("--hv", hv), ("--sms", sms)):
            _refuse_above(COUNTS_AT_MOST, option, count)
        documents = _document_lengths(pack, lengths)
        part = partition([0, *accumulate(documents)], cp, layout=layout)
        record = {
            "pack": pack,
            "lengths": documents,
            "cp": cp,
            "layout": part.layout,
            "rule": rule,
            "hv": hv,
            "sms": sms,
            "fragments": [[list(fragment[:3]) for fragment in fragments] for fragments in part.fragments],
            "segments": plan_segments(part, hv=hv, sm_count=sms, rule=rule),
        }
    if compare is not None:
        with _usage_errors({"rule": "--compare"}):
            if compare == rule:
                raise ValueError(f"rule must be another rule than --rule, got {compare!r}")
            record["compare"] = {"rule": compare, "segments": plan_segments(part, hv=hv, sm_count=sms, rule=compare)}
    _give_json(record, json_to)
    if json_to != "-":
        with _waiting("counting"):
            from deltaspan.plots.plan_table import plan_view

            view = plan_view(record, part, out.width)
        out.print(*view, sep="\n", highlight=False)
    if png is not None:
        with _waiting("drawing"), _usage_errors():
            _draw("partition", "save_partition", record, png)


@app.command()
def verify(
    suite: Annotated[str, typer.Option(help="How much to check: quick.")] = "quick",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of cases and inputs; default: a fresh one, which is shown.")] = None,
    mutants: Annotated[bool, typer.Option("--mutants", help="Plant faults instead, and see each one caught.")] = False,
    json_to: Annotated[str | None, typer.Option("--json", help="Write it to a file; - prints it alone.")] = None,
) -> None:
    """Check this machine's results against the float64 recurrence, or the checks against planted faults."""
    with _usage_errors({"seed": "--seed"}), _progress() as advance:
        _refuse_above((1 << 63) - 1, "--seed", seed or 0)  # more than a generator takes
        from deltaspan.verify import run_mutants, run_suite

        if mutants:
            report = run_mutants(device=device, seed=seed, progress=advance)
        else:
            report = run_suite(suite, device=device, seed=seed, progress=advance)
    _give_json(report.to_json(), json_to)
    if json_to != "-":
        out.print(report.table())
    raise typer.Exit(0 if report.ok else FAILED)


@app.command()
def bench(
    shards: Annotated[str | None, typer.Option(help="all, or some of P4/2 to P4/16, 3docs, 2docs, NxL.")] = None,
    pack: Annotated[str | None, typer.Option(help="Packs by name, such as P1,P4: slowest rank and all ranks.")] = None,
    cp: Annotated[str | None, typer.Option(help="With --pack, ranks of the group, such as 2,4; default: 4.")] = None,
    layout: Annotated[str | None, typer.Option(help="With --pack, layouts, or all; default: contiguous.")] = None,
    heads: Annotated[str, typer.Option(help="Key heads and value heads.")] = "16,48",
    peers: Annotated[str | None, typer.Option(help="Other implementations to time: fla,flash_qla,flashinfer.")] = None,
    decay: Annotated[str, typer.Option(help="moderate or slow.")] = "moderate",
    backend: Annotated[str, typer.Option(help="A tier by name.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    samples: Annotated[int, typer.Option(help="Of each side, after warming up; at least 8.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the operands.")] = 0,
    json_to: Annotated[str | None, typer.Option("--json", help="Write it to a file; - prints it alone.")] = None,
    md: Annotated[Path | None, typer.Option(help="Write the table to a file.")] = None,
) -> None:
    """Time forward and training step, each side only if float64 finds it right."""
    with _waiting("loading"), _usage_errors(BENCH_OPTIONS):
        from deltaspan.bench.files import claim
        from deltaspan.bench.report import line, table
        from deltaspan.bench.run import Request, prepare

        if not shards and not pack:
            raise ValueError("one of --shards and --pack is needed, or both")
        if not pack and (cp or layout):
            raise ValueError("--cp and --layout go with --pack, which is not given")
        packs, layouts = _packs(_names(pack)), _names(layout or "contiguous")
        cps, of_heads = (_whole_numbers(*given, COUNTS_AT_MOST) for given in (("--cp", cp or "4"), ("--heads", heads)))
        ready = prepare(Request(
            _names(shards), packs, cps, layouts, of_heads, _names(peers),
            decay=decay, backend=backend, device=device, samples=samples, seed=seed,
        ))  # fmt: skip
        claim({"--json": None if json_to == "-" else json_to, "--md": md})  # now rather than after minutes
    for record in ready.run(_tell):
        _tell(line(record["rows"][-1], record["phases"]))
        _give_json(record, None if json_to == "-" else json_to)
        if md is not None:
            md.write_text(table(record) + "\n", encoding="utf-8")
    print(json.dumps(record) if json_to == "-" else table(record))
    raise typer.Exit(0 if all(row["ok"] for row in record["rows"]) else FAILED)


@app.command()
def plot(
    file: Annotated[Path, typer.Argument(help="What plan, demo or bench wrote as JSON.")],
    folder: Annotated[Path, typer.Option("--out", help="For the pictures.")],
) -> None:
    """Draw a record, by what it holds."""
    with _waiting("drawing"), _usage_errors({"record": str(file)}):
        written = import_module("deltaspan.plots.draw").draw(file.read_bytes(), folder)
    out.print("Written: " + ", ".join(map(str, written)), highlight=False, soft_wrap=True)


def _document_lengths(pack: str | None, lengths: str | None) -> list[int]:
    if (pack is None) == (lengths is None):
        raise ValueError("one of --pack and --lengths is needed, and not both")
    return _packs([pack])[pack] if lengths is None else _whole_numbers("--lengths", lengths, TOKENS_AT_MOST)


def _packs(names: Sequence[str]) -> dict[str, list[int]]:
    packs = json.loads(files("deltaspan").joinpath("data/packs.json").read_text(encoding="utf-8"))["packs"]
    for name in names:
        if name not in packs:
            raise ValueError(f"--pack must be one of {', '.join(packs)}, got {name!r}")
    return {name: packs[name] for name in names}


def _names(given: str | None) -> list[str]:
    return [name.strip() for name in given.split(",")] if given else []


def _whole_numbers(option: str, given: str, most: int) -> list[int]:
    texts = [text.strip() for text in given.split(",")]
    if not all(text.isdecimal() and int(text) <= most for text in texts):
        raise ValueError(f"{option} must be whole numbers from 0 to {most:,} with commas between, got {given!r}")
    return [int(text) for text in texts]


def _refuse_above(most: int, option: str, found: int) -> None:
    if found > most:
        raise ValueError(f"{option} must be at most {most:,}, got {found}")


def _draw(module: str, function: str, record: Mapping[str, Any], path: Path) -> Path:
    return getattr(import_module(f"deltaspan.plots.{module}"), function)(record, path)


def _give_json(content: Mapping[str, Any], target: str | None) -> None:
    if target == "-":
        print(json.dumps(content))
    elif target is not None:
        with _usage_errors():
            _write_json(content, Path(target))


def _write_json(content: Mapping[str, Any], path: Path) -> Path:
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return path


@contextmanager
def _usage_errors(options: Mapping[str, str] | None = None) -> Iterator[None]:
    """What the user asked for and cannot have: one line, exit 2; it opens with the option for a named argument."""
    try:
        yield
    except (ValueError, OSError, MemoryError) as error:
        said = str(error) or "what is asked for does not fit in this machine's memory"
        subject, *rest = " ".join(said.splitlines()).split(" ")
        message = " ".join([(options or {}).get(subject, subject), *rest])
        err.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    except ModuleNotFoundError as missing:
        if missing.name != "matplotlib":
            raise
        err.print("error: pictures need matplotlib: pip install 'deltaspan[plots]'", style="red", markup=False)
    else:
        return
    raise typer.Exit(BAD_USAGE)


def _tell(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """A spinner on a terminal's stderr, for what may take a while."""
    with err.status(what) if err.is_terminal else nullcontext():
        yield


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Bars on a terminal's stderr, one per stage; yields advance(stage, done, total)."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        tasks: dict[str, Any] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage)
            progress.update(tasks[stage], completed=done, total=total)

        yield advance
