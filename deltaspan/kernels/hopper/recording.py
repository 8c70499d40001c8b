"""What a run of stages launches, as a list that is launched again: on a host that is the dearer part of a short shard.

A run that never asks what is in a tensor does the same for all operands of the same shapes: it is a list of
allocations, launches, operations of torch, questions to whoever runs it, and ends of what nobody needs any more.
Addresses are told by what they belong to: an operand, what the run has made or been told, or a table that lives as long
as the list.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from deltaspan.kernels.hopper.driver import bind_context
from deltaspan.kernels.hopper.gluon import Ready, Tiles, hooked

MOST_ENCODED = 1024  # 128 bytes each


class Place(NamedTuple):
    """Where a tensor lies."""

    source: int | Tensor  # of operands and what the run makes or is told, in this order; or a table
    offset: int  # elements behind its source's first
    shape: torch.Size
    strides: tuple[int, ...]
    bytes: int  # of the offset
    whole: bool  # as its source is
    dtype: torch.dtype | None  # as which its source is read from its first byte on, if not as its own

    def among(self, held: Sequence[Any]) -> Tensor:
        x = self.source if isinstance(self.source, Tensor) else held[self.source]
        x = x if self.dtype is None else x.view(self.dtype)
        return x if self.whole else x.as_strided(self.shape, self.strides, x.storage_offset() + self.offset)


class Allocation(NamedTuple):
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class Operation(NamedTuple):
    """Of torch; what it makes are sources."""

    call: Callable[..., Any]
    given: tuple[Any, ...]  # with a Place for a tensor, as in lists that are given
    named: dict[str, Any]
    made: tuple[int, ...]  # which of its results are new

    def on(self, held: list[Any], device: torch.device) -> list[Tensor]:
        """What it makes of what is held."""
        if torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):  # as stages do
                return self.on(held, device)
        found = several(self.call(*_among(self.given, held), **_among(self.named, held)))
        return [found[number] for number in self.made]


class Question(NamedTuple):
    """What a run yields; what it is told are sources."""

    asked: int | None  # the source, if it is something that it has been told
    like: Any = None  # a dataclass, if not,
    operands: tuple[Any, ...] = ()  # with these as its operands, a Place for a tensor
    aligned: tuple[int, ...] = ()  # what it is told, as kernels are told apart by it

    def asks(self, held: Sequence[Any]) -> Any:
        if self.asked is not None:
            return held[self.asked]
        return replace(self.like, operands=_among(self.operands, held))


class End(NamedTuple):
    """Nobody needs a source any more."""

    source: int


class Descriptor(NamedTuple):
    of: Place
    shaped: tuple[Any, ...]  # what of tiles is not their tensor


class Numbered(NamedTuple):
    """A descriptor among arguments."""

    number: int


class Launch(NamedTuple):
    ready: Ready
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]  # with a Place for a tensor, and a number for a descriptor
    passed: list[Any]  # as the device takes them, but for
    addresses: list[tuple[int, int, int]]  # where in `passed` which source's stands, and how many bytes behind it
    maps: list[tuple[int, int]]  # where which descriptor's


Step: TypeAlias = Allocation | Launch | Operation | Question | End


class Recording(NamedTuple):
    """Of a run: its steps in their order, and where its results lie."""

    steps: list[Step]
    descriptors: list[Descriptor]
    results: list[Place | None]
    by_address: bool  # whether all that it launches may be launched so
    encoded: dict[tuple[int, int], Any]  # descriptors as the device takes them, by number and address

    def play(self, operands: list[Tensor | None]) -> Generator[Any, Any, list[Tensor | None]]:
        """The results of the same run with other operands of the same kinds. Empties `operands`: each is let go of at
        its last reader."""
        device = next(x for x in operands if x is not None).device
        held: list[Any] = operands.copy()
        operands.clear()
        at = [0 if x is None else x.data_ptr() for x in held]
        maps: list[Any] = [None] * len(self.descriptors)
        by_address = self.by_address and not hooked()
        for step in self.steps:
            kind = type(step)
            if kind is Launch:
                if by_address:
                    self._at_once(step, at, maps, device.index)
                else:  # as whoever hooks into launches, another Triton or the emulator want them
                    bind_context()
                    step.ready.compiled[step.grid](*self._arguments(step, held), *step.ready.constants)
            elif kind is Allocation:
                shape, strides, dtype = step
                held.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
                at.append(held[-1].data_ptr())
            elif kind is End:
                held[step.source] = None
            else:
                made = step.on(held, device) if kind is Operation else told((yield step.asks(held)))
                if kind is Question and tuple(map(alignment, made)) != step.aligned:
                    raise RuntimeError("what came from other ranks lies otherwise than when its reader was recorded")
                held += made
                at += [x.data_ptr() if isinstance(x, Tensor) else 0 for x in made]
                del made
        return [None if place is None else place.among(held) for place in self.results]

    def _at_once(self, launch: Launch, at: list[int], maps: list[Any], device: int | None) -> None:
        """As the device takes it. at: addresses of sources; maps: of descriptors, once they are encoded."""
        ready, grid, _, passed, addresses, descriptors = launch
        passed = passed.copy()
        for place, source, offset in addresses:
            passed[place] = at[source] + offset
        for i, (place, number) in enumerate(descriptors):
            if (encoded := maps[number]) is None:
                encoded = maps[number] = self._encoded(number, at, ready, i)
            passed[place] = encoded
        ready.at_once(grid, device, passed)

    def _encoded(self, number: int, at: list[int], ready: Ready, i: int) -> Any:
        """A descriptor where its source lies now: memory is given out again and again, so it may be known there."""
        of, shaped = self.descriptors[number]
        key = number, at[of.source] + of.bytes
        if (known := self.encoded.get(key)) is None:
            if len(self.encoded) >= MOST_ENCODED:
                self.encoded.clear()
            known = self.encoded[key] = ready.map_at(key[1], shaped, i)
        return known

    def _arguments(self, launch: Launch, held: Sequence[Any]) -> list[Any]:
        of = self.descriptors
        return [
            Tiles(of[x.number].of.among(held), *of[x.number].shaped) if isinstance(x, Numbered) else _among(x, held)
            for x in launch.arguments
        ]


def alignment(x: Any) -> int:
    return x.data_ptr() % 16 if isinstance(x, Tensor) else 0


def told(x: Any) -> list[Any]:
    """What is in an answer, but for None."""
    return [part for part in (x if type(x) in (list, tuple) else (x,)) if part is not None]


def several(x: Any) -> Sequence[Any]:
    """What an operation of torch gives, one result or some."""
    return x if isinstance(x, list | tuple) else (x,)


def _among(x: Any, held: Sequence[Any]) -> Any:
    """With tensors in place of places."""
    if isinstance(x, Place):
        return x.among(held)
    if isinstance(x, dict):
        return {name: _among(part, held) for name, part in x.items()}
    return type(x)(_among(part, held) for part in x) if type(x) in (list, tuple) else x
