"""What several stages read of the same operands is made once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MADE: dict[tuple, Any] = {}


def once(make: Callable[[], Any], *operands: Any) -> Any:
    """What was made last of the same operands, bit by bit: the emulator inverts a chunk for as long as it walks it."""

    def known(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.dtype, x.shape, x.stride(), x.contiguous().view(torch.uint8).numpy().tobytes()

    key = tuple(map(known, operands))
    if key not in _MADE:
        if len(_MADE) == 4:
            del _MADE[next(iter(_MADE))]
        _MADE[key] = make()
    return _MADE[key]
