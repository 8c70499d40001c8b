"""Which tier serves a call: by name, or by device; a refusal carries its reason."""

import warnings
from functools import cache, lru_cache
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import torch

TIERS = ("torch", "hopper")
HOMES = {"torch": "deltaspan.kernels.torch", "hopper": "deltaspan.kernels.hopper.tier"}
MOST_HEADS = 8  # value heads to a key head on the Hopper tier, which prepares all of them in one warp
LEAST_SCALE = 1e-12  # whose square is a normal number in fp32, times what it scales: dg has it twice on the way
MOST_TAPS = 8  # of a convolution on the Hopper tier, which keeps a row and weights of each in registers


def is_supported(device: torch.device | str) -> bool:
    """Whether some tier of this release runs on `device`; never raises."""
    try:
        check_device(device)
    except (TypeError, ValueError):
        return False
    return True


def chosen_backend(backend: str = "auto", *, device: torch.device | str = "cpu", **call: Any) -> str:
    """The tier that serves `backend` on `device`. "auto" is the Hopper tier where that serves the call, else the torch
    tier, of which a warning tells once where the device has a Hopper tier.

    call: of a call, what tiers tell apart: dtype, K, V, `group`, the value heads of a key head, scale and unit_keys.

    Raises:
        TypeError: a keyword that no call has, or a device that is none.
        ValueError: an unknown name, a device without a tier, or a tier that does not serve the call, with the reason.
    """
    _check_name(backend)
    if unknown := call.keys() - KEYWORDS:
        raise TypeError(f"a call has no {min(unknown)!r}; it may have {', '.join(sorted(KEYWORDS))}")
    return _chosen(backend, _as_device(device), **call)


def stages(backend: str, device: torch.device, **call: Any) -> ModuleType:
    """Those of the tier that serves a call, each of whose keywords is one of `chosen_backend`. Raises ValueError as it
    does."""
    _check_name(backend)
    return tier(_chosen(backend, device, **call))


@lru_cache
def _chosen(backend: str, device: torch.device, **call: Any) -> str:
    check_device(device)
    return backend if backend == "torch" else _hopper_or_torch(backend, device, _beyond_hopper(device, **call))


def chosen_for_convolution(backend: str, *, device: torch.device | str, dtype: torch.dtype, taps: int) -> str:
    """The tier that serves `backend` for a convolution of rows of type `dtype`. Device, type and taps alone decide, so
    that a checkpoint's recompute goes the way of the first run.

    Raises:
        TypeError, ValueError: as `chosen_backend`.
    """
    _check_name(backend)
    return _chosen_for_convolution(backend, _as_device(device), dtype, taps)


@lru_cache
def _chosen_for_convolution(backend: str, device: torch.device, dtype: torch.dtype, taps: int) -> str:
    check_device(device)
    if backend == "torch":
        return backend
    return _hopper_or_torch(backend, device, _convolution_beyond_hopper(device, dtype, taps))


def _hopper_or_torch(backend: str, device: torch.device, reason: str | None) -> str:
    """reason: why the Hopper tier does not serve, if so."""
    if reason is None:
        return "hopper"
    if backend == "hopper":
        raise ValueError(f"backend 'hopper' {reason}; backend='torch' does")
    if _not_on(device) is None:
        _tell_once(reason)
    return "torch"


@cache
def _tell_once(reason: str) -> None:
    warnings.warn(f"backend 'auto' takes the slow torch tier: 'hopper' {reason}", stacklevel=5)


def check_device(device: torch.device | str) -> torch.device:
    """The device, if some tier of this release runs on it.

    Raises:
        TypeError: what is no device.
        ValueError: one that is unknown, has no tier, or is not there.
    """
    found = _as_device(device)
    if found.type not in ("cpu", "cuda"):
        raise _without_tier(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        why = "finds no CUDA device" if torch.backends.cuda.is_built() else "is built without CUDA"
        raise ValueError(f"device must be cpu where torch {why}, got '{device}'")
    return found


@lru_cache
def has_hopper(device: torch.device) -> bool:
    """Whether the Hopper tier runs on `device`, whatever of a call it may not serve."""
    return _not_on(device) is None and _without_triton() is None


def _as_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except TypeError:
        raise TypeError(f"device must be a torch.device or the name of one, got {device!r}") from None
    except RuntimeError:
        raise _without_tier(device) from None


def _without_tier(device: torch.device | str) -> ValueError:
    return ValueError(f"device must be one that a tier runs on, cpu or cuda, got '{device}'")


@lru_cache
def tier(name: str) -> ModuleType:
    """The stages of a tier by its name."""
    return import_module(HOMES[name])


def _beyond_hopper(
    device: torch.device, *, dtype: torch.dtype = torch.bfloat16, K: int = 128, V: int = 128, group: int = 1,
    scale: float | None = None, unit_keys: bool = True,
) -> str | None:  # fmt: skip
    """Why the Hopper tier does not serve a call, None if it does."""
    if reason := _not_on(device):
        return reason
    if dtype != torch.bfloat16 or (K, V) != (128, 128):
        return f"serves bf16 operands with K = V = 128, not {dtype} with K={K} and V={V}"
    if group > MOST_HEADS:
        return f"serves up to {MOST_HEADS} value heads to a key head, not {group}"
    if scale is not None and scale < LEAST_SCALE:
        return f"serves scales from {LEAST_SCALE:g} on, not {scale}"
    if not unit_keys:
        return "serves unit_keys=True alone"
    return _without_triton()


KEYWORDS = signature(_beyond_hopper).parameters.keys() - {"device"}  # of a call


def _convolution_beyond_hopper(device: torch.device, dtype: torch.dtype, taps: int) -> str | None:
    """Why the Hopper tier does not serve a convolution, None if it does."""
    if reason := _not_on(device):
        return reason
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"serves bf16, fp16 and fp32 rows, not {dtype}"
    if taps > MOST_TAPS:
        return f"serves up to {MOST_TAPS} taps, not {taps}"
    return _without_triton()


def _check_name(backend: str) -> None:
    if backend not in ("auto", *TIERS):
        raise ValueError(f"backend must be one of {['auto', *TIERS]}, got {backend!r}")


def _not_on(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"runs on CUDA devices of compute capability 9.0, not on {device}"
    return None


def _without_triton() -> str | None:
    try:
        import_module(HOMES["hopper"])
    except ImportError as error:
        return f"needs Triton 3.6 or newer (pip install 'deltaspan[kernels]'): {error}"
    return None
