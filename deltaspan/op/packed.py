"""One packed row q | k | v: its three views without a copy, and gradients that come back as one such row."""

from typing import Any

import torch
from torch import Tensor

from deltaspan.layout.pack import as_int
from deltaspan.op.operands import Operands, check_heads


def packed_qkv_views(qkv: Tensor, *, H: int, HV: int) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [..., H, D] and v [..., HV, D] of packed rows [..., (2 H + HV) D], as views. Differentiable.

    The rows may themselves be columns of wider ones. Where the three gradients come as views of one packed row, as the
    gated delta rule gives them, that row is the gradient, and nothing is copied.

    Raises:
        TypeError: qkv is no tensor, or H or HV no integer.
        ValueError: HV is no multiple of H, or the row's channels are no multiple of 2 H + HV.
    """
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv must be a tensor, got {type(qkv).__name__}")
    H, HV = as_int("H", H, minimum=1), as_int("HV", HV, minimum=1)
    check_heads(H, HV)
    if qkv.dim() < 1 or qkv.shape[-1] % (2 * H + HV) or not qkv.shape[-1]:
        raise ValueError(f"qkv must have a multiple of 2 H + HV = {2 * H + HV} channels, got shape {tuple(qkv.shape)}")
    return _PackedViews.apply(qkv, H, HV)


class _PackedViews(torch.autograd.Function):
    @staticmethod
    def forward(fn: Any, qkv: Tensor, H: int, HV: int) -> tuple[Tensor, Tensor, Tensor]:
        fn.heads, fn.shape = (H, H, HV), qkv.shape
        fn.set_materialize_grads(False)
        rows = qkv.unflatten(-1, (2 * H + HV, -1))
        return rows[..., :H, :], rows[..., H : 2 * H, :], rows[..., 2 * H :, :]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(fn: Any, *grads: Tensor | None) -> tuple:
        given = next((g for g in grads if g is not None), None)
        if given is None:
            return None, None, None
        if all(g is not None for g in grads):
            row = packed_row(*(g.reshape(-1, *g.shape[-2:]) for g in grads))
            if row is not None:
                return row.view(fn.shape), None, None
        parts = [
            given.new_zeros(*fn.shape[:-1], heads, given.shape[-1]) if g is None else g
            for g, heads in zip(grads, fn.heads, strict=True)
        ]
        return torch.cat(parts, dim=-2).flatten(-2), None, None


def packed_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The rows [T, channels] of which q, k [T, H, K] and v [T, HV, V] are the columns one after another, without a
    copy; None if they are not."""
    columns = [x.shape[1] * x.shape[2] for x in (q, k, v)]
    if q.stride(0) < sum(columns):
        return None
    dense = all(x.stride()[1:] == (x.shape[2], 1) and x.stride(0) == q.stride(0) for x in (q, k, v))
    together = len({(x.untyped_storage().data_ptr(), x.dtype) for x in (q, k, v)}) == 1
    offsets = [x.storage_offset() - q.storage_offset() for x in (k, v)]
    if not (dense and together and offsets == [columns[0], columns[0] + columns[1]]):
        return None
    return q.as_strided((q.shape[0], sum(columns)), (q.stride(0), 1), q.storage_offset())


def into_one_row(x: Operands, *grads: Tensor) -> tuple[Tensor, ...]:
    """dq, dk and dv, as views of one fresh row where q, k and v are columns of one."""
    if packed_row(x.q, x.k, x.v) is None:
        return grads
    row = torch.cat([g.flatten(1) for g in grads], dim=1)
    columns = row.split([g.shape[1] * g.shape[2] for g in grads], dim=1)
    return tuple(column.unflatten(1, g.shape[1:]) for column, g in zip(columns, grads, strict=True))
