"""Which tier serves a call: by name, or by device; a refusal carries its reason."""

from types import ModuleType

import torch

TIERS = ("torch",)


def is_supported(device: torch.device | str) -> bool:
    """Whether some tier of this release runs on `device`; never raises."""
    try:
        kind = torch.device(device).type
        return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())
    except (RuntimeError, TypeError):
        return False


def chosen_backend(backend: str = "auto", *, device: torch.device | str = "cpu") -> str:
    """The tier that serves `backend` on `device`.

    Raises:
        ValueError: an unknown name, or a tier that this release does not have.
    """
    if backend not in ("auto", *TIERS):
        raise ValueError(f"backend must be one of {['auto', *TIERS]}, got {backend!r}")
    if not is_supported(device):
        raise ValueError(f"backend {backend!r} runs on cpu and cuda devices, got {device}")
    return "torch"


def tier(name: str) -> ModuleType:
    """The stages of a tier by its name."""
    from deltaspan.kernels import torch as torch_tier

    return {"torch": torch_tier}[name]
