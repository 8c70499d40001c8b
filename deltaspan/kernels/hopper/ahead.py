"""Compiles a kernel of this tier for sm_90a on any machine, without a GPU, and reads what the compiler made of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from deltaspan.kernels.hopper.gluon import COMPILED_WITH, TYPES, default_layout
from deltaspan.kernels.hopper.sass import instructions, overtaken_loads

TRITON = triton.__version__
SM_90 = GPUTarget("cuda", 90, 32)
ALIGNED = [["tt.divisibility", 16]]  # as torch allocates
MULTIPLE = " x 16"
TILES = re.compile(r"tiles<(\w+)\[([\d, ]+)\]>")


class Compiled(NamedTuple):
    """What one kernel takes of a multiprocessor."""

    registers: int  # a thread
    stack: int  # bytes a thread, for what does not fit: spills
    shared: int  # bytes a program
    instructions: Counter[str]  # SASS, by opcode
    in_flight: int  # loads from shared memory that an arrival overtakes

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return self.instructions["LDL"] + self.instructions["STL"]


def compile_ahead(kernel: Any, arguments: Mapping[str, str], constants: Mapping[str, Any], num_warps: int) -> Compiled:
    """arguments: the type of each that is no constant, as Triton writes it, such as "*bf16" or "i32", or "i32 x 16", a
    multiple of 16; of descriptors "tiles<bf16[64, 128]>", a block of them."""
    names = list(kernel.arg_names)
    signature = {name: _written_out(arguments.get(name, "constexpr").removesuffix(MULTIPLE)) for name in names}
    where = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (names.index(name),): ALIGNED
        for name, kind in arguments.items()
        if kind.startswith("*") or kind.endswith(MULTIPLE)
    }
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, where, aligned)
    made = triton.compile(source, target=SM_90, options={"num_warps": num_warps, **COMPILED_WITH})
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        usage, sass = _dump("-res-usage", cubin), _dump("-sass", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, f"cuobjdump says otherwise than it used to: {usage}"
    code = instructions(sass)
    assert code, "cuobjdump shows code otherwise than it used to"
    by_opcode = Counter(at.opcode for at in code if at.opcode != "NOP")
    in_flight = set().union(*overtaken_loads(code).values())
    return Compiled(int(found[1]), int(found[2]), made.metadata.shared, by_opcode, len(in_flight))


def _written_out(kind: str) -> str:
    tiles = TILES.fullmatch(kind)
    if tiles is None:
        return kind
    block = tuple(map(int, tiles[2].split(", ")))
    dtype = next(dtype for dtype, its in TYPES.items() if its.name == tiles[1])
    return f"tensordesc<{tiles[1]}{list(block)},{default_layout(block, dtype)!r}>"


def _dump(what: str, cubin: Path) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, what, cubin], capture_output=True, text=True, check=True).stdout
