"""What the tests of several rooms share: real gloo ranks that outlive a test, comparison by bits, and memory of NaN."""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SECONDS = 90  # that a job may take on a busy machine


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, NaN and the sign of zero included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


@contextmanager
def filled() -> Iterator[None]:
    """New memory is full of NaN: what was freed, which may be the right result, does not pass for what nobody wrote."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@cache
def gloo(world_size: int) -> "Ranks":
    """That many real ranks, started when first asked for and kept until the tests end."""
    return Ranks(world_size)


class Ranks:
    """Processes that form a gloo group and carry out jobs, all of them the same one at a time."""

    def __init__(self, world_size: int) -> None:
        start = multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            here, there = start.Pipe()
            place = (rank, world_size, Path(self.folder.name) / "store", there)
            self.processes.append(start.Process(target=_serve, args=place, daemon=True))
            self.pipes.append(here)
            self.processes[-1].start()

    def run(self, job: Callable, *args: Any) -> list[Any]:
        """What job(*args) returns on each rank. `job` is importable by its name, and knows its rank from torch."""
        try:
            for pipe in self.pipes:
                pipe.send_bytes(pickle.dumps((job, args)))
            done = []
            for rank, pipe in enumerate(self.pipes):
                assert pipe.poll(SECONDS), f"rank {rank} does not answer"
                done.append(pickle.loads(pipe.recv_bytes()))
        except BaseException:
            self.end()
            raise
        failures = [f"rank {rank}: {result}" for rank, (fine, result) in enumerate(done) if not fine]
        if failures:
            self.end()  # a rank may still sit in a collective that another one left
            raise AssertionError("\n".join(failures))
        return [result for _, result in done]

    def end(self) -> None:
        """Ends the processes; whoever asks for ranks next gets new ones."""
        gloo.cache_clear()
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank: int, world_size: int, store: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store.as_uri(), rank=rank, world_size=world_size, timeout=timedelta(seconds=SECONDS)
    )
    while True:
        job, args = pickle.loads(pipe.recv_bytes())
        try:
            answer = True, job(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
