"""Between token rows [T, h, ...] and chunks [NC, h, 64, ...], and products that keep FP32."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from deltaspan.kernels.stages import Grid
from deltaspan.plan import CHUNK


def to_chunks(x: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """[T, h, ...] -> [NC, h, 64, ...] in `dtype`; rows past a chunk's end are zero, whatever stands in the next one."""
    rows = x[grid.token_of_row]
    valid = grid.valid.reshape(*grid.valid.shape, *[1] * (x.dim() - 1))
    return torch.where(valid, rows, 0).to(dtype).transpose(1, 2)


def to_tokens(chunks: Tensor, like: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """[NC, h, 64, ...] -> [T, h, ...] in `dtype` with the T of `like`; tokens that no fragment holds get zero."""
    rows = chunks.transpose(1, 2).flatten(0, 1)
    out = torch.zeros(like.shape[0], *rows.shape[1:], dtype=dtype, device=rows.device)
    out[: grid.tokens] = rows[grid.row_of_token].to(dtype)
    return out


def whole_chunks(x: Tensor) -> Tensor:
    """x [T, D] with rows of zeros up to a multiple of 64.

    The last few elements of a tensor that does not fill the vector registers go through another exp, which may round
    differently: in whole chunks a token's result does not depend on how many tokens stand beside it.
    """
    return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % CHUNK))


class _Precision:
    """What the process allows for FP32 products: "ieee" while any thread is inside, as it was when none is."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, ()

    def enter(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = tuple(backend.fp32_precision for backend in BACKENDS)
                for backend in BACKENDS:
                    backend.fp32_precision = "ieee"
            self.inside += 1

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside:
                return
            for backend, precision in zip(BACKENDS, self.before, strict=True):
                backend.fp32_precision = "none"  # as it is if nobody set it: then it follows a wider setting
                if backend.fp32_precision != precision:
                    backend.fp32_precision = precision


BACKENDS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
_precision = _Precision()


@contextmanager
def full_precision() -> Iterator[None]:
    """FP32 products in FP32, whatever the process allows for its own: TF32, bf16 or autocast would lose what states
    carry from rank to rank. The setting is the process's: other threads' products are FP32 too meanwhile."""
    _precision.enter()
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        _precision.leave()
