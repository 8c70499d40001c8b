"""Runs a kernel: every program of a grid, one after another, on tensors of the CPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.emulator.language import gl
from tests.emulator.pointers import Pointer
from tests.emulator.schedule import Program, here
from tests.emulator.values import Value, constant

OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion")
SECONDS = 60.0  # that one program may take


class Kernel:
    """What @gluon.jit makes of a function: device code may call it, host code launches it by `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        code = function.__code__
        self.arg_names = code.co_varnames[: code.co_argcount]
        wanted = (gl.constexpr, "gl.constexpr")
        self.constants = {name for name, note in function.__annotations__.items() if note in wanted}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here()
        for name, value in [*zip(self.arg_names, args, strict=False), *kwargs.items()]:
            if name in self.constants and isinstance(value, Value):
                raise TypeError(f"{self.__name__}: {name} is a constexpr, and {value!r} is only known when it runs")
        return self.function(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            with _disable_current_modes():  # nobody sees what a device does
                launch(self, grid, *args, **kwargs)

        return run

    def warmup(self, *args: Any, grid: tuple[int, ...], **kwargs: Any) -> Kernel:
        """Where Triton would compile: the kernel, which takes constants by position too."""
        return self


def jit(function: Callable[..., Any] | None = None, **of_compiling: Any) -> Any:
    """In the place of @gluon.jit, with or without options: nothing is compiled here."""
    return Kernel if function is None else Kernel(function)


def launch(
    kernel: Callable[..., Any],
    grid: Sequence[int],
    *args: Any,
    seed: int | None = None,
    seconds: float = SECONDS,
    **kwargs: Any,
) -> None:
    """Runs every program of the grid (1 to 3 sizes) in an order drawn from the seed.

    Tensors are taken as pointers, TensorDescriptors as they are, numbers as scalars of 32 bits (64 if they need them)
    but for those that the kernel annotates as constexpr. seed: that of `seeded` if not given. seconds: what a program
    may take. Raises DeviceFault for what the device would get wrong.
    """
    seed = _seed if seed is None else seed
    names = kernel.arg_names if isinstance(kernel, Kernel) else [f"argument {i}" for i in range(len(args))]
    constants = kernel.constants if isinstance(kernel, Kernel) else set()
    given = [_given(value, name, name in constants) for name, value in zip(names, args, strict=False)]
    named = {name: _given(v, name, name in constants) for name, v in kwargs.items() if name not in OPTIONS}
    sizes = (*map(int, grid), 1, 1, 1)[:3]
    programs = list(itertools.product(*map(range, sizes)))
    random.Random(seed).shuffle(programs)
    for ids in programs:
        Program(ids, sizes, seed, seconds).run(lambda: kernel(*given, **named))


_seed = 0


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Gives launches within it their seed, for host code that launches kernels itself."""
    global _seed
    before, _seed = _seed, seed
    try:
        yield
    finally:
        _seed = before


def _given(value: Any, name: str, constexpr: bool) -> Any:
    if isinstance(value, Tensor):
        return Pointer.to_tensor(value, name)
    return constant(value) if isinstance(value, bool | int | float) and not constexpr else value
