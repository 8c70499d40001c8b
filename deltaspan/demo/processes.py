"""Real ranks on one machine: one process each, a failure that ends them all, and none left behind."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deltaspan.demo.corpus import TextPack
from deltaspan.demo.settings import DemoSettings, Placement
from deltaspan.demo.training import RankOutcome, train

COLLECTIVE_TIMEOUT_S = 120
SILENCE_LIMIT_S = 180
EXIT_LIMIT_S = 5
LOOPBACK = "lo"


class RankFailed(RuntimeError):
    """A rank ended before its training did; the message holds its traceback."""


def train_on_ranks(
    settings: DemoSettings,
    ranks: int,
    packs: list[TextPack],
    placement: Placement,
    on_step: Callable[[int, float], None],
) -> list[RankOutcome]:
    """Trains on `ranks` processes of this machine, and waits for them.

    Args:
        settings: the run's.
        ranks: how many processes; one needs no group.
        packs: one whole pack a step.
        placement: devices and backend.
        on_step: called here after every step with its number and the group's loss.

    Returns:
        every rank's outcome, by rank.

    Raises:
        RankFailed: a rank raised, was killed, or all were silent for three minutes. All ranks have ended by then.
    """
    spawn = multiprocessing.get_context("spawn")
    outbox = spawn.Queue()
    with tempfile.TemporaryDirectory(prefix="deltaspan-") as folder:
        common = (settings, ranks, packs, placement, str(Path(folder) / "rendezvous"), outbox)
        processes = [spawn.Process(target=_rank, args=(rank, *common), daemon=True) for rank in range(ranks)]
        try:
            for process in processes:
                process.start()
            return _collect(processes, outbox, on_step)
        finally:
            _end(processes)


def _collect(
    processes: list[multiprocessing.Process], outbox: multiprocessing.Queue, on_step: Callable[[int, float], None]
) -> list[RankOutcome]:
    outcomes: dict[int, RankOutcome] = {}
    heard = time.monotonic()
    while len(outcomes) < len(processes):
        try:
            kind, rank, content = outbox.get(timeout=0.2)
        except queue.Empty:
            _check_alive(processes, outcomes, time.monotonic() - heard)
            continue
        heard = time.monotonic()
        if kind == "failed":
            raise RankFailed(f"rank {rank} failed:\n{content}")
        if kind == "step":
            on_step(*content)
        else:
            outcomes[rank] = content
    for process in processes:
        process.join(timeout=EXIT_LIMIT_S)
    return [outcomes[rank] for rank in range(len(processes))]


def _check_alive(processes: list[multiprocessing.Process], done: dict[int, RankOutcome], silence_s: float) -> None:
    for rank, process in enumerate(processes):
        if rank not in done and process.exitcode not in (None, 0):
            raise RankFailed(f"rank {rank} ended with exit code {process.exitcode} and said nothing")
    if silence_s > SILENCE_LIMIT_S:
        raise RankFailed(f"no rank said anything for {silence_s:.0f} s")


def _end(processes: list[multiprocessing.Process]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        if process.pid is not None:
            process.join(timeout=EXIT_LIMIT_S)
            if process.is_alive():
                process.kill()
                process.join()


def _rank(
    rank: int,
    settings: DemoSettings,
    ranks: int,
    packs: list[TextPack],
    placement: Placement,
    rendezvous: str,
    outbox: multiprocessing.Queue,
) -> None:
    """One rank's process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # More threads a rank than idle cores wait for each other, and take longer than one thread.
    torch.set_num_threads(1)

    def say(kind: str, content: Any) -> None:
        outbox.put((kind, rank, content))

    try:
        device = placement.device_of(rank)
        group = _join_group(rank, ranks, placement, rendezvous) if ranks > 1 else None
        report = (lambda step, loss: say("step", (step, loss))) if rank == 0 else (lambda step, loss: None)
        say("done", train(settings, packs, group, device, report))
    except BaseException:
        say("failed", traceback.format_exc())
        # Flushed before the others can notice that this rank is gone, so that the cause is read first.
        outbox.close()
        outbox.join_thread()
        os._exit(1)
    if ranks > 1:
        dist.destroy_process_group()


def _join_group(rank: int, ranks: int, placement: Placement, rendezvous: str) -> dist.ProcessGroup:
    if placement.device == "cuda":
        torch.cuda.set_device(placement.device_of(rank))
    elif os.path.exists(f"/sys/class/net/{LOOPBACK}"):
        # All ranks are on this machine: its own name need not resolve, nor a network be up.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    dist.init_process_group(
        placement.backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    return dist.group.WORLD


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)
