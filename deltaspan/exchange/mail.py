"""Collectives over gloo as mail between pairs of ranks, each letter behind an envelope that says what it belongs to.

Gloo's own collectives end in a failure that names no rank, or wait for one that never comes. Here every rank hears from
each peer by itself: of a peer that died, is silent, raised, or asks for another collective, it can say which one.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from deltaspan.exchange.collectives import AllGather, Collective, describe

ENVELOPE_BYTES = 1024
ENVELOPE_TAG = (
    20_000  # apart from tag 0 of whatever else the group is used for; letters have tags of their own above it
)
CALLS, COLLECTIVES = 1 << 18, 1 << 12  # after which letters' tags come again
GRACE_S = 0.1  # for what is under way already when a failure is known


Works: TypeAlias = list[tuple[int, dist.Work | str]]  # by peer, what was posted, or why it could not be


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


_books: WeakKeyDictionary[dist.ProcessGroup, _Book] = WeakKeyDictionary()


def held_loosely(group: dist.ProcessGroup) -> Callable[[], dist.ProcessGroup]:
    """The group as long as torch has it. Who held one that was destroyed to the end of the process, as a context in a
    script does, would have gloo's threads abort there."""
    reference = ref(group)

    def held() -> dist.ProcessGroup:
        group = reference()
        if group is None:
            raise RuntimeError("the process group of this context was destroyed")
        return group

    return held


class Mail:
    """One rank's letters to and from the others of its group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = held_loosely(group)
        self.rank = dist.get_rank(group)
        self.peers = [peer for peer in range(dist.get_world_size(group)) if peer != self.rank]
        self.book = _books.setdefault(group, _Book())

    def begin(self) -> None:
        """Begins a call in which all ranks take part: what an earlier one left as it failed is not its own."""
        self.book.call += 1
        self.book.collective = 0

    def exchange(self, asked: Collective, send: Tensor, size: int) -> Tensor:
        """Carries out a collective on bytes send [rows * size]; returns those that arrive.

        Raises:
            PeerFailed: a peer that did not come within the group's timeout, failed, or asks for something else.
        """
        self.group()  # of one that was destroyed no peer is the culprit
        if isinstance(asked, AllGather):
            outgoing, expected = [send] * len(asked.counts), [count * size for count in asked.counts]
        else:
            outgoing = list(send.split([count * size for count in asked.send_counts]))
            expected = [count * size for count in asked.recv_counts]
        incoming = [send.new_empty(n) for n in expected]
        incoming[self.rank].copy_(outgoing[self.rank])
        self.book.collective += 1
        under_way, faults = self._envelopes(describe(asked), outgoing, incoming)

        # Letters go out even then: a peer that has heard of no failure waits for this one, and hears of it next.
        tag = ENVELOPE_TAG + 1 + self.book.call % CALLS * COLLECTIVES + self.book.collective % COLLECTIVES
        to = [peer for peer in self.peers if len(outgoing[peer]) and peer not in faults]
        letters = [(peer, self._post(dist.isend, outgoing[peer], tag, peer)) for peer in to]
        if not faults:
            came_from = [peer for peer in self.peers if len(incoming[peer])]
            answers = [(peer, self._post(dist.irecv, incoming[peer], tag, peer)) for peer in came_from]
            faults = self._finish(answers) or self._finish(under_way + letters)
        if faults:
            self.book.left.append((under_way, letters))
            # A rank that said why it failed is the cause; others may have ended because of it.
            culprit = min(faults, key=lambda rank: ("failed:" not in faults[rank], rank))
            message = f"rank {self.rank}: collective {asked.name!r}: " + "; ".join(faults.values())
            raise PeerFailed(message, culprit)
        return torch.cat(incoming)

    def announce(self, error: BaseException) -> None:
        """Lets every peer that waits for this rank, now or later, know that it failed, and why."""
        told = isinstance(error, PeerFailed)
        culprit, why = (error.culprit, str(error)) if told else (self.rank, f"{type(error).__name__}: {error}")
        why = "".join(c if " " <= c <= "~" else "?" for c in why)[:400]
        envelope = _seal({"number": self.book.call, "failed": culprit, "why": why})
        self.book.left += [self._post(dist.isend, envelope, ENVELOPE_TAG, peer) for peer in self.peers]
        time.sleep(GRACE_S)  # this process may be about to end, and its mail with it

    def _envelopes(self, call: str, outgoing: list[Tensor], incoming: list[Tensor]) -> tuple[Works, dict[int, str]]:
        """Passes envelopes between all ranks, also where no letter follows, so that each hears of every failure.

        Returns what was posted, and what went wrong by rank.
        """
        head = {"number": self.book.call, "call": call}
        posted: Works = []
        for peer in self.peers:
            envelope = _seal(head | {"bytes": len(outgoing[peer])})
            posted.append((peer, self._post(dist.isend, envelope, ENVELOPE_TAG, peer)))
        blank = {peer: torch.zeros(ENVELOPE_BYTES, dtype=torch.uint8) for peer in self.peers}
        awaited = [(peer, self._post(dist.irecv, blank[peer], ENVELOPE_TAG, peer)) for peer in self.peers]
        faults: dict[int, str] = {}
        for peer, work in awaited:
            expected = head | {"bytes": len(incoming[peer])}
            faults |= self._read(peer, blank[peer], work, expected, hurry=bool(faults))
        return (posted + awaited if faults else posted), faults

    def _read(self, peer: int, envelope: Tensor, work: dist.Work | str, expected: dict, hurry: bool) -> dict[int, str]:
        """What an envelope tells of failures, by rank. In a hurry one that is not there yet tells nothing."""
        earlier = ""
        while True:
            if hurry and not _arrives(envelope):
                return {}
            fault = self._wait(work)
            if fault:
                return {peer: _gone(peer, fault) + earlier}
            found = json.loads(bytes(envelope.tolist()))
            if found["number"] >= expected["number"]:
                break
            earlier = f", after it failed in an earlier call: {found['why']}" if "failed" in found else ""
            work = self._post(dist.irecv, envelope.zero_(), ENVELOPE_TAG, peer)
            self.book.left.append((envelope, work))  # if it is not waited for
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
            return operation(x, None, self.group(), tag, peer)
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

    def _finish(self, works: Works) -> dict[int, str]:
        """Waits for works; returns the first failure, by rank."""
        for peer, work in works:
            fault = self._wait(work)
            if fault:
                return {peer: _gone(peer, fault)}
        return {}


def _arrives(envelope: Tensor) -> bool:
    """Whether an envelope comes within the grace. It is looked at, for a wait with a limit would close the connection.

    Its last byte is the last to be written, and never zero.
    """
    end = time.monotonic() + GRACE_S
    while not envelope[-1] and time.monotonic() < end:
        time.sleep(GRACE_S / 20)
    return bool(envelope[-1])


def _gone(peer: int, fault: str) -> str:
    return f"rank {peer} ended or did not come in time ({fault.partition('. This is typically')[0]})"


def _seal(content: dict) -> Tensor:
    text = json.dumps(content).encode().ljust(ENVELOPE_BYTES)
    assert len(text) == ENVELOPE_BYTES, content
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
