"""Which tier serves a call: by name, or by device; a refusal carries its reason."""

from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

TIERS = ("torch", "hopper")
HOMES = {"torch": "deltaspan.kernels.torch", "hopper": "deltaspan.kernels.hopper.tier"}


def is_supported(device: torch.device | str) -> bool:
    """Whether some tier of this release runs on `device`; never raises."""
    try:
        kind = torch.device(device).type
        return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
    except (RuntimeError, TypeError):
        return False


def chosen_backend(backend: str = "auto", *, device: torch.device | str = "cpu", **call: Any) -> str:
    """The tier that serves `backend` on `device`.

    call: of a call, what tiers tell apart: dtype, K, V, unit_keys, save_mode, and `backward`, whether it wants one.

    Raises:
        ValueError: an unknown name, or a tier that does not serve the call, with the reason.
    """
    if backend not in ("auto", *TIERS):
        raise ValueError(f"backend must be one of {['auto', *TIERS]}, got {backend!r}")
    return _chosen(backend, device, **call)


@lru_cache
def _chosen(backend: str, device: torch.device | str, **call: Any) -> str:
    if not is_supported(device):
        raise ValueError(f"backend {backend!r} runs on cpu and cuda devices, got {device}")
    if backend == "hopper" and (reason := _beyond_hopper(torch.device(device), **call)):
        raise ValueError(f"backend 'hopper' {reason}; backend='torch' does")
    return "torch" if backend == "auto" else backend


@lru_cache
def tier(name: str) -> ModuleType:
    """The stages of a tier by its name."""
    return import_module(HOMES[name])


def _beyond_hopper(
    device: torch.device, *, dtype: torch.dtype = torch.bfloat16, K: int = 128, V: int = 128, unit_keys: bool = True,
    save_mode: str = "light", backward: bool = False,
) -> str | None:  # fmt: skip
    """Why the Hopper tier does not serve a call, None if it does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return f"runs on CUDA devices of compute capability 9.0, not on {device}"
    if dtype != torch.bfloat16 or (K, V) != (128, 128):
        return f"serves bf16 operands with K = V = 128, not {dtype} with K={K} and V={V}"
    if not unit_keys:
        return "serves unit_keys=True alone"
    if backward:
        return "has no backward yet: it serves deltaspan.forward and calls under torch.no_grad()"
    if save_mode != "light":
        return f"does not serve save_mode={save_mode!r} yet"
    try:
        import_module(HOMES["hopper"])
    except ImportError as error:
        return f"needs Triton 3.6 or newer (pip install 'deltaspan[kernels]'): {error}"
    return None
