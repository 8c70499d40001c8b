"""What torch's checkpoint is doing around a call, and what a checkpoint's recompute may leave out.

A non-reentrant checkpoint runs its region twice: the first time it drops every tensor that is saved, the second time,
inside the backward, it hands those of the second run to the first run's nodes. So a first run may save places for what
only the second run has, and a run that is the last to save anything is stopped right after it: nobody reads its output.
Both are read from the checkpoint's own frame, which torch does not promise to keep as it is. Where it is not found as
expected, nothing is left out.
"""

from dataclasses import dataclass, field
from functools import cache
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

RULE, CONVOLUTION = "rule", "convolution"  # the entries of a handle


@dataclass(eq=False)
class RecomputeHandle:
    """Carries what a checkpointed forward received from other ranks to its recompute, which then asks for nothing.

    Made anew for every layer and micro-step, outside the outermost checkpoint, and given to the checkpointed function
    as an argument. It serves one call of the operation and one of the convolution, on all ranks alike. It keeps as many
    bytes as `saved_bytes` says, and the convolution's history rows.
    """

    entries: dict[str, Any] = field(default_factory=dict)

    def find(self, key: str) -> Any:
        """What the first run of a call has left, None if this is the first run.

        Raises:
            RuntimeError: something is there, though no backward is running: the handle has served another call.
        """
        entry = self.entries.get(key)
        if entry is not None and not in_backward():
            raise RuntimeError(
                "recompute_handle has served another forward: make a new one for every layer and micro-step"
            )
        return entry


def check_handle(handle: Any, keeps: bool = True) -> None:
    if handle is not None and not isinstance(handle, RecomputeHandle):
        raise TypeError(f"recompute_handle must be a RecomputeHandle, got {type(handle).__name__}")
    if handle is not None and in_selective_checkpoint():
        raise ValueError(
            "recompute_handle leaves operators out of the recompute, and a selective checkpoint expects the same ones "
            "in both runs: use one or the other"
        )
    if handle is not None and not keeps:
        raise ValueError("recompute_handle needs boundary_mode='saved', for it keeps what 'replay' exchanges again")


def in_selective_checkpoint() -> bool:
    """Whether a checkpoint that keeps some operators' results watches: it expects the same operators in both runs."""
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in _get_current_dispatch_mode_stack())


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True)
class Region:
    """The checkpoint region whose hooks see what a call saves."""

    recomputing: bool
    remaining: int = 0  # in a recompute: how many more tensors the first run had saved
    stops: bool = False  # in a recompute: whether it ends with the last of them

    def ends_after(self, tensors: int) -> bool:
        """Whether a recompute ends with a call that saves so many tensors, so that nobody reads its results."""
        return self.recomputing and self.stops and self.remaining == tensors


FIRST_RUN = Region(recomputing=False)


def surrounding() -> Region | None:
    """The innermost non-reentrant checkpoint around this call; None for none, or if another hook stands between."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or in_selective_checkpoint():
        return None
    pack = hooks[0]
    while (within := getattr(pack, "__wrapped__", None)) is not None:  # as inspect.unwrap, in a tenth of the time
        pack = within
    pack = getattr(pack, "_torchdynamo_orig_callable", pack)
    if getattr(pack, "__module__", "") != "torch.utils.checkpoint" or not isfunction(pack):
        return None
    names = pack.__code__.co_freevars
    if "frame" in names:
        return FIRST_RUN
    try:
        cells = dict(zip(names, pack.__closure__ or (), strict=True))  # a sixth of inspect.getclosurevars
        frame, task = cells["target_frame_ref"].cell_contents(), cells["gid"].cell_contents
        remaining = len(frame.weak_holders) - frame.recomp_counter.get(task, 0)
        return Region(recomputing=True, remaining=remaining, stops=frame.early_stop is True)
    except (KeyError, ValueError, AttributeError):
        return Region(recomputing=True)


def places(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Tensors of the same shape, type and device that take no memory and hold nothing."""
    return tuple([t.new_empty_strided(t.shape, (0,) * t.dim()) for t in tensors])


def unread(like: Tensor) -> Tensor:
    """In the place of an output that nobody reads: NaN, which takes no memory either."""
    return _no_number(like.dtype, like.device).expand(like.shape)


@cache
def _no_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # whoever asks first, autograd may have views of it
        return torch.full((), torch.nan, dtype=dtype, device=device)


@cache
def mark(filled: bool) -> Tensor:
    """Travels beside such tensors to say whether they are filled: on the CPU, so that reading it waits for nothing."""
    with torch.inference_mode(False):  # whoever asks first, a backward can save it
        return torch.tensor(filled, device="cpu")


def taken(fn: Any) -> list[Tensor | None]:
    """What a node has saved. The node lets go of it unless its graph is retained: the caller says how long it lives."""
    tensors = list(fn.saved_tensors)
    if hasattr(fn, "maybe_clear_saved_tensors"):  # a torch without it keeps them until the node is done
        fn.maybe_clear_saved_tensors()
    return tensors
