"""Real ranks on this machine: processes that work through a list over gloo; a failure ends all, none is left behind."""

import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Item = TypeVar("Item")

STARTS = 3  # of a group; a machine on which nothing works is not to cost a start for every item
START_LIMIT_S = 120.0
EXIT_LIMIT_S = 5.0
LAST_WORDS_S = 1.0  # that a group has, once one rank failed, for the others to say how
LOOPBACK = "lo"


class RanksFailed(RuntimeError):
    """An item that a group of processes did not finish; the message says which rank failed, and how."""


def run_on_ranks(
    work: Callable[[Item, dist.ProcessGroup], Any],
    items: Sequence[Item],
    world_size: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    patience_s: float = 60.0,
) -> list[list[Any] | RanksFailed]:
    """Calls `work(item, group)` on every rank of a gloo group of new processes, item after item.

    Args:
        work: a function that the processes can import; what it returns has to pass `torch.save` and a weights-only
            `torch.load`.
        items: picklable.
        world_size: of the group.
        progress: called after every item with how many are done, and how many there are.
        patience_s: how long the ranks may take for an item.

    Returns:
        for every item what each rank returned, by rank; or, where a rank raised, ended or hung, why. The processes are
        then ended and new ones go on with the next item; after three groups the rest is given up.
    """
    outcomes: list[list[Any] | RanksFailed] = []
    for _ in range(STARTS):
        if len(outcomes) == len(items):
            break
        with _group(work, items, len(outcomes), world_size, patience_s) as group:
            while len(outcomes) < len(items):
                outcome = group.result(len(outcomes))
                outcomes.append(outcome)
                progress(len(outcomes), len(items))
                if isinstance(outcome, RanksFailed):
                    break
    given_up = RanksFailed(f"not run: {STARTS} groups of {world_size} processes failed before")
    return outcomes + [given_up] * (len(items) - len(outcomes))


@dataclass
class _Group:
    processes: list[BaseProcess]
    links: list[Connection]  # from each rank: None for an item that is done, or what went wrong
    folder: Path  # of results
    first: int  # item
    patience_s: float
    reached: list[int]  # by rank, the item that it works on; some may be ahead of others
    trouble: dict[int, str] = field(default_factory=dict)  # by rank, in the order in which it was heard

    def result(self, item: int) -> list[Any] | RanksFailed:
        """Waits until every rank has done the item, or failed."""
        limit_s = START_LIMIT_S if item == self.first else self.patience_s
        until = time.monotonic() + limit_s
        while busy := [rank for rank in self._behind(item) if rank not in self.trouble]:
            ready = wait([self.links[rank] for rank in busy], timeout=max(0.0, until - time.monotonic()))
            if not ready:
                self.trouble.setdefault(busy[0], f"no word from ranks {busy} within {limit_s:.0f} s")
                break
            for rank in busy:
                if self.links[rank] in ready and self._listen(rank) is not None:
                    until = min(until, time.monotonic() + LAST_WORDS_S)
        behind = self._behind(item)
        if behind:
            return RanksFailed("; ".join(said for rank, said in self.trouble.items() if rank in behind))
        ranks = range(len(self.processes))
        return [torch.load(self.folder / f"{item}-{rank}.pt", weights_only=True) for rank in ranks]

    def _behind(self, item: int) -> list[int]:
        return [rank for rank, reached in enumerate(self.reached) if reached <= item]

    def _listen(self, rank: int) -> str | None:
        """Takes one word of a rank, and returns its trouble, if that is what it was."""
        try:
            trouble = self.links[rank].recv()
        except EOFError:
            self.processes[rank].join(timeout=EXIT_LIMIT_S)
            trouble = f"ended with exit code {self.processes[rank].exitcode} and said nothing"
        if trouble is None:
            self.reached[rank] += 1
        else:
            self.trouble[rank] = f"rank {rank}: {trouble}"
        return trouble


@contextmanager
def _group(
    work: Callable[[Item, dist.ProcessGroup], Any],
    items: Sequence[Item],
    first: int,
    world_size: int,
    patience_s: float,
) -> Iterator[_Group]:
    """Processes that work from item `first` on; none is left behind."""
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    links: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="deltaspan-") as name:
        folder = Path(name)
        group = _Group(processes, links, folder, first, patience_s, [first] * world_size)
        try:
            for rank in range(world_size):
                link, theirs = spawn.Pipe(duplex=False)
                process = spawn.Process(
                    target=_rank, args=(rank, world_size, work, items, first, folder, theirs), daemon=True
                )
                process.start()
                theirs.close()  # so that the link ends when the process does
                processes.append(process)
                links.append(link)
            yield group
            if not group.trouble:
                _join(processes)
        finally:
            for stop in (BaseProcess.terminate, BaseProcess.kill):
                for process in processes:
                    stop(process)  # nothing, if it has ended
                _join(processes)
            for link in links:
                link.close()


def _join(processes: list[BaseProcess]) -> None:
    until = time.monotonic() + EXIT_LIMIT_S
    for process in processes:
        process.join(timeout=max(0.0, until - time.monotonic()))


def _rank(
    rank: int,
    world_size: int,
    work: Callable[[Item, dist.ProcessGroup], Any],
    items: Sequence[Item],
    first: int,
    folder: Path,
    link: Connection,
) -> None:
    """One rank's process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # what gloo says goes to stderr, for it is no part of anyone's output
    torch.set_num_threads(1)
    try:
        _join_group(rank, world_size, folder / "rendezvous")
        for item in range(first, len(items)):
            torch.save(work(items[item], dist.group.WORLD), folder / f"{item}-{rank}.pt")
            link.send(None)
    except BaseException as error:
        link.send("".join(traceback.format_exception_only(error)).strip())
        os._exit(1)  # at once: the group is out of step, and to leave it properly may hang
    dist.destroy_process_group()


def stay_on_this_machine() -> None:
    """Where all ranks are on this machine its own name need not resolve, nor a network be up."""
    if os.path.exists(f"/sys/class/net/{LOOPBACK}"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


def _join_group(rank: int, world_size: int, rendezvous: Path) -> None:
    stay_on_this_machine()
    dist.init_process_group(
        "gloo",
        init_method=rendezvous.as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=START_LIMIT_S),
    )


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
