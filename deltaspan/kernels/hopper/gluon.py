"""All that the kernels of this tier take from Triton. What depends on its version stands here and nowhere else.

Written for Gluon as Triton 3.6 to 3.9 have it, an interface that Triton calls experimental.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import lru_cache, partial, reduce
from inspect import getclosurevars, isfunction, signature
from operator import attrgetter, itemgetter, or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from deltaspan.kernels.hopper.driver import bind_context

# Renamed after Triton 3.6, where the old names stay behind and raise.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # of the threads of a partition
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # (tiles, place, mbarrier, shared)
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global  # (tiles, place, shared)
store_wait = tma.store_wait
copy_in = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # (shared, pointers)
copies_begun = async_copy.commit_group  # what was asked for since the last one is a group
copies_wait = async_copy.wait_group  # until so many groups, the last ones, are under way


TYPES = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
COMPILED_WITH = {"enable_fp_fusion": True}  # said in every launch, since Triton 3.10 changes what is assumed


@gluon.jit
def add(a, b):
    return a + b


@lru_cache
def default_layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), TYPES[dtype])


class Tiles(TensorDescriptor):
    """A descriptor that is not checked anew for every launch: what it must be, ours are by how they are made."""

    passed: list[Any] | None = None  # as the device takes it, once a launch has made that of it

    def __post_init__(self) -> None:
        pass


def tiles(x: Tensor, row: int, *block: int) -> Tiles:
    """A dense tensor as the copy engine sees it: rows of so many numbers, in blocks of this shape, swizzled as matrix
    products want it."""
    return Tiles(x, [x.numel() // row, row], [row, 1], list(block), default_layout(block, x.dtype))


def row_tiles(x: Tensor, width: int = 128) -> Tiles:
    """Rows [T, h, 128], dense but for their pitch, as [T, h * 128] in blocks of [64, width]."""
    T, heads, D = x.shape
    return Tiles(x, [T, heads * D], [x.stride(0), 1], [64, width], default_layout((64, width), x.dtype))


class Tilings(dict[tuple, Tiles]):
    """The tiles of one tape's tensors: launches that read the same ones share what is made of them.

    By the tensor's id, which is nobody else's while its tiles are held here.
    """

    def of(self, x: Tensor, row: int, *block: int) -> Tiles:
        key = id(x), row, block
        if (held := self.get(key)) is None:
            held = self[key] = tiles(x, row, *block)
        return held

    def rows(self, x: Tensor, width: int = 128) -> Tiles:
        key = id(x), width
        if (held := self.get(key)) is None:
            held = self[key] = row_tiles(x, width)
        return held


def launch(
    kernel: Any, programs: tuple[int, ...], *arguments: Any, num_warps: int, beside: bool = False, **constants: Any
) -> None:
    """kernel[programs](*arguments, **constants) on the device of its tensors, in a tenth of the time on the host.

    beside: whether it may begin before the launch before it has ended, which says when (`let_next_begin`), so that it
    takes what the other's last programs leave of the device. It has to read nothing that the other writes, to write
    nothing that the other touches, and to wait for it itself before it ends (`wait_for_previous`). Not where torch
    fills what is allocated in between.

    Triton finds the compiled kernel anew in each call, by all that it might depend on. Here that is what our kernels
    are told apart by: types and alignments of tensors, None in place of one, what Triton distinguishes of integers, and
    constants. Descriptors come first.
    """
    beside = beside and not torch.are_deterministic_algorithms_enabled()
    kinds = tuple(map(type, arguments))
    where = _where(kinds)
    tensors = where.tensors(arguments)
    device, pointers = tensors[0].device, [*map(Tensor.data_ptr, tensors)]
    if device.type == "meta":  # a rehearsal: nothing is there
        return
    if device.type != "cpu" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, *arguments, num_warps=num_warps, beside=beside, **constants)
        return
    aligned = reduce(or_, pointers) % 16 == 0 or tuple([pointer % 16 == 0 for pointer in pointers])
    integers = [_kind_of_integer(arguments[place]) for place in where.integers]
    key = id(kernel), device, beside, kinds, aligned, *map(_dtype_of, tensors), *integers, *constants.values()
    if (ready := _READY.get(key)) is None:
        compiled = kernel.warmup(*arguments, grid=programs, num_warps=num_warps, **constants, **COMPILED_WITH)
        last = [constants[name] for name in kernel.arg_names[len(arguments) :]]
        ready = _READY[key] = Ready(kernel, compiled, last, beside)
    grid = (*programs, 1, 1)[:3]
    ready(grid, device.index, arguments, where, pointers)
    if (seen := _watched.by) is not None:
        seen(ready, grid, arguments)


class _Watched(threading.local):
    by: Callable[["Ready", tuple, tuple], None] | None = None


_READY: dict[tuple, "Ready"] = {}
_watched = _Watched()
_dtype_of = attrgetter("dtype")


class Where(NamedTuple):
    """What stands where among arguments of such types."""

    descriptors: int  # how many, in front of all else
    places: tuple[int, ...]  # of tensors, two at least
    tensors: Callable[[tuple], tuple[Tensor, ...]]
    integers: tuple[int, ...]  # places


@lru_cache
def _where(kinds: tuple[type, ...]) -> Where:
    descriptors = [issubclass(kind, TensorDescriptor) for kind in kinds]
    assert descriptors == sorted(descriptors, reverse=True), "descriptors come first"
    places = [place for place, kind in enumerate(kinds) if issubclass(kind, Tensor)]
    integers = [place for place, kind in enumerate(kinds) if kind is int]
    return Where(sum(descriptors), tuple(places), itemgetter(*places), tuple(integers))


@lru_cache(maxsize=4096)
def _kind_of_integer(x: int) -> tuple[bool, bool, bool]:
    return x == 1, x % 16 == 0, x < 2**31


class Ready:
    """A compiled kernel, on the device where it is loaded, and its constants.

    Triton's launcher encodes all descriptors, asks the driver about all pointers and calls two chains of hooks, in
    every launch. Within it stands one that takes what is encoded, and pointers as numbers: where it is found, and
    nobody has set a hook, it is launched by that one, with what descriptors remember of earlier launches.
    """

    def __init__(self, kernel: Any, compiled: Any, constants: list[Any], beside: bool) -> None:
        self.kernel = kernel  # which has to live as long as its id stands in a key
        self.beside = beside
        self.compiled, self.constants = compiled, constants
        self.run = self._inner() if hasattr(compiled, "run") else None  # the emulator has none

    def __call__(
        self, grid: tuple[int, ...], device: int | None, arguments: tuple, where: Where, pointers: list[int]
    ) -> None:
        if self.run is None or hooked():
            bind_context()
            self.compiled[grid](*arguments, *self.constants)
            return
        passed = [*arguments]
        for place, pointer in zip(where.places, pointers, strict=True):
            passed[place] = pointer
        encoded: list[Any] = []
        for x, how in zip(arguments, self.descriptors, strict=False):
            if x.passed is None:
                x.passed = self.encode(x, how)
            encoded += x.passed
        passed[: where.descriptors] = encoded
        self.at_once(grid, device, [*passed, *self.constants])

    def at_once(self, grid: tuple[int, ...], device: int | None, passed: list[Any]) -> None:
        """Launched with what the device takes."""
        self.run(*grid, self.stream(device), self.function, self.metadata, None, None, None, *passed)

    def _inner(self) -> Any:
        """The launcher with the inner one in place of that which encodes; None for another Triton's."""
        try:
            from triton.backends.nvidia.driver import make_tensordesc_arg
        except ImportError:
            return None
        run = copy(self.compiled.run)
        run.launch_pdl = self.beside  # programmatic dependent launch, as CUDA calls it
        kinds = [str(kind) for kind in self.compiled.src.signature.values()]
        places = [i for i, kind in enumerate(kinds) if kind.startswith("tensordesc")]
        how = getattr(self.compiled.metadata, "tensordesc_meta", None) or ()
        if places:
            within = getclosurevars(run.launch).nonlocals if isfunction(run.launch) else {}
            run.launch = within.get("launcher")
        if len(how) != len(places) or not callable(run.launch):
            return None
        self.descriptors = how
        more = list(signature(make_tensordesc_arg).parameters)[2:]  # one after Triton 3.6, which needs no value
        self.encodes = partial(make_tensordesc_arg, **dict.fromkeys(more)) if more else make_tensordesc_arg
        self.stream = triton.runtime.driver.active.get_current_stream
        self.function, self.metadata = self.compiled.function, self.compiled.packed_metadata
        return run

    def encode(self, x: Any, how: Any) -> Any:
        """A descriptor as the device takes it."""
        bind_context()
        return self.encodes(x, how)

    def map_at(self, address: int, shaped: tuple[Any, ...], number: int) -> Any:
        """As the device takes the descriptor of that number, with such tiles, at an address."""
        return self.encode(_At(address, *shaped[:2]), self.descriptors[number])[0]


