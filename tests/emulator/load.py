"""Executes a module of the Hopper tier with the emulator in Triton's place."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import linecache
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.emulator.async_copy import async_copy
from tests.emulator.barriers import fence_async_shared, mbarrier
from tests.emulator.language import gl
from tests.emulator.launch import jit
from tests.emulator.mma import mma_v2, warpgroup_mma, warpgroup_mma_wait
from tests.emulator.schedule import here, inside
from tests.emulator.tma import TensorDescriptor, tma
from tests.emulator.values import Value, constant

ROOT = Path(__file__).parents[2]
TIER = "deltaspan.kernels.hopper"

GLUON = "triton.experimental.gluon"
TRITON: dict[str, Any] = {
    "triton": SimpleNamespace(jit=jit, cdiv=gl.cdiv),
    "triton.experimental": SimpleNamespace(gluon=SimpleNamespace(jit=jit, constexpr_function=gl.constexpr)),
    GLUON: SimpleNamespace(jit=jit, language=gl),
    f"{GLUON}.nvidia.hopper": SimpleNamespace(TensorDescriptor=TensorDescriptor),
    f"{GLUON}.language.nvidia.hopper": SimpleNamespace(
        async_copy=async_copy,
        fence_async_shared=fence_async_shared,
        mbarrier=mbarrier,
        mma_v2=mma_v2,
        tma=tma,
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
    ),
}


def load(module: str, source: str | None = None, imported: Mapping[str, str] | None = None) -> ModuleType:
    """The module and those of the tier that it imports, executed anew on the emulator.

    source: text to execute in place of the module's file, as tests do that plant a fault; imported: the same of modules
    that it imports, by their names in the tier.
    """
    return _Loader(imported or {}).load(module, source)


def path_of(module: str) -> Path:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py")


class _Loader:
    """One `load`, with what it has executed so far."""

    def __init__(self, imported: Mapping[str, str]) -> None:
        self.imported = imported
        self.loaded: dict[str, ModuleType] = {}

    def load(self, name: str, source: str | None = None) -> ModuleType:
        if name in self.loaded:
            return self.loaded[name]
        file = path_of(name)
        filename = str(file) if source is None else f"<{file.name}, edited>"
        text = file.read_text(encoding="utf-8") if source is None else source
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        module = ModuleType(name)
        module.__dict__.update(__file__=filename, __package__=name.rpartition(".")[0], _carried=_carried)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import, "range": _range}
        self.loaded[name] = module
        exec(_compiled(text, filename), module.__dict__)
        return module

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] = (), level: int = 0
    ) -> Any:
        whole = importlib.util.resolve_name("." * level + name, (globals or {}).get("__package__", ""))
        if whole in TRITON:
            return TRITON[whole if fromlist else "triton"]
        if fromlist and whole == TIER:
            return SimpleNamespace(**{part: self.load(f"{TIER}.{part}") for part in fromlist})
        if fromlist and whole.startswith(f"{TIER}."):
            return self.load(whole, self.imported.get(whole.rpartition(".")[2]))
        return builtins.__import__(name, globals, locals, fromlist, level)


@cache
def _compiled(text: str, filename: str) -> CodeType:
    """Once for all that load it: the whole tier takes longer to compile than most tests take with it."""
    return compile(_LoopCarried().visit(ast.parse(text)), filename, "exec")


class _LoopCarried(ast.NodeTransformer):
    """Makes what a loop at run time changes a device value before the loop: a constant would have no width there."""

    def visit(self, node: ast.AST) -> Any:
        return node if isinstance(node, ast.expr) else super().visit(node)  # no loop stands in an expression

    def visit_For(self, loop: ast.For) -> list[ast.stmt]:
        self.generic_visit(loop)
        over_range = isinstance(loop.iter, ast.Call) and getattr(loop.iter.func, "id", None) == "range"
        return [*_carry(loop), loop] if over_range else [loop]

    def visit_While(self, loop: ast.While) -> list[ast.stmt]:
        self.generic_visit(loop)
        return [*_carry(loop), loop]


def _carry(loop: ast.For | ast.While) -> Iterator[ast.stmt]:
    constants = {id(node.target) for node in ast.walk(loop) if isinstance(node, ast.AnnAssign)}
    names = (node for part in loop.body for node in ast.walk(part) if isinstance(node, ast.Name))
    for name in sorted({n.id for n in names if isinstance(n.ctx, ast.Store) and id(n) not in constants}):
        (line,) = ast.parse(f"if {name!r} in locals(): {name} = _carried({name})").body
        yield ast.copy_location(line, loop)


def _carried(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_carried, x))
    return constant(x) if isinstance(x, bool | int | float) and inside() else x


def _range(*bounds: Any) -> Iterator[Any]:
    """Python's on the host; on the device its numbers are scalars."""
    if not inside():
        return iter(range(*bounds))
    values = [constant(b) for b in bounds]
    dtype = torch.int64 if any(v.dtype == torch.int64 for v in values) else torch.int32
    return _counted(range(*(int(v.held) for v in values)), dtype)


def _counted(numbers: range, dtype: torch.dtype) -> Iterator[Value]:
    for i in numbers:
        here().program.check()
        yield Value(torch.tensor(i), dtype)
