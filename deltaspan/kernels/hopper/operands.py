"""Operands as the kernels of this tier read them: copied only where they lie otherwise."""

import torch
from torch import Tensor

from deltaspan.kernels.stages import Raw


def as_read(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, raw: Raw) -> tuple[tuple[Tensor, ...], Raw]:
    """Operands as kernels read them."""
    if raw.A_log is not None:
        bias = None if raw.dt_bias is None else raw.dt_bias.contiguous()
        raw = raw._replace(A_log=raw.A_log.contiguous(), dt_bias=bias)
    return (by_rows(q), by_rows(k), by_rows(v), _dense(g), _dense(beta)), raw


def by_rows(x: Tensor) -> Tensor:
    """As it is where the copy engine can read it: heads and channels dense, rows at multiples of 16 bytes."""
    (_, heads, D), (pitch, *inner) = x.shape, x.stride()
    dense = inner == [D, 1] and pitch % 8 == 0 and pitch >= heads * D
    return x if dense and x.storage_offset() % 8 == 0 else x.clone(memory_format=torch.contiguous_format)


def _dense(x: Tensor) -> Tensor:
    """[T, HV] with the strides of its shape: `contiguous` leaves those of axes of length 1 as they are."""
    return x if x.stride() == (x.shape[1], 1) else x.clone(memory_format=torch.contiguous_format)
