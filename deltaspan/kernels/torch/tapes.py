"""What a forward may keep of its stages, so that the backward need not run them again."""

import torch
from torch import Tensor

from deltaspan.kernels.stages import Grid, Raw
from deltaspan.kernels.torch.inputs import ready
from deltaspan.kernels.torch.prep import Tape
from deltaspan.kernels.torch.walk import States
from deltaspan.plan import CHUNK

LEFT_OUT = ("operands", "raw", "g", "grid", "scale", "u")  # given again, but for u, which a walk alone reads
KEPT = tuple(name for name in Tape._fields if name not in LEFT_OUT)


def kept_tensors(l2norm: bool) -> int:
    """How many `keep` returns."""
    return len(KEPT) + len(States._fields)


def keep(tape: Tape, states: States) -> tuple[Tensor, ...]:
    """What the adjoint stages read, beside the operands and tables."""
    return *(getattr(tape, name) for name in KEPT), *states


def restore(
    kept: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, grid: Grid,
    *, scale: float, raw: Raw,
) -> tuple[Tape, States]:  # fmt: skip
    """Tape and states from what `keep` returned, with the operands and tables of the forward."""
    tape, states = dict(zip(KEPT, kept, strict=False)), States(*kept[len(KEPT) :])
    _, _, g_ready, _ = ready(q, k, g, beta, raw._replace(l2norm=False, sigmoid=False), states.state.dtype)
    return Tape(operands=(q, k, v, g, beta), raw=raw, g=g_ready, grid=grid, scale=scale, u=None, **tape), states


def kept_bytes(chunks: int, *, H: int, HV: int, K: int, V: int, state_size: int, l2norm: bool) -> int:
    """Bytes of what `keep` returns. A row has q, k, read, w and r K of K channels, v and the update of V, E, K K^T,
    Q K^T and T of 64, and beta, a and r; a chunk its state and gamma."""
    row = 5 * K + 2 * V + 4 * CHUNK + 3
    return chunks * HV * (state_size * (CHUNK * row + K * V + 1) + CHUNK * torch.bool.itemsize)
