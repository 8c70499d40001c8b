"""What a record holds for: the machine, the versions and the commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import typer

import deltaspan as ds
from deltaspan.bench.peers import Peer
from deltaspan.op.context import multiprocessors


def machine(device: str) -> dict[str, Any]:
    """Names of the machine's parts; `driver` and `gpu` only with a CUDA device."""
    facts = {
        "platform": platform.platform(),
        "cpus": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "device": device,
        "sm_count": multiprocessors(torch.device(device)),
    }
    if device == "cuda":
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts |= {"gpu": torch.cuda.get_device_name(), "driver": driver and driver.splitlines()[0]}
    return facts


def end_without_hopper() -> None:
    """Ends a command that times the Hopper tier's kernels with a line and exit 2 where they cannot run."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        typer.echo("error: these kernels need a CUDA device of compute capability 9.0", err=True)
        raise typer.Exit(2)


def versions(peers: Sequence[type[Peer]]) -> dict[str, str | None]:
    """Of what the times depend on; None for what is not installed."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton,
        "deltaspan": ds.__version__,
        **{peer.name: peer.version() for peer in peers},
    }


def commit() -> str | None:
    """The checkout's commit, with -dirty where files differ from it; None outside of a checkout."""
    return _output(
        "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    )


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
