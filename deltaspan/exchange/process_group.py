"""One rank of a real process group, over gloo or NCCL."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deltaspan.exchange.collectives import AllGather, AllToAll, Collective, Program


class ProcessGroup:
    """Runs this process's program on a torch.distributed group, one collective after another.

    A group that has only gloo between GPUs is served through host memory: slow, but right wherever ranks share a GPU.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.ranks = (dist.get_rank(group),)
        self._through_host = "cuda:gloo" in dist.get_backend_config(group)

    def default_device(self) -> torch.device:
        """Where its ranks' operands are expected: the current CUDA device, the CPU if there is none or gloo alone."""
        return torch.device("cuda" if torch.cuda.is_available() and not self._through_host else "cpu")

    def run(self, programs: Sequence[Program]) -> list[Any]:
        """Runs the one program to its end; errors of a collective name it."""
        (program,) = programs
        arrived = None
        while True:
            try:
                asked = program.send(arrived)
            except StopIteration as end:
                return [end.value]
            try:
                arrived = self._carry_out(asked)
            except RuntimeError as error:
                raise RuntimeError(f"rank {self.ranks[0]}: collective {asked.name!r} failed: {error}") from error

    def _carry_out(self, asked: Collective) -> Tensor:
        # Rows travel as bytes: every backend moves those, whatever element types it knows.
        row = asked.send.shape[1:]
        size = row.numel() * asked.send.element_size()
        send = asked.send.contiguous().view(-1).view(torch.uint8)
        send = send.cpu() if self._through_host else send
        exchange = self._all_to_all if isinstance(asked, AllToAll) else self._all_gather
        received = exchange(asked, send, size).to(asked.send.device).view(asked.send.dtype)
        return received.view(asked.arriving, *row)

    def _all_to_all(self, asked: AllToAll, send: Tensor, size: int) -> Tensor:
        received = send.new_empty(asked.arriving * size)
        splits = [[count * size for count in counts] for counts in (asked.recv_counts, asked.send_counts)]
        dist.all_to_all_single(received, send, *splits, group=self.group)
        return received

    def _all_gather(self, asked: AllGather, send: Tensor, size: int) -> Tensor:
        padded = send.new_zeros(max(asked.counts) * size)
        padded[: len(send)] = send
        rows = [torch.empty_like(padded) for _ in asked.counts]
        dist.all_gather(rows, padded, group=self.group)
        return torch.cat([row[: count * size] for row, count in zip(rows, asked.counts, strict=True)])
