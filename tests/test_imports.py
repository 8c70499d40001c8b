"""Holds the floors: what a file of the package imports, read from its text, lies below it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "deltaspan"

FLOOR = {
    "layout": 0, "plan": 0,
    "kernels": 1, "exchange": 1, "reference": 1,
    "op": 2,
    "nn": 3, "integrations": 3,
    "verify": 4, "bench": 4, "plots": 4, "demo": 4,
    "cli": 5, "__main__": 6,
}  # fmt: skip
FACADE = 3.5  # `import deltaspan` offers everything up to nn, so only the rooms above nn may use it
SIDEWAYS = {("plan", "layout"), ("demo", "plots"), ("bench", "verify")}
TIERS_SEEN_BY_OP = ("deltaspan.kernels.select", "deltaspan.kernels.stages")


def imported(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each thing that a source imports, wherever the import stands."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=origin, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                yield from ((node.lineno, ".".join([*base, *filter(None, [origin]), name.name])) for name in names)
            case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=arguments):
                match arguments:
                    case [ast.Constant(value=str(name))]:
                        yield node.lineno, name
                    case [ast.Constant(value=str(name)), ast.Constant(value=str(origin))]:
                        yield node.lineno, f"{origin}.{name.lstrip('.')}"


def within(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def objection(module: str, name: str) -> str | None:
    """Why `module` may not import `name`, or None."""
    room = module.split(".")[1]
    if within(name, "matplotlib") and room != "plots":
        return "only plots imports matplotlib"
    if within(name, "triton") and not within(module, "deltaspan.kernels.triton", "deltaspan.kernels.hopper"):
        return "only kernels.triton and kernels.hopper import triton"
    if within(name, "torch") and room in ("layout", "plan"):
        return f"{room} is plain Python and never imports torch"
    if within(name, "torch.distributed", "torch.autograd") and room == "kernels":
        return "kernels see neither a process group nor autograd"
    if not within(name, PACKAGE):
        return None

    target = name.split(".")[1] if "." in name else ""
    if room == target:
        return None
    if room == "reference":
        return "reference imports nothing of ours, or it is no oracle"
    if target == "reference" and FLOOR[room] < FLOOR["verify"]:
        return "the oracle is only for those who judge, not for what is judged"
    if room == "op" and target == "kernels" and not within(name, *TIERS_SEEN_BY_OP):
        return "op names no architecture: it goes through kernels.select and kernels.stages"
    if FLOOR.get(target, FACADE) >= FLOOR[room] and (room, target) not in SIDEWAYS:
        return f"{room} (floor {FLOOR[room]}) imports only what lies below it"
    return None


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """One line for each import of a source that breaks a rule; `module` is the dotted name of the file."""
    if module == PACKAGE:
        return []  # the facade stands above everything that it offers, and its subprocess test holds it lazy
    if module.split(".")[1] not in FLOOR:
        return [f"{module}: stands on no floor; give its room one in {Path(__file__).name}"]
    return [
        f"{module}:{line} imports {name}: {why}"
        for line, name in imported(source, module, is_package)
        if (why := objection(module, name))
    ]


def test_imports_go_only_downward() -> None:
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    assert len(files) > 1
    found = []
    for file in files:
        parts = file.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += violations(file.read_text(encoding="utf-8"), module, is_package)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deltaspan.layout.pack", "import torch"),
        ("deltaspan.plan.rules", "def cut():\n    from torch import nn"),
        ("deltaspan.layout.partition", "from deltaspan.plan import rules"),
        ("deltaspan.layout.partition", "from ..plan.rules import one"),
        ("deltaspan.kernels.torch.prep", "from deltaspan.exchange import compose"),
        ("deltaspan.kernels.torch.prep", "from ...exchange.compose import fold"),
        ("deltaspan.kernels.stages", "import torch.distributed as dist"),
        ("deltaspan.kernels.stages", "from torch import autograd"),
        ("deltaspan.kernels.torch.prep", "import triton"),
        ("deltaspan.exchange.halo", "import deltaspan.kernels.stages"),
        ("deltaspan.exchange.compose", "import triton.language as tl"),
        ("deltaspan.reference.chunked", "from deltaspan.layout import partition"),
        ("deltaspan.reference.chunked", "from deltaspan.kernels.torch import prep"),
        ("deltaspan.op.forward", "from deltaspan.kernels.torch import prep"),
        ("deltaspan.op.forward", "from deltaspan.kernels import hopper"),
        ("deltaspan.op.forward", "import deltaspan.kernels"),
        ("deltaspan.op.forward", "import importlib\nimportlib.import_module('deltaspan.kernels.triton')"),
        ("deltaspan.op.forward", "from importlib import import_module\nimport_module('.nn', 'deltaspan')"),
        ("deltaspan.op.forward", "from deltaspan.reference import recurrent"),
        ("deltaspan.op.context", "if TYPE_CHECKING:\n    from deltaspan.nn import GatedDeltaNet"),
        ("deltaspan.op.context", "import deltaspan as ds"),
        ("deltaspan.op.context", "from deltaspan import partition"),
        ("deltaspan.op.context", "from .. import nn"),
        ("deltaspan.nn.gated_delta_net", "from deltaspan.integrations import fla"),
        ("deltaspan.nn.gated_delta_net", "from deltaspan import verify"),
        ("deltaspan.plots.curves", "from deltaspan.demo import training"),
        ("deltaspan.demo.report", "import matplotlib.pyplot as plt"),
        ("deltaspan.verify.report", "from deltaspan.cli import main"),
        ("deltaspan.cli", "from matplotlib import pyplot"),
        ("deltaspan.cellar.wine", "import os"),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("deltaspan.layout.partition", "import numpy as np\nfrom .pack import Span\nfrom deltaspan.layout import pack"),
        ("deltaspan.plan.tables", "from deltaspan.layout import Partition"),
        ("deltaspan.kernels.triton.prep", "import triton\nfrom triton import language as tl\nimport torch"),
        ("deltaspan.kernels.torch.prep", "from ..stages import Prep\nfrom deltaspan.plan.tables import Tables"),
        ("deltaspan.exchange.process_group", "import torch.distributed as dist\nfrom ..layout import halo_plan"),
        ("deltaspan.op.forward", "from deltaspan.kernels import select, stages\nfrom ..kernels.select import tier"),
        ("deltaspan.op.function", "from torch.autograd import Function\nfrom ..exchange import compose"),
        ("deltaspan.nn.gated_delta_net", "from deltaspan.op import causal_conv1d"),
        ("deltaspan.demo.oracle", "import deltaspan as ds\nfrom ..reference import recurrent\nfrom .. import plots"),
        ("deltaspan.plots.curves", "from matplotlib import pyplot"),
        ("deltaspan.cli", "import deltaspan\nfrom .verify import run_suite"),
        ("deltaspan.__main__", "from deltaspan.cli import main"),
        ("deltaspan", "from deltaspan.op import forward"),
    ],
)
def test_what_the_floors_allow_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_a_package_resolves_its_relative_imports_from_itself() -> None:
    assert violations("from .partition import partition", "deltaspan.layout", is_package=True) == []
    assert violations("from ..op import forward", "deltaspan.layout", is_package=True) != []


def test_importing_the_package_loads_neither_torch_nor_numpy() -> None:
    listing = "import sys, deltaspan; dir(deltaspan); print(deltaspan.__version__, *sys.modules)"
    done = subprocess.run([sys.executable, "-c", listing], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "deltaspan" in loaded
    assert not loaded & {"torch", "numpy", "triton", "matplotlib", "rich", "typer"}
