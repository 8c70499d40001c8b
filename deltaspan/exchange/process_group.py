"""One rank of a real process group, over NCCL or gloo."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deltaspan.exchange.collectives import AllGather, Beside, Collective, Ongoing, PeerToPeer, Program, one_by_one
from deltaspan.exchange.mail import Mail, PeerFailed, held_loosely


class ProcessGroup:
    """Runs this process's program on a torch.distributed group, one collective after another.

    Tensors whose backend is gloo travel as mail from rank to rank, which names the rank that a failure came from; those
    of GPUs go through host memory then: slow, but right wherever ranks share a GPU. All others use NCCL's collectives,
    and what a program asks for beside its own work has a stream of its own.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = held_loosely(group)
        self.world_size = dist.get_world_size(group)
        self.ranks = (dist.get_rank(group),)
        self._backends = dist.get_backend_config(group)
        self._mail = Mail(group)
        self.beside = self.default_device().type == "cuda"

    def default_device(self) -> torch.device:
        """Where its ranks' operands are expected: the current CUDA device, the CPU if there is none or gloo alone."""
        on_gpu = torch.cuda.is_available() and "cuda:gloo" not in self._backends
        return torch.device("cuda" if on_gpu else "cpu")

    def run(self, programs: Sequence[Program]) -> list[Any]:
        """Runs the one program to its end.

        Raises:
            RuntimeError: a collective that failed, by name; over gloo also the rank that failed, raised, or asked for
                something else.
        """
        (program,) = programs
        return [self._to_its_end(program if self.beside else one_by_one(program))]

    def _to_its_end(self, program: Program) -> Any:
        arrived = begun = None
        try:
            while True:
                asked = program.send(arrived)
                match asked:
                    case Beside():
                        arrived = begun = self._start(asked)
                    case Ongoing():
                        arrived, begun = self._finish(asked), None
                    case _:
                        arrived = self._named(asked)
                del asked  # and what an exchange that has ended has read
        except StopIteration as end:
            return end.value
        except BaseException:
            if begun is not None:  # what it reads is let go of now, and may be on its way still
                self._finish(begun)
            raise

    def _start(self, asked: Beside) -> Ongoing:
        """The host goes through the whole program at once, for nothing in it waits for the device.

        What it reads is held until it has been waited for. What it allocates belongs to the stream beside, which serves
        one reading stream alone: its next user waits for what reads now.
        """
        program = asked.program(*asked.operands)
        device = next((x.device for x in asked.operands if isinstance(x, Tensor)), None)
        if not asked.worth or device is None or device.type != "cuda":
            return Ongoing(self._to_its_end(program))
        reader = torch.cuda.current_stream(device)
        stream = _stream_beside(device, reader.cuda_stream)
        stream.wait_stream(reader)
        try:
            with torch.cuda.stream(stream):
                result = self._to_its_end(program)
        except BaseException:
            reader.wait_stream(stream)
            raise
        return Ongoing(result, asked.operands, stream.record_event())

    def _finish(self, ongoing: Ongoing) -> Any:
        if ongoing.end is not None:
            torch.cuda.current_stream(ongoing.end.device).wait_event(ongoing.end)
        return ongoing.result

    def begin(self) -> None:
        """Marks the begin of a call in which all ranks take part."""
        self._mail.begin()

    def announce(self, error: BaseException, device: torch.device) -> None:
        """Tells the other ranks, who would wait for this one, that it raised. Only gloo's mail can."""
        if f"{device.type}:gloo" in self._backends:
            self._mail.announce(error)

    def _named(self, asked: Collective) -> Tensor:
        try:
            return self._carry_out(asked)
        except PeerFailed:
            raise
        except RuntimeError as error:
            raise RuntimeError(f"rank {self.ranks[0]}: collective {asked.name!r} failed: {error}") from error

    def _carry_out(self, asked: Collective) -> Tensor:
        # Rows travel as bytes: every backend moves those, whatever element types it knows.
        row = asked.send.shape[1:]
        size = row.numel() * asked.send.element_size()
        send = asked.send.contiguous().view(-1).view(torch.uint8)
        if f"{send.device.type}:gloo" in self._backends:
            received = self._by_mail(asked, send, size)
        elif isinstance(asked, AllGather):
            received = self._all_gather(asked, send, size)
        else:
            received = send.new_empty(asked.arriving * size)
            splits = [[count * size for count in counts] for counts in (asked.recv_counts, asked.send_counts)]
            if isinstance(asked, PeerToPeer):
                self._peer_to_peer(received, send, *splits)
            else:
                self._all_to_all(received, send, *splits)
        return received.view(asked.send.dtype).view(asked.arriving, *row)

    def _by_mail(self, asked: Collective, send: Tensor, size: int) -> Tensor:
        return self._mail.exchange(asked, send.cpu(), size).to(send.device)

    def _all_to_all(self, received: Tensor, send: Tensor, recv_bytes: list[int], send_bytes: list[int]) -> None:
        dist.all_to_all_single(received, send, recv_bytes, send_bytes, group=self.group())

    def _peer_to_peer(self, received: Tensor, send: Tensor, recv_bytes: list[int], send_bytes: list[int]) -> None:
        outgoing, incoming = send.split(send_bytes), received.split(recv_bytes)
        here = self.ranks[0]
        incoming[here].copy_(outgoing[here])
        operations = [
            dist.P2POp(operation, block, group=self.group(), group_peer=peer)
            for operation, blocks in ((dist.isend, outgoing), (dist.irecv, incoming))
            for peer, block in enumerate(blocks)
            if peer != here and block.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def _all_gather(self, asked: AllGather, send: Tensor, size: int) -> Tensor:
        padded = send.new_zeros(max(asked.counts) * size)
        padded[: len(send)] = send
        rows = [torch.empty_like(padded) for _ in asked.counts]
        self._to_all(rows, padded)
        return torch.cat([row[: count * size] for row, count in zip(rows, asked.counts, strict=True)])

    def _to_all(self, rows: list[Tensor], mine: Tensor) -> None:
        dist.all_gather(rows, mine, group=self.group())


@cache
def _stream_beside(device: torch.device, reader: int) -> torch.cuda.Stream:
    """One for all groups and contexts beside a stream, by its number, so that the memory of one serves the next. What
    is ready on it goes first."""
    return torch.cuda.Stream(device, priority=-1)
