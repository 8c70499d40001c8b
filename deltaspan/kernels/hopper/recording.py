"""What a run of stages launches, as a list that is launched again: on a host that is the dearer part of a short shard.

A run that never asks what is in a tensor does the same for all operands of the same shapes: it is a list of
allocations, launches, operations of torch, and ends of what nobody needs any more. Addresses are told by what they
belong to: an operand, what the run has made, or a table that lives as long as the list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from deltaspan.kernels.hopper.gluon import Ready, Tiles, hooked


class Place(NamedTuple):
    """Where a tensor lies."""

    source: int | Tensor  # of operands and what the run makes, in this order; or a table
    offset: int  # elements behind its source's first
    shape: torch.Size
    strides: tuple[int, ...]
    bytes: int  # of the offset
    whole: bool  # as its source is

    def among(self, held: Sequence[Any]) -> Tensor:
        x = self.source if isinstance(self.source, Tensor) else held[self.source]
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

    def on(self, held: list[Any]) -> list[Tensor]:
        """Adds what it makes to what is held, and returns it."""
        found = several(self.call(*_among(self.given, held), **_among(self.named, held)))
        made = [found[number] for number in self.made]
        held += made
        return made


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


Step: TypeAlias = Allocation | Launch | Operation | End


class Recording(NamedTuple):
    """Of a run: its steps in their order, and where its results lie."""

    steps: list[Step]
    descriptors: list[Descriptor]
    results: list[Place | None]
    by_address: bool  # whether all that it launches may be launched so

    def play(self, operands: list[Tensor | None]) -> list[Tensor | None]:
        """The results of the same run with other operands of the same kinds. Empties `operands`: each is let go of at
        its last reader."""
        device = next(x for x in operands if x is not None).device
        held: list[Any] = operands.copy()
        operands.clear()
        launch = self._by_address if self.by_address and not hooked() else self._by_tensors
        if torch.is_autocast_enabled(device.type):  # it would reach the operations
            with torch.autocast(device.type, enabled=False):
                launch(held, device)
        else:
            launch(held, device)
        return [None if place is None else place.among(held) for place in self.results]

    def _by_address(self, held: list[Any], device: torch.device) -> None:
        at = [0 if x is None else x.data_ptr() for x in held]
        maps: list[Any] = [None] * len(self.descriptors)
        stream = None
        for step in self.steps:
            kind = type(step)
            if kind is Launch:
                ready, grid, _, passed, addresses, descriptors = step
                passed = passed.copy()
                for place, source, offset in addresses:
                    passed[place] = at[source] + offset
                for i, (place, number) in enumerate(descriptors):
                    if (encoded := maps[number]) is None:
                        of, shaped = self.descriptors[number]
                        encoded = maps[number] = ready.map_at(at[of.source] + of.bytes, shaped, i)
                    passed[place] = encoded
                stream = ready.stream(device.index) if stream is None else stream
                ready.run(*grid, stream, ready.function, ready.metadata, None, None, None, *passed)
            elif kind is Allocation:
                shape, strides, dtype = step
                x = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                held.append(x)
                at.append(x.data_ptr())
                del x
            elif kind is End:
                held[step.source] = None
            else:
                at += [x.data_ptr() for x in step.on(held)]

    def _by_tensors(self, held: list[Any], device: torch.device) -> None:
        """As whoever hooks into launches, another Triton or the emulator want them."""
        for step in self.steps:
            if isinstance(step, Launch):
                given = [self._tiles(x, held) if isinstance(x, Numbered) else _among(x, held) for x in step.arguments]
                step.ready.compiled[step.grid](*given, *step.ready.constants)
                del given
            elif isinstance(step, Allocation):
                held.append(torch.empty_strided(*step[:2], dtype=step.dtype, device=device))
            elif isinstance(step, End):
                held[step.source] = None
            else:
                step.on(held)

    def _tiles(self, x: Numbered, held: Sequence[Any]) -> Tiles:
        of, shaped = self.descriptors[x.number]
        return Tiles(of.among(held), *shaped)


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
