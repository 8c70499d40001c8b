"""What a run of the demo shows on a terminal: before it starts, and when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from deltaspan.demo.run import DemoRun
from deltaspan.plots.record import plural
from deltaspan.plots.text import partition_picture, sparkline

LOSS_ROWS = 8
KIB = 2**10


def opening(run: DemoRun) -> RenderableType:
    """What is going to happen, and how the first pack lies on the ranks."""
    settings, placement = run.settings, run.placement
    ranks = plural(settings.ranks, "rank")
    tokens = sum(sum(pack.lengths) for pack in run.packs)
    layers, steps = settings.shape.layers, plural(settings.steps, "step")
    text = (
        f"A small language model with {layers} Gated DeltaNet layers learns to predict the sources of Python's "
        f"standard library, byte by byte, {tokens:,} tokens in {steps}. It learns twice from the same start: on "
        f"{ranks} that share every pack of documents, so that documents run across them, and on 1 that has it all. "
        "Both must learn the same."
    )
    device = {"cpu": "the CPU", "cuda": "GPUs"}[placement.device]
    where = f"Ranks are processes on {device}, and talk over {placement.backend}."
    if placement.note:
        where += f" {placement.note}."
    pack = run.packs[0]
    names = Text("its documents: ", style="dim")
    for doc, (document, length) in enumerate(zip(pack.documents, pack.lengths, strict=True)):
        names.append(f"{', ' if doc else ''}{doc} {document.name} ({length:,})")
    return Group(
        Rule("deltaspan demo", align="left"),
        Text(text),
        Text(where),
        Text(),
        *partition_picture(run.partition_record()),
        names,
        Text(),
    )


def report(record: Mapping[str, Any]) -> RenderableType:
    """What came of it: losses, ranks, checks, and a verdict."""
    seconds = record["seconds"]
    ranks = plural(record["settings"]["ranks"], "rank")
    took = f"{seconds['ranks']:.0f} s on {ranks}, {seconds['one']:.0f} s on 1, {seconds['oracle']:.0f} s in float64"
    if record["ok"]:
        verdict = Text("All holds: the ranks learn what one rank learns, up to float32 rounding. ", style="bold green")
    else:
        verdict = Text("A check failed: the ranks do not learn what one rank learns. ", style="bold red")
    return Group(
        Rule("The losses", align="left"),
        _losses(record),
        Rule("The ranks", align="left"),
        _ranks(record),
        Rule("The checks", align="left"),
        _checks(record),
        verdict.append(f"({took})", style="default not bold"),
    )


def _losses(record: Mapping[str, Any]) -> RenderableType:
    many, one = record["losses"]["ranks"], record["losses"]["one"]
    ranks = plural(record["settings"]["ranks"], "rank")
    table = Table("step", ranks, "1 rank", "difference", box=SIMPLE_HEAD)
    for column in table.columns:
        column.justify = "right"
    last = len(many) - 1
    for step in sorted({round(row * last / (LOSS_ROWS - 1)) for row in range(LOSS_ROWS)}):
        difference = many[step] - one[step]
        table.add_row(
            str(step + 1), f"{many[step]:.6f}", f"{one[step]:.6f}", f"{difference:+.1e}" if difference else "0"
        )
    width = max(len(ranks), len("1 rank"))
    lines = [
        Text(f"{name:>{width}} {sparkline(losses)} {losses[0]:.2f} to {losses[-1]:.2f} nats per byte")
        for name, losses in ((ranks, many), ("1 rank", one))
    ]
    return Group(table, *(Padding(line, (0, 1)) for line in lines), Text())


def _ranks(record: Mapping[str, Any]) -> RenderableType:
    table = Table("rank", "tokens a step", "sent a step", "received a step", box=SIMPLE_HEAD)
    for column in table.columns:
        column.justify = "right"
    for rank, seen in enumerate(record["ranks"]):
        sent, received = (sum(seen[name]) / len(seen[name]) / KIB for name in ("sent_bytes", "received_bytes"))
        low, high = min(seen["tokens"]), max(seen["tokens"])
        table.add_row(str(rank), f"{low:,} to {high:,}", f"{sent:,.0f} KiB", f"{received:,.0f} KiB")
    note = "Sent and received: states and convolution rows that cross seams, in the mean, all layers, both directions."
    return Group(table, Text(note, style="dim"), Text())


def _checks(record: Mapping[str, Any]) -> RenderableType:
    table = Table("must agree", "worst in", "difference", "allowed", "", box=SIMPLE_HEAD)
    for column in table.columns[2:4]:
        column.justify = "right"
    for check in record["checks"]:
        holds = Text("holds", style="green") if check["ok"] else Text("FAILS", style="bold red")
        table.add_row(check["name"], check["worst"], f"{check['value']:.1e}", f"{check['bound']:.0e}", holds)
    deaf, judged = record["without_exchange"], record["bounds"]["judged_steps"]
    note = (
        f"Losses: of the first {judged} steps; rounding drives any two runs apart in the end. "
        "Gradients: of every parameter in the first step, by |difference| / |gradient|; float64 is an independent "
        "model over the reference recurrence, on one device. Allowed is what rounding in float32 explains. If the "
        f"ranks told each other nothing, the gradient of {deaf['parameter']} would differ by {deaf['error']:.1e}."
    )
    return Group(table, Text(note, style="dim"), Text())
