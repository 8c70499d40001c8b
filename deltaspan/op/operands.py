"""The operands of one rank: their shapes, checked, and without the batch axis."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_tensor(name: str, x: Any, device: torch.device) -> None:
    """Raises TypeError unless `x` is a tensor, ValueError unless it lies on the context's device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}, the context on {device}: build the context with device=")


def check_type(name: str, dtype: torch.dtype) -> None:
    """Raises ValueError unless it is a known type of floating-point numbers."""
    if dtype not in TYPES:
        raise ValueError(f"{name} must be bf16, fp16, fp32 or fp64, got {dtype}")


def state_type(dtype: torch.dtype) -> torch.dtype:
    """Of states, summaries and sums beside such operands: FP64 with FP64, else FP32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_heads(H: int, HV: int) -> None:
    """Raises ValueError unless HV value heads divide evenly over H key heads."""
    if H < 1 or HV < 1 or HV % H:
        raise ValueError(f"v's heads must be a multiple of q's, got HV={HV} and H={H}")


class Operands(NamedTuple):
    """One rank's shard, T tokens in local order (more than the rank's own only in a padded buffer on one rank)."""

    q: Tensor  # [T, H, K]
    k: Tensor  # [T, H, K]
    v: Tensor  # [T, HV, V]
    g: Tensor  # [T, HV]
    beta: Tensor  # [T, HV]
    initial_state: Tensor | None = None  # [N, HV, K, V]
    A_log: Tensor | None = None  # [HV], where g is raw
    dt_bias: Tensor | None = None  # [HV]

    @property
    def state_type(self) -> torch.dtype:
        return state_type(self.q.dtype)

    def state_shape(self, count: int) -> tuple[int, int, int, int]:
        """[count, HV, K, V]"""
        return count, self.v.shape[1], self.k.shape[2], self.v.shape[2]


NAMES = Operands._fields
AXES = dict(zip(NAMES[:5], (3, 3, 3, 2, 2), strict=True))  # of those that have to be given, without a batch axis


def squeeze(x: Tensor, name: str, dims: int) -> Tensor:
    """Takes off the leading batch axis of 1, which may be left out. Raises ValueError as `without_one`."""
    without_one(x.shape, name, dims)
    return x.squeeze(0) if x.dim() > dims else x


def without_one(shape: torch.Size, name: str, dims: int) -> tuple[int, ...]:
    """A shape without the leading batch axis of 1 that it may have.

    Raises:
        ValueError: another number of axes, or a batch of more than one.
    """
    more = len(shape) - dims
    if more == 1 and shape[0] != 1:
        raise ValueError(f"{name} must have a batch of 1, its documents packed end to end; got shape {tuple(shape)}")
    if more not in (0, 1):
        raise ValueError(
            f"{name} must have {dims} axes and may have a batch axis of 1 before them; got shape {tuple(shape)}"
        )
    return tuple(shape[more:])


def without_batch(given: Operands) -> Operands:
    """The same, checked ones, each of the first five without the batch axis that it may have."""
    first = [x.squeeze(0) if x.dim() > dims else x for x, dims in zip(given, AXES.values(), strict=False)]
    return Operands(*first, *given[len(AXES) :])


def check_operands(
    x: Operands, *, raw_g: bool, raw_beta: bool, tokens: int, padded: bool, documents: int, device: torch.device
) -> None:
    """Of one rank's operands, as they are given.

    raw_g, raw_beta: they come from projections, and may have the operands' type.
    tokens: the rank's own; with `padded` the buffer may be longer.

    Raises:
        TypeError: an operand that is no tensor.
        ValueError: shapes, types or devices that do not fit, naming the operand, what it is and what it must be.
    """
    for name, t in zip(NAMES, x, strict=True):
        if t is not None or name in AXES:
            check_tensor(name, t, device)
    found = tuple([None if t is None else (t.shape, t.dtype) for t in x])
    _check_fit(found, raw_g, raw_beta, tokens, padded, documents)


@lru_cache(maxsize=1024)  # layers are called with the same shapes again and again
def _check_fit(
    found: tuple[tuple[torch.Size, torch.dtype] | None, ...], raw_g: bool, raw_beta: bool, tokens: int, padded: bool,
    documents: int,
) -> None:  # fmt: skip
    """Shapes and types of operands, in their order, beside each other."""
    shapes = dict(zip(NAMES, (None if t is None else tuple(t[0]) for t in found), strict=True))
    types = dict(zip(NAMES, (None if t is None else t[1] for t in found), strict=True))
    shapes |= {name: without_one(shapes[name], name, dims) for name, dims in AXES.items()}
    (T, H, K), (HV, V), dtype = shapes["q"], shapes["v"][1:], types["q"]
    if tokens > T or (tokens < T and not padded):
        raise ValueError(f"q has {T} tokens, but the context gives this rank {tokens}")
    check_heads(H, HV)
    if K < 1 or V < 1:
        raise ValueError(f"head dimensions must be at least 1, got K={K} and V={V}")
    expected = {"k": (T, H, K), "v": (T, HV, V), "g": (T, HV), "beta": (T, HV), "initial_state": (documents, HV, K, V)}
    expected |= {"A_log": (HV,), "dt_bias": (HV,)}
    for name, shape in expected.items():
        if shapes[name] not in (None, shape):
            raise ValueError(f"{name} must have shape {shape} beside these q and v, got {shapes[name]}")
    check_type("q", dtype)
    for name in ("k", "v"):
        if types[name] != dtype:
            raise ValueError(f"{name} must have q's type {dtype}, got {types[name]}")
    accepted = {
        "g": {torch.float32, dtype if raw_g else torch.float32},
        "beta": {torch.float32, torch.bfloat16, dtype if raw_beta else torch.float32},
        **{name: {torch.float32} for name in ("initial_state", "A_log", "dt_bias")},
    }
    for name, among in accepted.items():
        among |= {state_type(dtype)}
        if types[name] is not None and types[name] not in among:
            raise ValueError(
                f"{name} must be {' or '.join(sorted(map(str, among)))} beside {dtype} operands, got {types[name]}"
            )


def check_like(name: str, x: Tensor, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A gradient of something of `shape`, which may have a leading batch axis of 1, without it.

    Raises:
        TypeError: no tensor.
        ValueError: another shape, type or device.
    """
    check_tensor(name, x, device)
    check_type(name, x.dtype)
    if tuple(x.shape) not in (tuple(shape), (1, *shape)):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    return x.reshape(shape)
