"""What one run of the demo is asked to do, and on which devices its ranks can do it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deltaspan.demo.model import ModelShape

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class DemoSettings:
    """One run: ranks, layout, steps, and a size that two busy cores train in about a minute."""

    ranks: int = 4
    layout: str = "zigzag_per_document"
    steps: int = 20
    capacity: int = 4096
    learning_rate: float = 5e-3
    seed: int = 0
    shape: ModelShape = field(default_factory=ModelShape)

    def __post_init__(self) -> None:
        for name, least in (("ranks", 2), ("steps", 1)):  # one rank is what the others are compared with
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class Placement:
    """Where ranks run, and over what they talk; `note` says why when GPUs are fewer than ranks."""

    device: str
    backend: str
    gpus: int = 0
    note: str | None = None

    def device_of(self, rank: int) -> torch.device:
        return torch.device("cuda", rank % self.gpus) if self.device == "cuda" else torch.device("cpu")


def place(ranks: int, device: str | None = None) -> Placement:
    """GPUs where there are any, over NCCL if every rank has one of its own; else the CPU over gloo.

    Args:
        ranks: how many ranks the demo has.
        device: "cpu", "cuda", or None for the best there is.

    Raises:
        ValueError: an unknown device, or "cuda" on a machine without a GPU.
    """
    if device not in (None, *DEVICES):
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {device!r}")
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not gpus:
        raise ValueError("device must be 'cpu' on a machine without a usable GPU, got 'cuda'")
    if not gpus:
        return Placement("cpu", "gloo")
    if gpus >= ranks:
        return Placement("cuda", "nccl", gpus)
    note = f"NCCL needs a GPU for each of {ranks} ranks, and there are {gpus}: ranks share them, and talk over gloo"
    return Placement("cuda", "gloo", gpus, note)
