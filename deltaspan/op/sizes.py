"""Bytes of a call: what is handed to each collective, and what is kept between the directions."""

import torch

from deltaspan.kernels import select
from deltaspan.layout.pack import as_int
from deltaspan.op.context import Context
from deltaspan.op.operands import TYPES, check_heads
from deltaspan.op.options import Options, check_segments
from deltaspan.op.view import RankView
from deltaspan.plan import Cut, collective_bytes, retained_bytes


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
    boundary_mode: str = "saved",
    save_transfer: bool = True,
) -> dict[str, tuple[int, int]] | list[dict[str, tuple[int, int]]]:
    """(sent, received) bytes of this rank by collective, for one layer's forward and backward; its own share counts.

    channels: of the convolution; None means those of a packed q | k | v row, 2 H K + HV V.
    exchange, boundary_mode, save_transfer: as given to the call. "replay" exchanges the forward's states twice.
    With a SimulatedGroup a list, one entry a rank. Raises ValueError for heads or options that no call accepts.
    """
    check_layer(ctx, H, HV, K, V, dtype)
    options = Options(exchange=exchange, boundary_mode=boundary_mode, save_transfer=save_transfer)
    channels = 2 * H * K + HV * V if channels is None else as_int("channels", channels, minimum=0)
    heads = {"HV": HV, "K": K, "V": V, "state_size": _state_size(dtype), "exchange": exchange}
    rows = {"channels": channels, "width": ctx.conv_kernel_size, "row_size": dtype.itemsize}
    again = {"resend": options.keeps and not save_transfer, "replay": not options.keeps}
    return ctx._each(lambda view: collective_bytes(ctx.part, view.rank, **heads, **rows, **again))


def saved_bytes(
    ctx: Context,
    *,
    H: int,
    HV: int,
    K: int = 128,
    V: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    exchange: str = "all_to_all",
    segments: Cut | None = None,
    save_mode: str = "light",
    boundary_mode: str = "saved",
    save_transfer: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    backend: str = "auto",
) -> int | list[int]:
    """Bytes that this rank keeps from a layer's forward to its backward, beyond the operands.

    exchange to backend: as given to the call.
    With a SimulatedGroup a list, one entry a rank. Raises ValueError for heads or options that no call accepts.
    """
    check_layer(ctx, H, HV, K, V, dtype)
    options = Options(
        exchange=exchange, segments=segments, save_mode=save_mode, boundary_mode=boundary_mode,
        save_transfer=save_transfer, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, backend=backend,
    )  # fmt: skip
    check_segments(segments, ctx.part)
    call = {"dtype": dtype, "K": K, "V": V, "group": HV // H}
    backend = select.chosen_backend(backend, device=ctx.device, **call)
    heads = {"HV": HV, "K": K, "V": V, "state_size": _state_size(dtype)}

    def of_rank(view: RankView) -> int:
        if not options.keeps:
            return 0
        cut = ctx._segments(view.rank, HV, segments)
        states = retained_bytes(ctx.part, view.rank, segments=cut, transfers=save_transfer, exchange=exchange, **heads)
        chunks = len(view.grid.start) if save_mode == "full" else 0
        return states + select.tier(backend).kept_bytes(chunks, H=H, l2norm=use_qk_l2norm_in_kernel, **heads)

    return ctx._each(of_rank)


def check_layer(ctx: Context, H: int, HV: int, K: int, V: int, dtype: torch.dtype) -> None:
    """Raises TypeError or ValueError for what no call accepts."""
    if not isinstance(ctx, Context):
        raise TypeError(f"ctx must be a Context, from deltaspan.build_context, got {type(ctx).__name__}")
    for name, value in (("H", H), ("HV", HV), ("K", K), ("V", V)):
        as_int(name, value, minimum=1)
    check_heads(H, HV)
    if dtype not in TYPES:
        raise ValueError(f"dtype must be that of operands, bf16, fp16, fp32 or fp64, got {dtype!r}")


def _state_size(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 4
