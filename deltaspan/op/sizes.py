"""Bytes of a call: what is handed to each collective, and what is kept between the directions."""

import torch

from deltaspan.op.context import Context
from deltaspan.op.operands import check_heads
from deltaspan.plan import collective_bytes, retained_bytes


def comm_bytes(
    ctx: Context,
    *,
    H: int,
    HV: int,
    K: int = 128,
    V: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    channels: int | None = None,
) -> dict[str, tuple[int, int]] | list[dict[str, tuple[int, int]]]:
    """(sent, received) bytes of this rank by collective, for one layer's forward and backward. Its own share counts
    too.

    channels: of the convolution; None means those of a packed q | k | v row, 2 H K + HV V.
    With a SimulatedGroup a list, one entry a rank.
    """
    check_heads(H, HV)
    sizes = {"state_size": _state_size(dtype), "row_size": dtype.itemsize, "width": ctx.conv_kernel_size}
    channels = 2 * H * K + HV * V if channels is None else channels
    return ctx._each(lambda view: collective_bytes(ctx.part, view.rank, HV=HV, K=K, V=V, channels=channels, **sizes))


def saved_bytes(
    ctx: Context, *, H: int, HV: int, K: int = 128, V: int = 128, dtype: torch.dtype = torch.bfloat16
) -> int | list[int]:
    """Bytes that this rank keeps from a layer's forward to its backward, beyond the operands."""
    check_heads(H, HV)
    return ctx._each(lambda view: retained_bytes(ctx.part, view.rank, HV=HV, K=K, V=V, state_size=_state_size(dtype)))


def _state_size(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 4