class _At:
    """Tiles of a tensor of which nothing is known but where it lies."""

    __slots__ = ("address", "shape", "strides")
    padding, round_f32_to_tf32 = "zero", False

    def __init__(self, address: int, shape: list[int], strides: list[int]) -> None:
        self.address, self.shape, self.strides = address, shape, strides

    @property
    def base(self) -> "_At":
        return self

    def data_ptr(self) -> int:
        return self.address


@contextmanager
def watching(seen: Callable[[Ready, tuple, tuple], None]) -> Iterator[None]:
    """Tells `seen` of every launch of this thread: what was launched, its grid and its arguments."""
    before, _watched.by = _watched.by, seen
    try:
        yield
    finally:
        _watched.by = before


def hooked() -> bool:
    """Whether somebody, such as a profiler, wants to be called around launches."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


__all__ = [
    "COMPILED_WITH",
    "Ready",
    "Tiles",
    "Tilings",
    "add",
    "barrier",
    "copies_begun",
    "copies_wait",
    "copy_in",
    "default_layout",
    "fence_async_shared",
    "gl",
    "gluon",
    "hooked",
    "launch",
    "load_tile",
    "mbarrier",
    "mma_v2",
    "row_tiles",
    "store_tile",
    "store_wait",
    "tiles",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
    "watching",
]
