"""The one protocol behind which a group hides: it runs the programs of the ranks that live in this process."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from deltaspan.exchange.collectives import Program
from deltaspan.exchange.process_group import ProcessGroup
from deltaspan.exchange.simulated import SimulatedGroup


class Transport(Protocol):
    """A group of `world_size` ranks, of which `ranks` run here."""

    world_size: int
    ranks: tuple[int, ...]
    beside: bool  # whether work is divided so that some is done while states cross

    def default_device(self) -> torch.device:
        """Where the operands of its ranks are expected."""
        ...

    def begin(self) -> None:
        """Marks the begin of a call in which all ranks take part."""
        ...

    def announce(self, error: BaseException, device: torch.device) -> None:
        """Tells the other ranks, who would wait for the collectives of this one, that it raised."""
        ...

    def run(self, programs: Sequence[Program]) -> list[Any]:
        """Runs one program a rank of `ranks` to its end, carrying out the collectives that they yield."""
        ...


def transport(group: object) -> Transport:
    """The transport of a ProcessGroup, a 1-D DeviceMesh, a SimulatedGroup, or None for a rank of its own.

    Raises:
        TypeError: anything else.
        ValueError: a mesh of several dimensions, or a group that this process does not belong to.
    """
    if group is None:
        return SimulatedGroup(1)
    if isinstance(group, SimulatedGroup):
        return group
    if isinstance(group, dist.ProcessGroup):
        return ProcessGroup(group)
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a DeviceMesh of one dimension, got {group.ndim}: slice it, mesh['cp']")
        return ProcessGroup(group.get_group())
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group does not contain this process")
    raise TypeError(f"group must be a ProcessGroup, DeviceMesh, SimulatedGroup or None, got {type(group).__name__}")
