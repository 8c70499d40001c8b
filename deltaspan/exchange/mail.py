"""Collectives over gloo as mail between pairs of ranks, each letter behind an envelope that says what it belongs to.

Gloo's own collectives end in a failure that names no rank, or wait for one that never comes. Here every rank hears from
each peer by itself: of a peer that died, is silent, raised, or asks for another collective, it can say which one.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deltaspan.exchange.collectives import AllGather, Collective, PeerToPeer, describe

ENVELOPE_BYTES = 1024
ENVELOPE_TAG = (
    20_000  # apart from tag 0 of whatever else the group is used for; letters have tags of their own above it
)
CALLS, COLLECTIVES = 1 << 18, 1 << 12  # after which letters' tags come again
GRACE_S = 0.3  # for what is under way already when a failure is known


class PeerFailed(RuntimeError):
    """A collective ended because of another rank, `culprit`."""

    def __init__(self, message: str, culprit: int) -> None:
        super().__init__(message)
        self.culprit = culprit


@dataclass
class _Book:
    """Where a group is: contexts come and go, the mail of their group goes on."""

    call: int = 0  # of those in which all ranks take part
    collective: int = 0  # within the call
    left: list[Any] = field(
        default_factory=list
    )  # what was under way when a call failed; memory that gloo may still use


_books: dict[str, _Book] = {}  # by the group's name


class Mail:
    """One rank's letters to and from the others of its group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.peers = [peer for peer in range(dist.get_world_size(group)) if peer != self.rank]
        self.book = _books.setdefault(group.group_name, _Book())

    def begin(self) -> None:
        """Begins a call in which all ranks take part: what an earlier one left as it failed is not its own."""
        self.book.call += 1
        self.book.collective = 0

    def exchange(self, asked: Collective, send: Tensor, size: int) -> Tensor:
        """Carries out a collective on bytes send [rows * size]; returns those that arrive.

        Raises:
            PeerFailed: a peer that did not come within the group's timeout, failed, or asks for something else.
        """
        if isinstance(asked, AllGather):
            outgoing, expected = [send] * len(asked.counts), [count * size for count in asked.counts]
        else:
            outgoing = list(send.split([count * size for count in asked.send_counts]))
            expected = [count * size for count in asked.recv_counts]
        incoming = [send.new_empty(n) for n in expected]
        incoming[self.rank].copy_(outgoing[self.rank])
        few = isinstance(asked, PeerToPeer)
        receivers = [peer for peer in self.peers if not few or len(outgoing[peer])]
        senders = [peer for peer in self.peers if not few or len(incoming[peer])]
        self.book.collective += 1

        head = {"number": self.book.call, "call": describe(asked)}
        written = {
            p: self._post(dist.isend, _seal(head | {"bytes": len(outgoing[p])}), ENVELOPE_TAG, p) for p in receivers
        }
        blank = {p: torch.empty(ENVELOPE_BYTES, dtype=torch.uint8) for p in senders}
        awaited = {p: self._post(dist.irecv, blank[p], ENVELOPE_TAG, p) for p in senders}
        faults: dict[int, str] = {}
        for peer in senders:
            faults |= self._read(peer, blank[peer], awaited[peer], head | {"bytes": len(incoming[peer])}, bool(faults))

        # The letters go out even then: a peer that has heard of no failure waits for this one, and hears of it next.
        tag = ENVELOPE_TAG + 1 + self.book.call % CALLS * COLLECTIVES + self.book.collective % COLLECTIVES
        letters = {
            p: self._post(dist.isend, outgoing[p], tag, p) for p in receivers if len(outgoing[p]) and p not in faults
        }
        if faults:
            self.book.left += [written, blank, awaited, letters]
            self._raise(asked.name, faults)
        answers = {p: self._post(dist.irecv, incoming[p], tag, p) for p in senders if len(incoming[p])}
        for works in (answers, written, letters):
            for peer, work in works.items():
                fault = self._wait(work)
                if fault:
                    self._raise(asked.name, {peer: f"rank {peer} ended or did not come in time ({fault})"})
        return torch.cat(incoming)

    def announce(self, error: BaseException) -> None:
        """Lets every peer that waits for this rank, now or later, know that it failed, and why."""
        told = isinstance(error, PeerFailed)
        culprit, why = (error.culprit, str(error)) if told else (self.rank, f"{type(error).__name__}: {error}")
        why = why.encode("ascii", "replace").decode()[:400]
        envelope = _seal({"number": self.book.call, "failed": culprit, "why": why})
        works = [self._post(dist.isend, envelope, ENVELOPE_TAG, peer) for peer in self.peers]
        self.book.left.append(works)
        _within_grace(lambda: [self._wait(work) for work in works])  # this process may be about to end

    def _read(self, peer: int, envelope: Tensor, work: dist.Work | str, expected: dict, hurry: bool) -> dict[int, str]:
        """What an envelope tells of failures, by rank. In a hurry one that is not there yet tells nothing."""
        while True:
            fault = _within_grace(lambda w=work: self._wait(w)) if hurry else self._wait(work)
            if fault is _LATE:
                return {}
            if fault:
                return {peer: f"rank {peer} ended or did not come in time ({fault})"}
            found = json.loads(bytes(envelope.tolist()))
            if found["number"] >= expected["number"]:
                break
            work = self._post(dist.irecv, envelope, ENVELOPE_TAG, peer)
        if "failed" in found:
            return {found["failed"]: f"rank {found['failed']} failed: {found['why']}"}
        if found["number"] > expected["number"]:
            return {peer: f"rank {peer} has gone on to a later call"}
        if found["call"] != expected["call"]:
            return {peer: f"rank {peer} asks for {found['call']}, this rank for {expected['call']}"}
        if found["bytes"] != expected["bytes"]:
            return {peer: f"rank {peer} sends {found['bytes']} bytes, this rank's operands ask for {expected['bytes']}"}
        return {}

    def _post(self, operation: Callable, x: Tensor, tag: int, peer: int) -> dist.Work | str:
        try:
            return operation(x, None, self.group, tag, peer)
        except RuntimeError as error:
            return str(error).splitlines()[0]

    def _wait(self, work: dist.Work | str) -> str | None:
        """Waits as long as the group's timeout lets it; returns what went wrong."""
        if isinstance(work, str):
            return work
        try:
            work.wait()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None

    def _raise(self, name: str, faults: dict[int, str]) -> None:
        # A rank that said why it failed is the cause; others may have ended because of it.
        culprit = min(faults, key=lambda rank: ("failed:" not in faults[rank], rank))
        raise PeerFailed(f"rank {self.rank}: collective {name!r}: " + "; ".join(faults.values()), culprit)


_LATE = object()


def _within_grace(wait: Callable[[], Any]) -> Any:
    """What a wait returns, or _LATE: then it goes on by itself, for a wait with a limit would close the connection."""
    results: list[Any] = []
    thread = Thread(target=lambda: results.append(wait()), daemon=True)
    thread.start()
    thread.join(GRACE_S)
    return results[0] if results else _LATE


def _seal(content: dict) -> Tensor:
    text = json.dumps(content).encode().ljust(ENVELOPE_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
