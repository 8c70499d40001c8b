"""Programs that are run again: of a layer after another, and of a recompute after a forward.

What the stages of a program launch is recorded the second time that a cut of a context sees operands of the same kinds,
and launched again from then on, without asking anybody in between but the other ranks. That is for tiers that record;
what cannot be recorded runs as it is.
"""

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deltaspan.exchange import Program
from deltaspan.op.backward import Gradients, backward_program
from deltaspan.op.context import Context
from deltaspan.op.forward import Forward, forward_program
from deltaspan.op.operands import Operands
from deltaspan.op.options import Options
from deltaspan.op.packed import packed_row
from deltaspan.op.saved import Saved, shapes
from deltaspan.op.view import RankView

ATTEMPTS = 3  # at a recording: tables are made by the first runs that want them
MOST_KINDS = 64  # of operands of a cut


def may_repeat(ctx: Context, tier: Any) -> bool:
    """Whether programs may be recorded: with nobody who watches what torch is asked, or fills what it allocates."""
    there = ctx.device.type != "cuda" or ctx.device.index in (None, torch.cuda.current_device())
    watched = torch._C._len_torch_dispatch_stack() or torch.are_deterministic_algorithms_enabled()
    return hasattr(tier, "recorder") and there and not watched


def forward_again(
    ctx: Context, view: RankView, tier: Any, x: Operands, options: Options, entered: Saved | None = None,
    *, output: bool, keeps: bool,
) -> Program[Forward]:  # fmt: skip
    """`forward_program`."""

    def run() -> Program[Forward]:
        return forward_program(ctx, view, tier, x, options, entered, output=output, keeps=keeps)

    def apart(done: Forward) -> tuple[list[Tensor | None], bool]:
        return [*done[:2], *_boundary(done.saved), *done.tape], done.saved is not None

    def together(found: list[Tensor | None], saves: bool) -> Forward:
        o, final, *boundary = found[:5]
        saved = Saved(ctx, view.rank, options, shapes(x), *boundary) if saves else None
        return Forward(o, final, saved, tuple(found[5:]))

    if not may_repeat(ctx, tier):
        return run()
    what = "forward", options, output, keeps, entered is None
    return _again(ctx, view, tier, x, what, [*x, *_boundary(entered)], run, apart, together)


def backward_again(
    ctx: Context, view: RankView, tier: Any, x: Operands, options: Options, do: Tensor, dfinal_state: Tensor | None,
    kept: list[Saved | None],
) -> Program[Gradients]:  # fmt: skip
    """`backward_program`. kept: what the forward kept, which is let go of here."""

    def run() -> Program[Gradients]:
        return backward_program(ctx, view, tier, x, options, do, dfinal_state, kept.pop())

    if not may_repeat(ctx, tier):
        return run()
    (saved,) = kept
    operands = [*x, do, dfinal_state, *_boundary(saved), *(() if saved is None else saved.tape)]
    what = "backward", options, saved is None, packed_row(x.q, x.k, x.v) is not None
    return _again(ctx, view, tier, x, what, operands, run, _gradients_apart, _gradients_together, kept)


def _gradients_apart(done: Gradients) -> tuple[Gradients, None]:
    return done, None


def _gradients_together(found: list[Tensor | None], rest: None) -> Gradients:
    return Gradients(*found)


def _boundary(saved: Saved | None) -> tuple[Tensor | None, ...]:
    return (None,) * 3 if saved is None else (saved.entry, saved.maps, saved.kept)


def _again(
    ctx: Context, view: RankView, tier: Any, x: Operands, what: tuple, operands: list[Tensor | None],
    run: Callable[[], Program], apart: Callable, together: Callable, kept: list | None = None,
) -> Program:  # fmt: skip
    """A program's result, with tensors taken apart from it, or put together from those of a recording."""
    cut = ctx._cut(view, x.v.shape[1], what[1].segments)
    key = what, *map(_kind, operands)
    known = cut.recordings.get(key, 0) if _told_apart(operands) else ATTEMPTS
    if not isinstance(known, int):
        recording, rest = known
        if kept is not None:
            kept.clear()
        return together((yield from recording.play(operands)), rest)
    if known < ATTEMPTS and (key in cut.recordings or len(cut.recordings) < MOST_KINDS):
        cut.recordings[key] = known + 1
    if not 0 < known < ATTEMPTS:
        operands.clear()
        return (yield from run())
    recorder = tier.recorder(operands, _tensors_of((cut, view)))
    operands.clear()
    done = yield from recorder.watch(run())
    found, rest = apart(done)
    if (recording := recorder.recording(found)) is not None:
        cut.recordings[key] = recording, rest
    return done


def _told_apart(operands: list[Tensor | None]) -> bool:
    """Whether each is plain, and none is another, too."""
    there = [x for x in operands if x is not None and x.numel()]
    return len({*map(id, there)}) == len(there) and all(type(x) in (Tensor, Parameter) for x in there)


def _kind(x: Tensor | None) -> tuple | None:
    """What a run may depend on."""
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, x.data_ptr() % 16, x.storage_offset() % 8


def _tensors_of(x: Any) -> Iterator[Tensor]:
    """The tables that a context has on its device."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for part in x:
            yield from _tensors_of(part)
    elif is_dataclass(x):
        for part in vars(x).values():
            yield from _tensors_of(part)
