"""Bytes of a call: what is handed to each collective, and what is kept between the directions."""

import torch

from deltaspan.op.context import Context
from deltaspan.op.operands import check_heads
from deltaspan.op.options import check_exchange, check_segments
from deltaspan.op.view import RankView
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
    exchange: str = "all_to_all",
) -> dict[str, tuple[int, int]] | list[dict[str, tuple[int, int]]]:
    """(sent, received) bytes of this rank by collective, for one layer's forward and backward; its own share counts.

    channels: of the convolution; None means those of a packed q | k | v row, 2 H K + HV V.
    With a SimulatedGroup a list, one entry a rank. Raises ValueError for heads or an exchange that no call accepts.
    """
    check_heads(H, HV)
    check_exchange(exchange)
    channels = 2 * H * K + HV * V if channels is None else channels
    heads = {"HV": HV, "K": K, "V": V, "state_size": _state_size(dtype), "exchange": exchange}
    rows = {"channels": channels, "width": ctx.conv_kernel_size, "row_size": dtype.itemsize}
    return ctx._each(lambda view: collective_bytes(ctx.part, view.rank, **heads, **rows))


def saved_bytes(
    ctx: Context,
    *,
    H: int,
    HV: int,
    K: int = 128,
    V: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    exchange: str = "all_to_all",
    segments: int | None = None,
) -> int | list[int]:
    """Bytes that this rank keeps from a layer's forward to its backward, beyond the operands.

    segments: as given to the call; None, as the context plans.

    With a SimulatedGroup a list, one entry a rank. Raises ValueError for heads or an exchange that no call accepts.
    """
    check_heads(H, HV)
    check_exchange(exchange)
    check_segments(segments, ctx.part)
    heads = {"HV": HV, "K": K, "V": V, "state_size": _state_size(dtype), "exchange": exchange}

    def of_rank(view: RankView) -> int:
        cut = ctx._segments(view.rank, HV, segments)
        return retained_bytes(ctx.part, view.rank, segments=cut, **heads)

    return ctx._each(of_rank)


def _state_size(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 4
