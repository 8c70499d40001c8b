"""Which tier serves a call: by name, or by device; a refusal carries its reason."""

from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

TIERS = ("torch", "hopper")
HOMES = {"torch": "deltaspan.kernels.torch", "hopper": "deltaspan.kernels.hopper.tier"}
MOST_HEADS = 8  # value heads to a key head on the Hopper tier, which prepares all of them in one warp
MOST_TAPS = 8  # of a convolution on the Hopper tier, which keeps a row and weights of each in registers


def is_supported(device: torch.device | str) -> bool:
    """Whether some tier of this release runs on `device`; never raises."""
    try:
        kind = torch.device(device).type
        return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
    except (RuntimeError, TypeError):
        return False


def chosen_backend(backend: str = "auto", *, device: torch.device | str = "cpu", **call: Any) -> str:
    """The tier that serves `backend` on `device`.

    call: of a call, what tiers tell apart: dtype, K, V, `group`, the value heads of a key head, scale, unit_keys and
        save_mode.

    Raises:
        ValueError: an unknown name, or a tier that does not serve the call, with the reason.
    """
    _check_name(backend)
    return _chosen(backend, device, **call)


@lru_cache
def _chosen(backend: str, device: torch.device | str, **call: Any) -> str:
    _check_device(backend, device)
    if backend == "hopper" and (reason := _beyond_hopper(torch.device(device), **call)):
        raise _refusal(reason)
    return "torch" if backend == "auto" else backend


def chosen_for_convolution(backend: str, *, device: torch.device | str, dtype: torch.dtype, taps: int) -> str:
    """The tier that serves `backend` for a convolution of rows of type `dtype`; "auto" is the torch tier until the
    kernel has been measured on a device. Device, type and taps alone decide, so that a checkpoint's recompute goes the
    way of the first run.

    Raises:
        ValueError: as `chosen_backend`.
    """
    _check_name(backend)
    return _chosen_for_convolution(backend, device, dtype, taps)


@lru_cache
def _chosen_for_convolution(backend: str, device: torch.device | str, dtype: torch.dtype, taps: int) -> str:
    _check_device(backend, device)
    if backend == "hopper" and (reason := _convolution_beyond_hopper(torch.device(device), dtype, taps)):
        raise _refusal(reason)
    return "torch" if backend == "auto" else backend


@lru_cache
def tier(name: str) -> ModuleType:
    """The stages of a tier by its name."""
    return import_module(HOMES[name])


def _beyond_hopper(
    device: torch.device, *, dtype: torch.dtype = torch.bfloat16, K: int = 128, V: int = 128, group: int = 1,
    scale: float | None = None, unit_keys: bool = True, save_mode: str = "light",
) -> str | None:  # fmt: skip
    """Why the Hopper tier does not serve a call, None if it does."""
    if reason := _not_on(device):
        return reason
    if dtype != torch.bfloat16 or (K, V) != (128, 128):
        return f"serves bf16 operands with K = V = 128, not {dtype} with K={K} and V={V}"
    if group > MOST_HEADS:
        return f"serves up to {MOST_HEADS} value heads to a key head, not {group}"
    if scale is not None and scale <= 0:
        return f"serves scales above zero, not {scale}"
    if not unit_keys:
        return "serves unit_keys=True alone"
    if save_mode != "light":
        return f"does not serve save_mode={save_mode!r} yet"
    return _without_triton()


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


def _check_device(backend: str, device: torch.device | str) -> None:
    if not is_supported(device):
        raise ValueError(f"backend {backend!r} runs on cpu and cuda devices, got {device}")


def _refusal(reason: str) -> ValueError:
    return ValueError(f"backend 'hopper' {reason}; backend='torch' does")


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
