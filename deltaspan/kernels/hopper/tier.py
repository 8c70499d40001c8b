"""The stages on sm_90, as `kernels/stages.py` names them.

The backward of the convolution is the torch tier's, and so is what leads from the gradients of ready g and beta to
those of raw ones.

The states of all chunks and their adjoints are 1 KB a token and value head, more than all else together. So they are
neither kept nor there as a whole: a backward makes both for a slab of heads, forms the slab's gradients, and goes on to
the next. What is kept, or handed on by a checkpoint's recompute, is what `prep` leaves.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deltaspan.kernels.hopper.adjoint import adjoint as walked_back
from deltaspan.kernels.hopper.compose import chain, merge, tell
from deltaspan.kernels.hopper.conv import convolve
from deltaspan.kernels.hopper.forward import forward, no_state
from deltaspan.kernels.hopper.gluon import Tilings
from deltaspan.kernels.hopper.gradients import gradients as of_chunks
from deltaspan.kernels.hopper.operands import as_read, by_rows
from deltaspan.kernels.hopper.prep import Prepared
from deltaspan.kernels.hopper.prep import prep as prepared
from deltaspan.kernels.hopper.recorder import Recorder
from deltaspan.kernels.hopper.tapes import Adjoint, Entered, Tape, keep, kept_bytes, kept_tensors, restore
from deltaspan.kernels.hopper.transfer import transfer as transferred
from deltaspan.kernels.hopper.unit import to_raw_gradient, unit
from deltaspan.kernels.stages import READY, Grid, Raw, Runs
from deltaspan.kernels.torch.conv import activation_gradient, conv_gradients, preactivation
from deltaspan.kernels.torch.inputs import raw_gradients, ready

__all__ = [
    "Adjoint",
    "Tape",
    "activation_gradient",
    "adjoint_prep",
    "adjoint_summary",
    "adjoint_walk",
    "chain",
    "chunk_states",
    "conv_gradients",
    "convolve",
    "exit_states",
    "gradients",
    "keep",
    "kept_bytes",
    "kept_tensors",
    "merge",
    "preactivation",
    "prep",
    "pull_back",
    "recorder",
    "rehearsal",
    "restore",
    "summaries",
    "tell",
    "transfer",
    "walk",
    "walk_ahead",
]

MOST_SLABS = 4  # a fifth would save another 5 % of a step's peak
WAVES = 2  # that the programs of a slab's walk fill at least, or its last ones leave too much of the device idle
MAP_CHUNKS = 256  # whose running sums, of one head, are as many bytes as a map
STATE = torch.float32  # the type of states, and of what is made ready


def prep(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, grid: Grid, *, scale: float, unit_keys: bool,
    raw: Raw = READY, only: tuple[Runs, Runs] | None = None,
) -> Tape:  # fmt: skip
    """Prepares every chunk; q, k [T, H, 128], v [T, HV, 128] bf16, g and beta [T, HV], ready or raw."""
    assert unit_keys, "select refuses other keys"
    (q, k, v, g, beta), raw = as_read(q, k, v, g, beta, raw)
    no_state(q.device)  # made here for the first time, and not between two launches that run side by side
    o = v.new_empty(v.shape) if only is not None and _saves(*only, v.shape[1], grid) else None
    made = prepared(k, g, beta, grid.table, q=q, raw=raw, o=o, tilings=(tilings := Tilings()))
    return Tape(q, k, v, g, beta, made, grid, scale, raw, tilings)


def exit_states(tape: Tape, runs: Runs, entry: Tensor) -> Tensor:
    """The exit state of each run from `entry`, [n, HV, 128, 128]."""
    return _walked(tape, runs, entry, output=False)[1]


def transfer(tape: Tape, runs: Runs) -> Tensor:
    """The maps M of runs, by which each answers what is added to its entry state, [n, HV, 128, 128]."""
    return transferred(tape.k, tape.made, runs.table, tilings=tape.tilings)


def summaries(tape: Tape, through: Runs, left: Runs, entry: Tensor) -> tuple[Tensor, Tensor]:
    """The maps of `through` and the exit states of `left`: those begin on what the last maps leave of the device, so
    none is walked by halves."""
    M = transfer(tape, through)
    if not M.shape[0]:
        return M, exit_states(tape, left, entry)
    return M, _walked(tape, left, entry, output=False, whole=None, beside=True)[1]


def walk(
    tape: Tape, runs: Runs, entry: Tensor, *, output: bool, exits: bool = True, begun: tuple | None = None
) -> tuple[Tensor | None, Tensor | None, Entered]:
    """Walks every run from its true entry state as far as anybody reads what comes of it: o [T, HV, 128], exit states
    [count, HV, 128, 128]. `begun`: what walks of other runs gave; the result has theirs too."""
    o, exit, _ = (None, None, None) if begun is None else begun
    if exit is None and exits:
        exit = entry.new_empty(runs.count, *entry.shape[1:])
    if output or exits:
        o, exit, _ = _walked(tape, runs, entry, output=output, exits=exits, found=(o, exit))
    if o is not None and begun is None:
        _clear_behind(tape.grid, o)
    return o, exit, Entered(entry)


def chunk_states(tape: Tape, runs: Runs, entry: Tensor, **how: Any) -> Tensor:
    """S at the start of every chunk [NC, HV, V, K] bf16. how: as `forward` may be told to walk."""
    return _walked(tape, runs, entry, output=False, states=True, exits=False, **how)[2]


def adjoint_prep(tape: Tape, do: Tensor) -> Adjoint:
    """Joins the output's gradient do [T, HV, 128] bf16 to a tape. Raw q and k are made ready, in bf16, since the walks
    of the backward and the gradients take them so."""
    made_ready, raw = tape, tape.raw
    if raw.l2norm:
        operands = unit(tape.q), unit(tape.k), tape.v, tape.g, tape.beta
        made_ready = prep(*operands, tape.grid, scale=tape.scale, unit_keys=True, raw=raw._replace(l2norm=False))
    _, _, _, beta = ready(
        *made_ready[:2], tape.g, tape.beta, Raw(sigmoid=raw.sigmoid, largest_beta=raw.largest_beta), STATE
    )
    return Adjoint(made_ready._replace(beta=beta), by_rows(do), (tape.q, tape.k, tape.v, tape.g, tape.beta), raw)


def adjoint_summary(adjoint: Adjoint, runs: Runs, leaving: Tensor) -> Tensor:
    """The adjoint [n, HV, 128, 128] of each run's entry state, for the adjoint `leaving` [E, HV, 128, 128] of its exit
    state."""
    entering, _ = _walked_back(adjoint, runs, leaving, states=False)
    return entering


def adjoint_walk(adjoint: Adjoint, runs: Runs, leaving: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """Walks every run back from the true adjoint [E, HV, 128, 128] of its exit state to that of its entry state, with D
    at the end of every chunk [NC, HV, V, K] bf16. how: as `adjoint` may be told to walk."""
    return _walked_back(adjoint, runs, leaving, states=True, **how)


def gradients(adjoint: Adjoint, states: Tensor, costates: Tensor, found: tuple[Tensor, ...]) -> None:
    """dq, dk [T, H, 128], dv [T, HV, 128] bf16, dg, dbeta [T, HV] fp32 of the tape's operands, from S at every chunk's
    start and D at its end, to where `found` has places for them."""
    t = adjoint.tape
    operands = t.q, t.k, t.v, t.beta, adjoint.do, t.made, states, costates, t.grid.table, t.scale
    of_chunks(*operands, found, programs=_multiprocessors(t.q.device), tilings=t.tilings)


def walk_ahead(adjoint: Adjoint, runs: Runs, states: Entered) -> Entered:
    """What `pull_back` takes as states, with what of its work needs no adjoint: of the first slab."""
    n = _slabs_for(adjoint, runs)
    slab, entry = (adjoint, states.entry) if n == 1 else next(_slabs_of(n, adjoint, (), (states.entry,)))
    return states._replace(ahead=[chunk_states(slab.tape, runs, entry)])


def pull_back(adjoint: Adjoint, runs: Runs, states: Entered, leaving: Tensor) -> tuple[Tensor | None, ...]:
    """The adjoint of entry states [n, HV, 128, 128]; dq, dk [T, H, 128], dv [T, HV, 128] bf16, dg, dbeta [T, HV] fp32,
    dA_log and ddt_bias [HV] fp32 or None, of the operands as they were given. By slabs of key heads, with the same bits
    for any."""
    t, raw = adjoint.tape, adjoint.raw
    n = _slabs_for(adjoint, runs)
    found = dq, dk, dv, dg, dbeta = (
        *(x.new_empty(x.shape) for x in (t.q, t.k, t.v)), *(leaving.new_empty(t.beta.shape) for _ in range(2)),
    )  # fmt: skip
    entering = leaving.new_empty(runs.table.shape[0], *leaving.shape[1:])
    of_heads = states.entry, leaving, entering, dv, dg, dbeta
    ahead = states.ahead.pop() if states.ahead else None  # the caller's hold would outlast the first slab
    slabs = [(adjoint, dq, dk, *of_heads)] if n == 1 else _slabs_of(n, adjoint, (dq, dk), of_heads)
    for slab in slabs:
        _pull_back(runs, ahead, *slab)
        ahead = None
    _clear_behind(t.grid, *found)
    if raw.l2norm:
        for x, dx in zip(adjoint.given[:2], (dq, dk), strict=True):
            to_raw_gradient(x[: t.grid.tokens], dx[: t.grid.tokens])
    given = adjoint.given, raw._replace(l2norm=False), dq, dk, dg, dbeta, t.grid.tokens
    dq, dk, *dgates = raw_gradients(*given)
    return entering, dq, dk, dv, *dgates


def recorder(operands: Sequence[Tensor | None], tables: Iterable[Tensor]) -> Recorder:
    """Of a run that reads `operands`, and tables, among them the one of this tier."""
    device = next(x for x in operands if x is not None).device
    return Recorder(operands, (*tables, no_state(device)))


class _Rehearsed(threading.local):
    device: torch.device | None = None


_rehearsed = _Rehearsed()


@contextmanager
def rehearsal(device: torch.device) -> Iterator[None]:
    """Within it stages on the meta device, of which this thread asks, do as on `device`."""
    before, _rehearsed.device = _rehearsed.device, device
    try:
        yield
    finally:
        _rehearsed.device = before


def _saves(every: Runs, through: Runs, heads: int, grid: Grid) -> bool:
    """Whether sums that lie where o will are worth that o stands beside the maps. On halves of V two programs would
    overwrite what the other reads."""
    return every.whole(heads) == every.count * heads and MAP_CHUNKS * through.table.shape[0] < grid.start.shape[0]


def _slabs(H: int, programs: int, multiprocessors: int) -> int:
    """Through how many slabs of key heads a backward goes: at least two where there are as many heads, or the states
    and adjoints of all would stand beside all gradients. Equal ones if possible, for which kernels are the same."""
    most = min(H, MOST_SLABS, max(2, programs // (WAVES * multiprocessors)))
    return next((n for n in range(most, 1, -1) if H % n == 0), most)


def _slabs_for(adjoint: Adjoint, runs: Runs) -> int:
    t = adjoint.tape
    return _slabs(t.q.shape[1], runs.table.shape[0] * t.v.shape[1], _multiprocessors(t.q.device))


def _slabs_of(
    n: int, adjoint: Adjoint, of_keys: tuple[Tensor, ...], of_values: tuple[Tensor, ...]
) -> Iterator[tuple[Any, ...]]:
    """An adjoint by n slabs of key heads and their value heads, as views, and in its order what else has such heads in
    its second axis."""
    t = adjoint.tape
    H, group = t.q.shape[1], t.v.shape[1] // t.q.shape[1]
    keys = [(i + 1) * H // n - i * H // n for i in range(n)]
    values = [count * group for count in keys]
    split = torch.Tensor.split_with_sizes
    by_key = [split(x, keys, 1) for x in (t.q, t.k, *of_keys)]
    by_value = [split(x, values, 1) for x in (t.v, t.g, t.beta, adjoint.do, *of_values)]
    made = split(t.made.A, values), split(t.made.G, values), split(t.made.broken, keys), split(t.made.reach, values)
    slabs = zip(*made, *by_key[:2], *by_value[:4], *by_key[2:], *by_value[4:], strict=True)
    for A, G, broken, reach, q, k, v, g, beta, do, *more in slabs:
        tape = Tape(q, k, v, g, beta, Prepared(A, G, broken, reach), t.grid, t.scale, t.raw, Tilings())
        yield Adjoint(tape, do, *adjoint[2:]), *more


def _pull_back(
    runs: Runs, ahead: Tensor | None, adjoint: Adjoint, dq: Tensor, dk: Tensor, entry: Tensor, leaving: Tensor,
    entering: Tensor, dv: Tensor, dg: Tensor, dbeta: Tensor,
) -> None:  # fmt: skip
    """Of one slab, or of all heads: the adjoint of entry states and gradients to where they are found. ahead: states
    that are there already. Otherwise these are walked while the walk back ends."""
    if ahead is None:
        back, over = runs.pair(adjoint.do.shape[1])
        _, costates = adjoint_walk(adjoint, runs, leaving, found=entering, whole=back)
        states = chunk_states(adjoint.tape, runs, entry, whole=over, beside=True)
    else:
        _, costates = adjoint_walk(adjoint, runs, leaving, found=entering)
        states = ahead
    gradients(adjoint, states, costates, (dq, dk, dv, dg, dbeta))


def _clear_behind(grid: Grid, *rows: Tensor) -> None:
    """What stands behind the rank's own tokens, in a buffer that is longer."""
    for x in rows:
        if x.shape[0] > grid.tokens:
            x[grid.tokens :].zero_()


def _walked(tape: Tape, runs: Runs, entry: Tensor, **how: Any) -> tuple[Tensor | None, ...]:
    operands = tape.q, tape.k, tape.v, tape.made, entry, runs.table, tape.scale
    how.setdefault("whole", runs.whole(tape.v.shape[1]))
    return forward(*operands, tilings=tape.tilings, **how)


def _walked_back(adjoint: Adjoint, runs: Runs, leaving: Tensor, **how: Any) -> tuple[Tensor, Tensor | None]:
    tape = adjoint.tape
    operands = tape.q, tape.k, adjoint.do, tape.made, leaving, runs.back, tape.scale
    how.setdefault("whole", runs.whole(tape.v.shape[1]))
    return walked_back(*operands, tilings=tape.tilings, **how)


def _multiprocessors(device: torch.device) -> int:
    return _count_of(_rehearsed.device if device.type == "meta" else device)


@lru_cache
def _count_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
