"""The stages of a tier, with their shapes, and the tables they are given.

A tier is a module with these names. T: a rank's tokens; NC: its chunks; S: its segments, in local order; n: those of
them in question. State S and its adjoint D are [K, V]; states are FP32, or FP64 where the operands are.

A walk takes states as they come, E rows of them, and a table tells a run its row: a run whose row is E or beyond starts
from zero, so nobody has to make zeros, or one tensor of all runs' states.

    tape = prep(q, k, v, g, beta, grid, scale=, unit_keys=, raw=, only=)
        q, k [T, H, K]   v [T, HV, V]   g, beta [T, HV]        what does not depend on the state, per chunk
        only: runs of all segments, and of those that are mapped, if one walk over the former with output is the last
        that reads the tape and nothing crosses ranks, so that something of it may lie where the output will
    b = exit_states(tape, runs, entry)
        entry [E, HV, K, V] -> b [n, HV, K, V]
    M = transfer(tape, runs)
        M [n, HV, K, K]: of entry + X the exit state is M X + b
    M, b = summaries(tape, through, left, entry)    both, each of its own runs
    o, exit, states = walk(tape, runs, entry, output=, exits=, begun=)
        entry [E, HV, K, V] -> o [T, HV, V] or None, exit [count, HV, K, V] (if anybody reads them); states: for
        pull_back(); begun: the three as a walk of other runs gave them, which this one adds to
    adjoint = adjoint_prep(tape, do)
        do [T, HV, V]
    d = adjoint_summary(adjoint, runs, leaving)
        leaving [E, HV, K, V], the adjoint of the exit state -> d [n, HV, K, V], the adjoint of the entry state
    states = walk_ahead(adjoint, runs, states)      with such work of pull_back() as needs no adjoint, for who waits
    entering, dq, dk, dv, dg, dbeta, dA_log, ddt_bias = pull_back(adjoint, runs, states, leaving)
        leaving [E, HV, K, V] -> entering [n, HV, K, V]; gradients like the operands, the last two [HV] or None

    n = kept_tensors(l2norm)                        how many keep() returns
    tensors = keep(tape, states)                    what the adjoint stages read of both, beside operands and tables
    tape, states = restore(tensors, q, k, v, g, beta, grid, scale=, raw=)      None for states that are walked again
    bytes = kept_bytes(chunks, H=, HV=, K=, V=, state_size=, l2norm=)

    recorder = recorder(operands, tables)           if the tier has one: watches a run of stages and makes a recording
    with rehearsal(device):                         if memory is foretold: stages on the meta device do as on this one,
                                                    and nothing is launched

    merge(M, X, b) = M X + b, for states [..., K, V]
    composed = chain(M, b, chains, maps=)           maps and offsets along plan.Chains, as exchange.Affine says
    tell(maps, arrived, reached, way)               states that came to the segments of plan.Passage, as it says too

and those of the convolution, D channels:

    y = convolve(x, history, weight, bias, edges, activation)       x [T, D] -> y [T, D]
    pre = preactivation(x, history, weight, bias, edges)            [tokens, D], formed again by the backward
    dpre = activation_gradient(pre, activation, dy)
    dx, dweight, dbias = conv_gradients(x, history, weight, dpre, following, edges)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from deltaspan.plan import CHUNK


class Raw(NamedTuple):
    """Which operands are as a model's projections give them, so that prep makes them ready and gradients lead back."""

    l2norm: bool = False  # q and k want normalising
    A_log: Tensor | None = None  # [HV], g wants its gate
    dt_bias: Tensor | None = None  # [HV]
    sigmoid: bool = False  # beta wants one
    largest_beta: float = 1.0


READY = Raw()


class Runs(NamedTuple):
    """Segments that are walked side by side, longest first."""

    order: Tensor  # [n] int64, segments as the caller counts them, in walking order
    inverse: Tensor  # [n] int64, the walking order's inverse
    entries: Tensor  # [n] int64, rows of their entry states, in walking order
    leavings: Tensor  # [n] int64, rows of the adjoints of their exit states, in walking order
    first: Tensor  # [n] int64, first chunk, in walking order
    last: Tensor  # [n] int64, last chunk, in walking order
    table: Tensor  # [n, 5] int32: first token, end, first chunk, entry's row, number as in `order`; in walking order
    back: Tensor  # [n, 5] int32, the same for the way back: with the row of leaving
    active: tuple[int, ...]  # by step, how many still have a chunk
    count: int  # how many segments the caller counts: n, or more where others are walked apart
    whole: Callable[[int], int]  # by heads, how many walks of a head over a run, in this order, are a program each;
    # each of the others is two, on half of V's channels each, with the same bits, so that no multiprocessor is idle
    pair: Callable[[int], tuple[int, int]]  # the same of walks back, and of those over states that begin while they end


