"""How this process joins the others: by what torchrun or Slurm told it, with a GPU of its own where there are any."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # or a checkpoint imports it later, and defaults of its functions hold the group for ever
from torch import Tensor

from deltaspan.verify.processes import stay_on_this_machine

# What `srun` tells every task, by torch's names for it.
SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
PORT = "29500"
TIMEOUT_S = 180  # of a collective: as long as rank 0 may judge while the others wait


@dataclass(frozen=True)
class Member:
    """This process in the group of all."""

    rank: int
    world_size: int
    device: torch.device
    backend: str  # "nccl" or "gloo"
    flag: Tensor = field(repr=False)

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, by rank, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def meet(self) -> None:
        """Lets no rank's device go on before all have come here; on GPUs hosts go on."""
        dist.all_reduce(self.flag)

    def settle(self) -> None:
        """Until all ranks' hosts and devices have come here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.gather(None)


@contextmanager
def joined(device: str | None = None) -> Iterator[Member]:
    """The group of all processes that were started together.

    Args:
        device: "cpu" or "cuda"; None for a GPU if there is one.

    Raises:
        ValueError: nobody started this process as one of a group, an unknown device, or two ranks on one GPU.
    """
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu on a machine without a CUDA device, got 'cuda'")
    _read_slurm()
    if "RANK" not in os.environ:
        raise ValueError(
            "start this with torchrun or srun, for example: torchrun --nproc-per-node 2 -m deltaspan.bench.group"
        )
    on_gpu = torch.cuda.is_available() if device is None else device == "cuda"
    where, backend = torch.device("cpu"), "gloo"
    if on_gpu:
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(where)
        backend = "cpu:gloo,cuda:nccl"
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        stay_on_this_machine()
    torch.set_num_threads(1)  # as the other ranks have it, or products on CPUs differ in their bits
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        member = Member(rank, size, where, "nccl" if on_gpu else "gloo", torch.zeros(1, device=where))
        _check_devices(member)
        yield member
    finally:
        dist.destroy_process_group()


def _read_slurm() -> None:
    """Fills in what torch wants to know, where `srun` started this process."""
    if "RANK" in os.environ or not all(name in os.environ for name in SLURM.values()):
        return
    if "MASTER_ADDR" not in os.environ and os.environ.get("SLURM_NNODES", "1") != "1":
        raise ValueError("MASTER_ADDR must name the first host of the job, and is not set: docs/cluster.md says how")
    os.environ.update({name: os.environ[told] for name, told in SLURM.items()})
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", PORT)
    if os.environ.get("SLURM_NNODES", "1") == "1":
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]


def _check_devices(member: Member) -> None:
    """On every rank alike."""
    if member.backend == "gloo":
        return
    own = socket.gethostname(), str(torch.cuda.get_device_properties(member.device).uuid)
    everyone = member.gather(own)
    if len(set(everyone)) < member.world_size:
        shared = [rank for rank, device in enumerate(everyone) if everyone.count(device) > 1]
        raise ValueError(f"NCCL needs a GPU for every rank, and ranks {shared} share one: start as many as there are")
