"""Compiles every kernel for sm_90a, without a GPU, and holds what it takes of a multiprocessor to a stated budget.

    python -m deltaspan.bench.compile [--json FILE]

Exit 0 if every kernel compiles within its budget, 1 if not, 2 if there is no Triton.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

TELLING = ("HGMMA", "HMMA", "FFMA", "MUFU", "LDG", "STG", "LDS", "STS", "UTMALDG", "UTMASTG", "BAR", "SHFL")
"""Opcodes whose counts say most: products, exponentials, memory, barriers."""


@dataclass(frozen=True)
class Case:
    """A kernel as it is launched, and what it may take. None of them may spill."""

    kernel: str  # module:name
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    registers: int  # a thread
    shared: int  # bytes a program
    instructions: int
    reason: str  # for the limits


def _prep(H: int, group: int, shared: int, instructions: int) -> Case:
    return Case(
        kernel="deltaspan.kernels.hopper.prep:prep_kernel",
        arguments={
            "k": "*bf16", "g": "*fp32", "beta": "*fp32", "chunks": "*i32", "A": "*bf16", "G": "*fp32", "broken": "*i32",
            "reach": "*fp32", "NC": "i32", "pitch": "i32",
        },
        constants={"H": H, "GROUP": group},
        num_warps=1,
        registers=255,
        shared=shared,
        instructions=instructions,
        reason="8 warps a multiprocessor, which registers allow and shared memory does not limit; code within 48 KB",
    )  # fmt: skip


CASES = {
    "prep, 16 key heads x 1": _prep(16, 1, 9 * 1024, 2300),
    "prep, 16 key heads x 3": _prep(16, 3, 18 * 1024, 2900),
    "prep, 2 key heads x 4": _prep(2, 4, 22 * 1024, 3200),
}


def report(cases: Mapping[str, Case] = CASES) -> dict[str, Any]:
    """By case: what the compiler made of it, and what of that is over budget."""
    ahead = import_module("deltaspan.kernels.hopper.ahead")
    rows = []
    for name, case in cases.items():
        module, kernel = case.kernel.split(":")
        begin = time.perf_counter()
        made = ahead.compile_ahead(
            getattr(import_module(module), kernel), case.arguments, case.constants, case.num_warps
        )
        total = made.instructions.total()
        taken = {"registers": made.registers, "shared": made.shared, "instructions": total}
        over = [
            f"{what} {found} > {getattr(case, what)}" for what, found in taken.items() if found > getattr(case, what)
        ]
        if made.spills or made.stack:
            over.append(f"{made.spills} spills, {made.stack} B of stack")
        rows.append(
            {"name": name, **taken, "spills": made.spills, "seconds": round(time.perf_counter() - begin, 1),
             "opcodes": {op: made.instructions[op] for op in TELLING if made.instructions[op]}, "over": over}
        )  # fmt: skip
    return {"triton": ahead.TRITON, "target": "sm_90a", "kernels": rows}


def table(made: Mapping[str, Any]) -> Table:
    shown = Table("kernel", "registers", "spills", "shared", "instructions", "of them", "over budget")
    for row in made["kernels"]:
        opcodes = ", ".join(f"{op} {count}" for op, count in row["opcodes"].items())
        numbers = (row[name] for name in ("registers", "spills", "shared", "instructions"))
        shown.add_row(row["name"], *(f"{number:,}" for number in numbers), opcodes, "; ".join(row["over"]) or "no")
    return shown


def main(
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the report to a file.")] = None,
) -> None:
    """Compile every kernel for sm_90a and compare it with its budget."""
    try:
        made = report()
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        typer.echo("error: kernels need Triton: pip install 'deltaspan[kernels]'", err=True)
        raise typer.Exit(2) from None
    Console(width=160).print(f"Triton {made['triton']}, {made['target']}", table(made), sep="\n")
    if json_to is not None:
        json_to.write_text(json.dumps(made) + "\n", encoding="utf-8")
    raise typer.Exit(1 if any(row["over"] for row in made["kernels"]) else 0)


if __name__ == "__main__":
    typer.run(main)