@dataclass(frozen=True, eq=False)
class Grid:
    """One rank's chunks on its device: chunk c covers local tokens start[c] .. start[c] + length[c]."""

    tokens: int
    start: Tensor  # [NC] int32
    length: Tensor  # [NC] int32

    @cached_property
    def table(self) -> Tensor:
        """[NC, 2] int32: first token and tokens of each chunk."""
        return torch.stack([self.start, self.length], dim=1)

    @cached_property
    def valid(self) -> Tensor:
        """[NC, 64] bool: rows that hold a token."""
        return torch.arange(CHUNK, device=self.start.device) < self.length[:, None]

    @cached_property
    def token_of_row(self) -> Tensor:
        """[NC, 64] int64: the local token of each row; rows past a chunk's end repeat its first."""
        rows = torch.arange(CHUNK, device=self.start.device)
        return self.start[:, None].long() + torch.where(self.valid, rows, 0)

    @cached_property
    def row_of_token(self) -> Tensor:
        """[tokens] int64: the row 64 c + i of each local token."""
        rows = torch.arange(len(self.start) * CHUNK, device=self.start.device)
        skipped = (CHUNK - self.length.long()).cumsum(0) - (CHUNK - self.length.long())
        chunk = torch.repeat_interleave(self.length.long(), output_size=self.tokens)
        return rows.new_zeros(0) if not self.tokens else torch.arange(self.tokens, device=rows.device) + skipped[chunk]


@dataclass(frozen=True, eq=False)
class Edges:
    """One rank's fragments as a causal convolution sees them: rows before and after them come from received pools."""

    tokens: int
    width: int  # taps
    start: Tensor  # [S] int64, first local token
    length: Tensor  # [S] int64
    history_row: Tensor  # [S, width - 1] int64, received row of the token width - 1 - k before the fragment, -1 none
    following_row: Tensor  # [S, width - 1] int64, received row of the token k after its end, -1 none

    @cached_property
    def bounds(self) -> Tensor:
        """[S + 1] int32: first local token of each fragment, and the end of the last."""
        return torch.nn.functional.pad(self.start, (0, 1), value=self.tokens).int()

    @cached_property
    def fragments(self) -> Tensor:
        """[tokens / 64, rounded up] int32: the fragment of every 64th local token."""
        every = torch.arange(0, self.tokens, CHUNK, dtype=torch.int32, device=self.start.device)
        return torch.searchsorted(self.bounds[1:], every, right=True, out_int32=True)

    @cached_property
    def before(self) -> Tensor:
        """[tokens, width] int64: rows of (tokens, received, one of zeros) that tap k of each token reads."""
        fragment, inside = self._places
        back = inside[:, None] + torch.arange(1 - self.width, 1, device=inside.device)
        received = self._received(self.history_row, fragment[:, None], back + self.width - 1)
        return torch.where(back >= 0, self.start[fragment, None] + back, received)

    @cached_property
    def after(self) -> Tensor:
        """[tokens, width] int64: rows of (tokens, received, one of zeros) whose tap width - 1 - k reads each token."""
        fragment, inside = self._places
        ahead = inside[:, None] + torch.arange(self.width, device=inside.device)
        beyond = ahead - self.length[fragment, None]
        received = self._received(self.following_row, fragment[:, None], beyond)
        return torch.where(beyond < 0, self.start[fragment, None] + ahead, received)

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """Each token's fragment and its position within it, both [tokens] int64."""
        fragment = torch.repeat_interleave(self.length, output_size=self.tokens)
        return fragment, torch.arange(self.tokens, device=fragment.device) - self.start[fragment]

    def _received(self, table: Tensor, fragment: Tensor, column: Tensor) -> Tensor:
        if self.width == 1:
            return torch.full_like(column, -1)
        row = table[fragment, column.clamp(0, self.width - 2)]
        return torch.where(row >= 0, self.tokens + row, -1)  # -1, the last row, is the one of zeros
