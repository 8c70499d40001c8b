"""Watches a run of stages and makes a `Recording` of it. A run that reads an unknown tensor leaves none."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from deltaspan.kernels.hopper.gluon import Ready, Tiles, watching
from deltaspan.kernels.hopper.recording import (
    Allocation,
    Descriptor,
    End,
    Launch,
    Numbered,
    Operation,
    Place,
    Question,
    Recording,
    Step,
    alignment,
    several,
    told,
)

ALLOCATIONS = ("aten::new_empty", "aten::new_empty_strided", "aten::empty", "aten::empty_like", "aten::empty_strided")

Result = TypeVar("Result")


class Recorder(TorchDispatchMode):
    """Sees what torch is asked for, and every launch. Tensors are known by their ids: of those that live, and what is
    made later, be it in the place of one that is gone, is made before these eyes."""

    def __init__(self, operands: Sequence[Tensor | None], tables: Iterable[Tensor]) -> None:
        """Of a run that reads `operands`, and tables that live as long as its recording."""
        super().__init__()
        self.tables, self.operands = {id(x): x for x in tables}, len(operands)
        self.steps: list[Step] = []
        self.descriptors: dict[tuple, Descriptor] = {}
        self.device = next(x for x in operands if x is not None).device
        self.sources = [None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr()) for x in operands]
        self.known = {id(x): (i, 0) for i, x in enumerate(operands) if x is not None}
        self.gone: dict[int, Callable[[], bool]] = {}  # of what is made or told, by its source's number: whether it is
        self.told: dict[int, tuple[Any, int]] = {}  # answers that are no tensors, by id: weakly, and as sources
        self.recordable = True

    def watch(self, run: Generator[Any, Any, Result]) -> Generator[Any, Any, Result]:
        """The same run. What whoever runs it does meanwhile is not seen."""
        answer = [None]
        while True:
            with watching(self.launched), self:
                try:
                    asked = run.send(answer.pop())
                except StopIteration as end:
                    return end.value
            self._ask(asked)
            answer.append((yield asked))
            del asked
            self._hear(answer[0])

    def _ask(self, asked: Any) -> None:
        self._end()
        earlier, source = self.told.get(id(asked), (None, 0))
        if earlier is not None and earlier() is asked:
            self.steps.append(Question(source))
        elif is_dataclass(asked) and isinstance(getattr(asked, "operands", None), tuple):
            self.steps.append(Question(None, replace(asked, operands=()), self._replaced(asked.operands)))
        else:
            self.recordable = False

    def _hear(self, answer: Any) -> None:
        question = self.steps.pop() if self.recordable else Question(None)
        self.steps.append(question._replace(aligned=tuple(map(alignment, told(answer)))))
        for x in told(answer):
            if isinstance(x, Tensor):
                self._make(x)
            else:
                self.told[id(x)] = held = ref(x), len(self.sources)
                self.gone[len(self.sources)] = lambda held=held: held[0]() is None
                self.sources.append(((), (), None, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        named = kwargs or {}
        given = [*_leaves((args, named), Tensor)]
        operation = None
        if not func.is_view and func.name().split(".")[0] not in ALLOCATIONS:
            self._end()
            operation = self._replaced(args), self._replaced(named)
        found = func(*args, **named)
        results = several(found)
        new = {i: x for i, x in enumerate(results) if isinstance(x, Tensor) and all(x is not y for y in given)}
        self.recordable &= all(x is None or isinstance(x, Tensor) for x in results) and not _decided(func, given)
        if operation is not None:
            self.steps.append(Operation(func, *operation, tuple(new)))
        elif not func.is_view:
            self._end()
            self.steps.append(Allocation(found.shape, found.stride(), found.dtype))
        for x in new.values():
            self._look(x, args[0]) if func.is_view else self._make(x)
        return found

    def _look(self, x: Tensor, base: Tensor) -> None:
        """At `base` in another way; of what is not known there, nobody knows here."""
        self.known.pop(id(x), None)
        if id(base) in self.known:
            source, offset = self.known[id(base)]
            self.recordable &= x.dtype == base.dtype or offset == x.storage_offset() == base.storage_offset() == 0
            self.known[id(x)] = source, offset + x.storage_offset() - base.storage_offset()

    def _make(self, x: Tensor) -> None:
        self.recordable &= x.device == self.device
        self.known[id(x)] = len(self.sources), 0
        self.gone[len(self.sources)] = StorageWeakRef(x.untyped_storage()).expired
        self.sources.append((x.shape, x.stride(), x.dtype, x.data_ptr()))

    def _replaced(self, x: Any) -> Any:
        """Tensors by places, also in lists."""
        if isinstance(x, dict):
            return {name: self._replaced(part) for name, part in x.items()}
        self.recordable &= type(x) in (list, tuple) or not isinstance(x, list | tuple)
        return type(x)(map(self._replaced, x)) if type(x) in (list, tuple) else self._given(x)

    def launched(self, ready: Ready, grid: tuple[int, int, int], arguments: tuple) -> None:
        self._end()
        given = tuple([self._given(x) for x in arguments])
        if not self.recordable:
            return
        passed, addresses, maps = [], [], []
        for x, own in zip(given, arguments, strict=True):
            if isinstance(x, Numbered):
                passed_so = own.passed  # None if it was launched in another way
                if passed_so is None and ready.run is not None:
                    passed_so = ready.encode(own, ready.descriptors[len(maps)])
                maps.append((len(passed), x.number))
                passed += passed_so or [None]
            else:
                if isinstance(x, Place) and not isinstance(x.source, Tensor):
                    addresses.append((len(passed), x.source, x.bytes))
                passed.append(own.data_ptr() if isinstance(own, Tensor) else x)
        self.steps.append(Launch(ready, grid, given, [*passed, *ready.constants], addresses, maps))

    def recording(self, results: Sequence[Tensor | None]) -> Recording | None:
        """Of what was seen."""
        places = [self._given(x) for x in results]
        if not self.recordable or not any(isinstance(step, Launch) for step in self.steps):
            return None
        descriptors = list(self.descriptors.values())
        last: dict[int, int] = {}  # which step is the last that reads an operand
        for i, step in enumerate(self.steps):
            if not isinstance(step, Allocation | End):
                read = step.arguments if isinstance(step, Launch) else [*_leaves(_given(step), Place)]
                read = [descriptors[x.number].of if isinstance(x, Numbered) else x for x in read]
                last |= {x.source: i for x in read if isinstance(x, Place) and not isinstance(x.source, Tensor)}
        last = {source: i for source, i in last.items() if source < self.operands}
        kept = {place.source for place in places if place is not None and not isinstance(place.source, Tensor)}
        steps: list[Step] = [End(source) for source in range(self.operands) if source not in kept | {*last}]
        for i, step in enumerate(self.steps):
            steps += [step, *(End(source) for source, at in last.items() if at == i and source not in kept)]
        by_address = all(step.ready.run is not None for step in steps if isinstance(step, Launch))
        return Recording(steps, descriptors, places, by_address, {})

    def _given(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._place(x)
        if isinstance(x, Tiles):
            of = self._place(x.base)
            self.recordable &= of is not None and not isinstance(of.source, Tensor)  # no table is read by tiles
            key = of, *map(tuple, (x.shape, x.strides, x.block_shape))
            number = list(self.descriptors).index(key) if key in self.descriptors else len(self.descriptors)
            self.descriptors.setdefault(key, Descriptor(of, (x.shape, x.strides, x.block_shape, x.layout)))
            return Numbered(number)
        return x

    def _place(self, x: Tensor) -> Place | None:
        if id(x) in self.tables:
            return Place(x, 0, x.shape, x.stride(), 0, whole=True, dtype=None)
        if id(x) not in self.known:
            self.recordable = False
            return None
        source, offset = self.known[id(x)]
        *shaped, dtype, address = self.sources[source]
        behind = offset * x.element_size() if x.numel() else 0  # of nothing the address is 0
        self.recordable &= not x.numel() or x.data_ptr() == address + behind  # or it is not what was known by this id
        whole = offset == 0 and [x.shape, x.stride()] == shaped
        return Place(source, offset, x.shape, x.stride(), behind, whole, x.dtype if x.dtype != dtype else None)

    def _end(self) -> None:
        for source in [source for source, is_gone in self.gone.items() if is_gone()]:
            del self.gone[source]
            self.steps.append(End(source))


def _decided(func: Any, given: Sequence[Tensor]) -> bool:
    """Whether what is in tensors decides the shapes of results: of rows chosen by numbers it does not."""
    by_number = func is torch.ops.aten.index.Tensor and all(x.dtype != torch.bool for x in given)
    return torch.Tag.dynamic_output_shape in func.tags and not by_number


def _given(step: Operation | Question) -> Any:
    return step.operands if isinstance(step, Question) else (step.given, step.named)


def _leaves(x: Any, kind: type) -> Iterator[Any]:
    """Those of a kind in lists and named arguments."""
    if isinstance(x, kind):
        yield x
    elif isinstance(x, dict):
        yield from _leaves([*x.values()], kind)
    elif type(x) in (list, tuple):
        for part in x:
            yield from _leaves(part, kind)
