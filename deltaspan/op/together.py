"""Calls in which all ranks of a group take part: one that raises does not leave the others waiting."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from deltaspan.op.recompute import CONVOLUTION, RULE, RecomputeHandle
from deltaspan.op.view import RankView

STOPPED = getattr(torch.utils.checkpoint, "_StopRecomputationError", ())  # torch's way to end a recompute: no failure


class _Running(threading.local):
    """The groups of the calls that this thread is in."""

    def __init__(self) -> None:
        self.transports: list[Any] = []


_running = _Running()


def together(awaited: Callable[[RankView], bool], entry: str | None = None) -> Callable[[Callable], Callable]:
    """Marks such a call. A context is among its arguments, or is its first one's `context`.

    awaited: whether the other ranks will ask for a collective in this call. If this rank raises then, they are told
    (over gloo; NCCL has only its timeout), and end with an error that names it.
    entry: by which a recompute handle keeps what the call received. Where it is there, nobody asks for anything, and
    the next call is the one that counts. A call within another, as a checkpoint's recompute within a backward, is a
    part of that one: so ranks of which only some have a handle still count alike.
    """

    def mark(call: Callable) -> Callable:
        @wraps(call)
        def marked(*args: Any, **kwargs: Any) -> Any:
            ctx = _context_of(args, kwargs)
            if ctx is None or not awaited(ctx._views[0]) or ctx._transport in _running.transports:
                return call(*args, **kwargs)
            handle = kwargs.get("recompute_handle")
            served = isinstance(handle, RecomputeHandle) and entry in handle.entries
            if not served:
                ctx._transport.begin()
                _running.transports.append(ctx._transport)
            try:
                return call(*args, **kwargs)
            except STOPPED:
                raise
            except Exception as error:
                if served:
                    ctx._transport.begin()
                _tell(ctx, error)
                raise
            finally:
                if not served:
                    _running.transports.pop()

        return marked

    return mark


def told_to_others(call: Callable) -> Callable:
    """Marks a layer that makes such calls: what it raises between them, on this rank, is told to the others too."""

    @wraps(call)
    def marked(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except STOPPED:
            raise
        except Exception as error:
            ctx = _context_of(args, kwargs)
            told = getattr(error, "told_to_others", False) or (ctx and ctx._transport in _running.transports)
            if ctx is not None and not ctx._views[0].seams.none and not told:
                ctx._transport.begin()  # the others are in the next such call, or come to it
                _tell(ctx, error)
            raise

    return marked


def _context_of(args: tuple, kwargs: dict) -> Any:
    candidates = (*args, *kwargs.values(), getattr(args[0], "context", None) if args else None)
    return next((a for a in candidates if not isinstance(a, Tensor) and hasattr(a, "_transport")), None)


def _tell(ctx: Any, error: Exception) -> None:
    ctx._transport.announce(error, ctx.device)
    error.told_to_others = True


any_state_crosses = together(lambda view: not view.seams.none, RULE)
any_row_crosses = together(lambda view: not view.history.none, CONVOLUTION)
always = together(lambda view: True)


def anchor(ctx: Any) -> Tensor | None:
    """An input that wants a gradient on every rank, so that all ranks have a backward where any has one.

    Without it a rank whose own inputs need no gradient would leave the others waiting for its part of the adjoint.
    """
    return torch.empty(0, requires_grad=torch.is_grad_enabled()) if ctx.part.world_size > 1 else None
