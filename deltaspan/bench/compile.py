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
IN_FLIGHT = "loads in flight at an arrival"


@dataclass(frozen=True)
class Case:
    """A kernel as it is launched, and what it may take."""

    kernel: str  # module:name
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]  # beside its module's launch configuration
    num_warps: int
    registers: int  # a thread
    shared: int  # bytes a program
    instructions: int
    reason: str  # for the limits
    spills: int = 0  # loads and stores of local memory
    in_flight: int = 0  # loads that an arrival overtakes: what they load may be overwritten before


def _prep(H: int, group: int, warps: int, instructions: int, *, raw: bool = False) -> Case:
    further = {"q": "*bf16", "q_eighths": "i32", "lengths": "*fp32", "A_log": "*fp32", "dt_bias": "*fp32"}
    return Case(
        kernel="deltaspan.kernels.hopper.prep:prep_kernel",
        arguments={
            "k_tiles": "tiles<bf16[64, 128]>", "A_tiles": "tiles<bf16[64, 64]>", "g": "*fp32", "beta": "*fp32",
            "chunks": "*i32", "G": "*fp32", "broken": "*i32", "reach": "*fp32", "NC": "i32", "step": "i32",
        } | (further if raw else {}),
        constants={"H": H, "GROUP": group, "L2NORM": raw, "GATE": raw, "BIAS": raw, "SIGMOID": 2.0 if raw else 0}
        | ({} if raw else dict.fromkeys(further)),
        num_warps=1,
        registers=64 * 1024 // (32 * warps) // 8 * 8,  # in eights, of a quarter of them to every fourth warp
        shared=228 * 1024 // warps - 1024,  # which every program has beside its own
        instructions=instructions,
        reason=f"{warps} warps a multiprocessor; code within " + ("64 KB" if raw else "48 KB"),
    )  # fmt: skip


WHOLE = 227 * 1024  # bytes of shared memory that a program may have
A_WALK: dict[str, str] = {
    "k_tiles": "tiles<bf16[64, 128]>", "A_tiles": "tiles<bf16[64, 64]>", "broken": "*i32", "reach": "*fp32",
    "segments": "*i32", "NC": "i32",
}  # fmt: skip


