"""Calls of one rank that are made again: a layer after another, and a recompute after a forward.

What the stages of a call launch is recorded the second time that a cut of a context sees operands of the same kinds,
and launched again from then on, without asking anything in between. That is for calls in which nothing crosses ranks,
of a tier that records; all others, and what cannot be recorded, run as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deltaspan.op.backward import Gradients, backward_program
from deltaspan.op.context import Context
from deltaspan.op.forward import Forward, forward_program
from deltaspan.op.operands import Operands
from deltaspan.op.options import Options
from deltaspan.op.saved import Saved, shapes

ATTEMPTS = 3  # at a recording: tables are made by the first runs that want them
MOST_KINDS = 64  # of operands of a cut


def may_repeat(ctx: Context, tier: Any) -> bool:
    """Whether calls of this rank may be recorded: with nobody beside it, and nobody who watches what torch is asked."""
    alone = len(ctx._views) == 1 and ctx._views[0].seams.none and hasattr(tier, "record")
    there = ctx.device.type != "cuda" or ctx.device.index in (None, torch.cuda.current_device())
    return alone and there and not torch._C._len_torch_dispatch_stack()


def forward_again(ctx: Context, tier: Any, x: Operands, options: Options, *, output: bool, keeps: bool) -> Forward:
    """The forward of a rank by itself."""

    def run() -> Forward:
        program = forward_program(ctx, ctx._views[0], tier, x, options, output=output, keeps=keeps)
        return ctx._transport.run([program])[0]

    def apart(done: Forward) -> tuple[list[Tensor | None], bool]:
        saved = done.saved
        boundary = (None,) * 3 if saved is None else (saved.entry, saved.maps, saved.kept)
        return [*done[:2], *boundary, *done.tape], saved is not None

    def together(found: list[Tensor | None], saves: bool) -> Forward:
        o, final, *boundary = found[:5]
        saved = Saved(ctx, ctx._views[0].rank, options, shapes(x), *boundary) if saves else None
        return Forward(o, final, saved, tuple(found[5:]))

    return _again(ctx, tier, x, ("forward", options, output, keeps), [*x], run, apart, together)


def backward_again(
    ctx: Context, tier: Any, x: Operands, options: Options, do: Tensor, dfinal_state: Tensor | None,
    kept: list[Saved | None],
) -> Gradients:  # fmt: skip
    """The backward of a rank by itself. kept: what the forward kept, which is let go of here."""

    def run() -> Gradients:
        program = backward_program(ctx, ctx._views[0], x, options, do, dfinal_state, kept.pop())
        return ctx._transport.run([program])[0]

    (saved,) = kept
    boundary = [None] * 3 if saved is None else [saved.entry, saved.maps, saved.kept]
    operands = [*x, do, dfinal_state, *boundary, *(() if saved is None else saved.tape)]
    what = "backward", options, saved is None
    del saved, boundary
    ways = (lambda found: (found, None)), (lambda found, _: Gradients(*found))
    return _again(ctx, tier, x, what, operands, run, *ways, kept)


def _again(
    ctx: Context, tier: Any, x: Operands, what: tuple, operands: list[Tensor | None], run: Callable[[], Any],
    apart: Callable, together: Callable, kept: list | None = None,
) -> Any:  # fmt: skip
    """A run's result, with tensors taken apart from it, or put together from those of a recording."""
    cut = ctx._cut(ctx._views[0], x.v.shape[1], what[1].segments)
    key = what, *map(_kind, operands)
    known = cut.recordings.get(key, 0) if _told_apart(operands) else ATTEMPTS
    if not isinstance(known, int):
        recording, rest = known
        if kept is not None:
            kept.clear()
        return together(recording.play(operands), rest)
    if known < ATTEMPTS and len(cut.recordings) < MOST_KINDS:
        cut.recordings[key] = known + 1
    if not 0 < known < ATTEMPTS:
        operands.clear()
        return run()
    done, rest = None, None

    def tensors() -> Sequence[Tensor | None]:
        nonlocal done, rest
        done = run()
        found, rest = apart(done)
        return found

    _, recording = tier.record(tensors, operands, _tensors_of((cut, ctx._views[0])))
    if recording is not None:
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
