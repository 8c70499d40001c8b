"""Collectives over gloo as mail between pairs of ranks, each letter behind an envelope that says what it belongs to.

Gloo's own collectives end in a failure that names no rank, or wait for one that never comes. Here every rank hears from
each peer by itself: of a peer that died, is silent, raised, or asks for another collective, it can say which one.
"""

import json
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

from deltaspan.exchange.collectives import AllGather, Collective, PeerToPeer, describe

ENVELOPE_BYTES = 1024
ENVELOPE_TAG, LETTER_TAG = 20_001, 20_002  # apart from tag 0 of whatever else the group is used for
GRACE = timedelta(seconds=1)  # for what is under way already when a failure is known

_turns: Counter[str] = Counter()  # by group name: contexts come and go, the mail of their group goes on


class PeerFailed(RuntimeError):
    """A collective ended because of another rank, `culprit`."""

    def __init__(self, message: str, culprit: int) -> None:
        super().__init__(message)
        self.culprit = culprit


class Mail:
    """One rank's letters to and from the others of its group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.peers = [peer for peer in range(dist.get_world_size(group)) if peer != self.rank]

    @property
    def turn(self) -> int:
        """How many calls in which all ranks take part this group has seen."""
        return _turns[self.group.group_name]

    def begin(self) -> None:
        """Counts such a call, so that news of a failure is not taken for that of a later one."""
        _turns[self.group.group_name] += 1

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

        call = describe(asked)
        written = {peer: _seal({"call": call, "bytes": len(outgoing[peer])}) for peer in receivers}
        read = {peer: torch.empty(ENVELOPE_BYTES, dtype=torch.uint8) for peer in senders}
        faults, unread = self._pass(ENVELOPE_TAG, written, read)
        while read:
            faults |= unread
            envelopes = {peer: _open(read[peer]) for peer in read.keys() - unread.keys()}
            read = {peer: read[peer] for peer, e in envelopes.items() if e.get("turn", self.turn) < self.turn}
            for peer in envelopes.keys() - read.keys():  # this may be why a peer has ended, and tells more
                faults |= self._faults_of(peer, envelopes[peer], call, len(incoming[peer]))
            _, unread = self._pass(ENVELOPE_TAG, {}, read)  # news of a failure in an earlier turn is none
        self._check(asked.name, faults)

        written = {peer: outgoing[peer] for peer in receivers if len(outgoing[peer])}
        read = {peer: incoming[peer] for peer in senders if len(incoming[peer])}
        unsent, unread = self._pass(LETTER_TAG, written, read)
        self._check(asked.name, unsent | unread)
        return torch.cat(incoming)

    def announce(self, error: BaseException) -> None:
        """Lets every peer that waits for this rank, now or later, know that it failed, and why."""
        told = isinstance(error, PeerFailed)
        culprit, why = (error.culprit, str(error)) if told else (self.rank, f"{type(error).__name__}: {error}")
        why = why.encode("ascii", "replace").decode()[:400]
        envelope = _seal({"failed": culprit, "why": why, "turn": self.turn})
        works = [self._post(dist.isend, envelope, ENVELOPE_TAG, peer) for peer in self.peers]
        # A peer that waits reads at once; for one that comes later the mail waits by itself. A wait with a limit would
        # close the connection at its end.
        delivery = Thread(target=lambda: [self._wait(w, None) for w in works if isinstance(w, dist.Work)], daemon=True)
        delivery.start()
        delivery.join(GRACE.total_seconds())

    def _pass(self, tag: int, written: dict[int, Tensor], read: dict[int, Tensor]) -> tuple[dict[int, str], ...]:
        """Sends to some peers and receives from some; returns what went wrong in sending and in receiving, by peer."""
        posted = [
            {peer: self._post(operation, x, tag, peer) for peer, x in letters.items()}
            for operation, letters in ((dist.isend, written), (dist.irecv, read))
        ]
        faults: tuple[dict[int, str], ...] = {}, {}
        for works, faulty in zip(reversed(posted), reversed(faults), strict=True):
            for peer, work in works.items():
                fault = work if isinstance(work, str) else self._wait(work, GRACE if any(faults) else None)
                if fault:
                    faulty[peer] = f"rank {peer} ended or did not come in time ({fault})"
        return faults

    def _post(self, operation: Callable, x: Tensor, tag: int, peer: int) -> dist.Work | str:
        try:
            return operation(x, None, self.group, tag, peer)
        except RuntimeError as error:
            return str(error).splitlines()[0]

    def _wait(self, work: dist.Work, limit: timedelta | None) -> str | None:
        try:
            work.wait(limit) if limit else work.wait()
        except RuntimeError as error:
            return str(error).splitlines()[0]

    def _faults_of(self, peer: int, envelope: dict, call: str, expected: int) -> dict[int, str]:
        if "failed" in envelope:
            return {envelope["failed"]: f"rank {envelope['failed']} failed: {envelope['why']}"}
        if envelope["call"] != call:
            return {peer: f"rank {peer} asks for {envelope['call']}, this rank for {call}"}
        if envelope["bytes"] != expected:
            return {peer: f"rank {peer} sends {envelope['bytes']} bytes where this rank's operands ask for {expected}"}
        return {}

    def _check(self, name: str, faults: dict[int, str]) -> None:
        if faults:
            # A rank that said why it failed is the cause; others may have ended because of it.
            culprit = min(faults, key=lambda rank: ("failed:" not in faults[rank], rank))
            raise PeerFailed(f"rank {self.rank}: collective {name!r}: " + "; ".join(faults.values()), culprit)


def _seal(content: dict) -> Tensor:
    text = json.dumps(content).encode().ljust(ENVELOPE_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _open(envelope: Tensor) -> dict:
    return json.loads(bytes(envelope.tolist()))