def _lengths(l2norm: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """The arguments and constants that are for raw q and k."""
    return ({"lengths": "*fp32"}, {"L2NORM": True}) if l2norm else ({}, {"lengths": None, "L2NORM": False})


def _forward(
    H: int, group: int, *, output: bool, exits: bool, instructions: int, l2norm: bool = False, states: bool = False
) -> Case:
    arguments, constants = _lengths(l2norm)
    return Case(
        kernel="deltaspan.kernels.hopper.forward:forward_kernel",
        arguments=A_WALK
        | {"q_tiles": "tiles<bf16[64, 128]>"}
        | dict.fromkeys(("v_tiles", "o_tiles"), "tiles<bf16[64, 64]>")
        | {"G_tiles": "tiles<fp32[1, 64]>", "o": "*bf16", "scale": "fp32", "scale_log2": "fp32"}
        | dict.fromkeys(("given", "whole", "step"), "i32")
        | {"state_tiles": f"tiles<bf16[64, {128 if states else 64}]>"}
        | dict.fromkeys(("entry", "nothing", "exit"), "*fp32")
        | arguments,
        constants={"H": H, "GROUP": group, "APART": (1 + states) * H * group}
        | {"OUTPUT": output, "STATES": states, "EXIT": exits}
        | constants,
        num_warps=4,
        registers=128,
        shared=WHOLE,
        instructions=instructions,
        reason="one program a multiprocessor, whose registers its partitions share out: 128 a thread on average",
    )


def _adjoint(H: int, group: int, *, states: bool, instructions: int) -> Case:
    return Case(
        kernel="deltaspan.kernels.hopper.adjoint:adjoint_kernel",
        arguments=A_WALK
        | {"q_tiles": "tiles<bf16[64, 128]>", "do_tiles": "tiles<bf16[64, 64]>", "G_tiles": "tiles<fp32[1, 64]>"}
        | {"state_tiles": f"tiles<bf16[64, {128 if states else 64}]>", "scale_log2": "fp32"}
        | dict.fromkeys(("given", "whole"), "i32")
        | dict.fromkeys(("leaving", "nothing", "entering"), "*fp32"),
        constants={"H": H, "GROUP": group, "APART": (1 + states) * H * group, "STATES": states},
        num_warps=4,
        registers=128,
        shared=WHOLE,
        instructions=instructions,
        reason="as the forward",
    )


def _gradients(H: int, group: int) -> Case:
    narrow = dict.fromkeys(("A", "dq", "dk", "dv"), "*bf16") | dict.fromkeys(("G", "beta", "dg", "dbeta"), "*fp32")
    wide, halves = dict.fromkeys(("q", "k"), 128), dict.fromkeys(("v", "do"), 64)
    return Case(
        kernel="deltaspan.kernels.hopper.gradients:gradients_kernel",
        arguments={f"{name}_tiles": f"tiles<bf16[64, {width}]>" for name, width in (wide | halves).items()}
        | dict.fromkeys(("S_tiles", "D_tiles"), "tiles<bf16[64, 128]>")
        | {"dv_tiles": "tiles<bf16[64, 64]>"}
        | narrow
        | {"broken": "*i32", "chunks": "*i32", "items": "i32", "NC": "i32"}
        | dict.fromkeys(("scale", "exponent", "unscaled"), "fp32"),
        constants={"H": H, "GROUP": group, "APART": 2 * H},
        num_warps=4,
        registers=128,
        shared=WHOLE,
        instructions=5600,
        spills=100,
        reason="as the forward, code within 128 KB; partitions of some 160 registers lay by what tails want, formed "
        "before their loops, and a few indices, more under Triton 3.9",
    )


def _transfer(H: int, group: int, *, instructions: int = 3150, l2norm: bool = False) -> Case:
    arguments, constants = _lengths(l2norm)
    return Case(
        kernel="deltaspan.kernels.hopper.transfer:transfer_kernel",
        arguments=A_WALK | {"G": "*fp32", "M": "*fp32", "step": "i32"} | arguments,
        constants={"H": H, "GROUP": group, "TERMS": 2} | constants,
        num_warps=4,
        registers=128,
        shared=WHOLE,
        instructions=instructions,
        reason="as the forward",
    )


def _compose(kernel: str, arguments: str, instructions: int, *, wide: bool, **constants: int) -> Case:
    strides = dict.fromkeys(("map_row", "map_head", "offset_row", "offset_head"), "i32 x 16")
    kinds = dict.fromkeys(("members", "starts", "wanted"), "*i32") | strides
    kinds |= dict.fromkeys(("arriving", "through", "source"), "*i64") | {"n": "i32", "apart": "i32"}
    return Case(
        kernel=f"deltaspan.kernels.hopper.compose:{kernel}",
        arguments={name: kinds.get(name, "*fp32") for name in arguments.split()},
        constants={"COLUMNS": 64 if wide else 8, **constants},
        num_warps=8 if wide else 4,
        registers=128,
        shared=(98 if wide else 137) * 1024,
        instructions=instructions,
        reason="two programs a multiprocessor, so that one computes while another waits"
        if wide
        else "a map and the next one, 64 KB each; a program a multiprocessor, which is bound by its steps",
    )


def _conv(kind: str, D: int, W: int, registers: int, instructions: int, reason: str) -> Case:
    tables = {"fragments": "*i32", "bounds": "*i32", "history_row": "*i64", "tokens": "i32"}
    return Case(
        kernel="deltaspan.kernels.hopper.conv:conv_kernel",
        arguments={name: f"*{kind}" for name in ("x", "history", "y")} | {"weight": "*fp32", "bias": "*fp32"} | tables,
        constants={"D": D, "PITCH": D, "RECEIVED_PITCH": D, "W": W, "CHANNELS": 128 if kind == "fp32" else 256}
        | {"RUN": 32, "BIAS": True, "SILU": True},
        num_warps=1,
        registers=registers,
        shared=0,
        instructions=instructions,
        reason=reason,
    )


def _unit(*, gradient: bool, instructions: int) -> Case:
    return Case(
        kernel="deltaspan.kernels.hopper.unit:unit_kernel",
        arguments=dict.fromkeys(("x", "dy", "y"), "*bf16") | dict.fromkeys(("rows", "eighths"), "i32"),
        constants={"H": 16, "ROWS": 32, "GRADIENT": gradient},
        num_warps=4,
        registers=64,
        shared=0,
        instructions=instructions,
        reason="eight programs a multiprocessor, 8 KB of rows each under way: 64 KB",
    )


CHAIN_ARGUMENTS = """maps offsets members starts wanted out_maps out_offsets beyond apart map_row map_head offset_row
offset_head"""

CASES = {
    "prep, 16 key heads x 1": _prep(16, 1, 12, 2000),
    "prep, 16 key heads x 3": _prep(16, 3, 8, 2600),
    "prep, 2 key heads x 4": _prep(2, 4, 8, 2900),
    "raw prep": _prep(16, 3, 8, 3750, raw=True),
    "forward, 16 key heads x 3": _forward(16, 3, output=True, exits=False, instructions=2820),
    "forward, 2 key heads x 4": _forward(2, 4, output=True, exits=False, instructions=2820),
    "forward with exit states": _forward(16, 3, output=True, exits=True, instructions=3010),
    "exit states alone": _forward(16, 3, output=False, exits=True, instructions=2250),
    "adjoint walk with states": _adjoint(16, 3, states=True, instructions=2150),
    "adjoint walk with states, 2 key heads x 4": _adjoint(2, 4, states=True, instructions=2150),
    "adjoint walk": _adjoint(16, 3, states=False, instructions=2200),
    "raw forward": _forward(16, 3, output=True, exits=False, instructions=2880, l2norm=True),
    "raw forward with exit states": _forward(16, 3, output=True, exits=True, instructions=3070, l2norm=True),
    "raw exit states alone": _forward(16, 3, output=False, exits=True, instructions=2300, l2norm=True),
    "states of chunks": _forward(16, 3, output=False, exits=False, instructions=1700, states=True),
    "gradients, 16 key heads x 3": _gradients(16, 3),
    "gradients, 2 key heads x 4": _gradients(2, 4),
    "transfer, 16 key heads x 3": _transfer(16, 3),
    "transfer, 2 key heads x 4": _transfer(2, 4),
    "raw transfer": _transfer(16, 3, instructions=3250, l2norm=True),
    "merge": _compose("merge_kernel", "M X b out", 4900, wide=True, WIDTH=128, TRANSPOSED=True),
    "convolution, 4 taps, bf16": _conv(
        "bf16", 2048, 4, 112, 1000, "18 warps a multiprocessor, 4 rows of 512 bytes each under way: 36 KB"
    ),
    "convolution, 4 taps, fp32": _conv("fp32", 2048, 4, 80, 540, "24 warps a multiprocessor, to the same end: 48 KB"),
    "convolution, 8 taps, bf16": _conv("bf16", 2048, 8, 200, 1750, "10 warps a multiprocessor: 20 KB under way"),
    "convolution, rows at any pitch": _conv(
        "bf16", 301, 4, 160, 1750, "12 warps a multiprocessor; loads of one number"
    ),
    "rows of length 1": _unit(gradient=False, instructions=400),
    "gradient of raw rows": _unit(gradient=True, instructions=600),
    "arrivals": _compose("tell_kernel", "maps arrived reached arriving through source n", 5000, wide=True, HV=48),
    "chain of many": _compose(
        "chain_kernel", CHAIN_ARGUMENTS, 5500, wide=True, HV=48, MAPS=True, TRANSPOSED=True, PLACES=1
    ),
    "chain of few": _compose(
        "chain_kernel", CHAIN_ARGUMENTS, 2050, wide=False, HV=48, MAPS=True, TRANSPOSED=True, PLACES=2
    ),
}
"""Of each kernel the variants that differ in what they take."""


def report(cases: Mapping[str, Case] = CASES) -> dict[str, Any]:
    """By case: what the compiler made of it, and what of that is over budget."""
    ahead = import_module("deltaspan.kernels.hopper.ahead")
    rows = []
    for name, case in cases.items():
        home, kernel = case.kernel.split(":")
        module = import_module(home)
        constants = {**getattr(module, "LAUNCH", {}), **case.constants}
        begin = time.perf_counter()
        made = ahead.compile_ahead(getattr(module, kernel), case.arguments, constants, case.num_warps)
        total = made.instructions.total()
        taken = {"registers": made.registers, "shared": made.shared, "instructions": total}
        taken |= {"spills": made.spills, "in_flight": made.in_flight}
        over = [
            f"{what} {found} > {getattr(case, what)}" for what, found in taken.items() if found > getattr(case, what)
        ]
        rows.append(
            {"name": name, **taken, "seconds": round(time.perf_counter() - begin, 1),
             "opcodes": {op: made.instructions[op] for op in TELLING if made.instructions[op]}, "over": over}
        )  # fmt: skip
    return {"triton": ahead.TRITON, "target": "sm_90a", "kernels": rows}


def table(made: Mapping[str, Any]) -> Table:
    shown = Table("kernel", "registers", "spills", "shared", "instructions", "of them", IN_FLIGHT, "over budget")
    for row in made["kernels"]:
        opcodes = ", ".join(f"{op} {count}" for op, count in row["opcodes"].items())
        numbers = (row[name] for name in ("registers", "spills", "shared", "instructions"))
        over = "; ".join(row["over"]) or "no"
        shown.add_row(row["name"], *(f"{number:,}" for number in numbers), opcodes, str(row["in_flight"]), over)
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
