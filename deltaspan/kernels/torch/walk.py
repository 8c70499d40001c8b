"""The state from chunk to chunk: S <- gamma S + (r K)^T U, U = u - w S, and what is read from it on the way."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltaspan.kernels.stages import Runs
from deltaspan.kernels.torch.chunks import full_precision, to_tokens
from deltaspan.kernels.torch.prep import Tape
from deltaspan.plan import Chains, Passage


class States(NamedTuple):
    """What the gradients read of a walk."""

    state: Tensor  # S at each chunk's start [NC, HV, K, V]
    update: Tensor  # U [NC, HV, 64, V]


def merge(M: Tensor, X: Tensor, b: Tensor) -> Tensor:
    """M X + b: the exit state for entry state X. M [..., K, K], X and b [..., K, V].

    Term by term in the order of K, each product and each sum rounded by itself: the bits do not depend on how many
    tiles are merged side by side, as those of a batched product do on a GPU, so exchanges that merge elsewhere agree.
    """
    for k in range(M.shape[-1]):
        b = b + M[..., :, k, None] * X[..., None, k, :]
    return b


def tell(maps: Tensor | None, arrived: Tensor, reached: Tensor, way: Passage[Tensor]) -> None:
    """States that the exchange brought, to the segments that they reach, by `merge`; as `exchange.Affine` says."""
    reached[way.arriving] = arrived
    if way.through.shape[0]:
        there = way.through
        reached[there] = merge(maps[there], arrived[way.source], reached[there])


def chain(
    M: Tensor, b: Tensor | None, chains: Chains[Tensor], *, maps: bool, in_place: bool = False, apart: int | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Composes maps M [rows, HV, K, K] and offsets b [rows, HV, K, V] along chains, by `merge`, as `exchange.Affine`
    says. With `maps`, those of all chains, wanted or not. Offsets are left as they are."""
    if b is None and not maps:
        return None, None, None
    offsets = M[..., :0] if b is None else b
    K = M.shape[-1] if maps else 0
    alone = pad(offsets, (K, 0))  # next to a map of nothing: [0 | b]
    passed = alone.new_empty(chains.places, *alone.shape[1:])
    state = None
    for row, offset, place in chains.steps:
        offset = row if b is None else offset
        if state is None:
            state = torch.cat([M[row], offsets[offset]], -1) if maps else offsets[offset]
        else:
            state = merge(M[row], state[: len(row)], alone[offset])
        passed[place] = state
    composed = passed[..., :K].contiguous() if maps else None
    if b is None:
        return composed, None, None
    found = passed[..., K:].contiguous()
    return composed, *((found, None) if apart is None else (x.clone() for x in found.tensor_split([apart])))


def taken(states: Tensor, rows: Tensor) -> Tensor:
    """Rows of states [E, HV, K, V], zero from E on."""
    return pad(states, (0, 0) * 3 + (0, 1))[rows.clamp(max=len(states))]


@full_precision()
def exit_states(tape: Tape, runs: Runs, entry: Tensor) -> Tensor:
    """The exit state of each run from `entry` [E, HV, K, V], [n, HV, K, V]."""
    state = taken(entry, runs.entries)
    for step, n in enumerate(runs.active):
        c = runs.first[:n] + step
        state[:n] = tape.gamma[c] * state[:n] + tape.rk[c].mT @ (tape.u[c] - tape.w[c] @ state[:n])
    return state[runs.inverse]


@full_precision()
def transfer(tape: Tape, runs: Runs) -> Tensor:
    """The maps M of runs, by which each answers what is added to its entry state, [n, HV, K, K]."""
    HV, K = tape.rk.shape[1], tape.rk.shape[-1]
    M = torch.eye(K, dtype=tape.rk.dtype, device=tape.rk.device).expand(len(runs.order), HV, -1, -1).clone()
    for step, n in enumerate(runs.active):
        c = runs.first[:n] + step
        M[:n] = tape.gamma[c] * M[:n] - tape.rk[c].mT @ (tape.w[c] @ M[:n])
    return M[runs.inverse]


@full_precision()
def walk(
    tape: Tape, runs: Runs, entry: Tensor, *, output: bool, exits: bool = True, begun: tuple | None = None
) -> tuple[Tensor | None, Tensor, States]:
    """Walks every run from its true entry state [E, HV, K, V]: o [T, HV, V] in v's type, exit states, and the tape of
    states. `begun`: what walks of other runs gave; the result has theirs too.

    Without `output` o is not computed; exit states cost nothing here, wanted or not.
    """
    state = taken(entry, runs.entries)
    if begun is None:
        exit, places = (entry.new_empty(n, *entry.shape[1:]) for n in (runs.count, tape.gamma.shape[0]))
        made = States(places, torch.empty_like(tape.u))
    else:
        _, exit, made = begun
    states, update = made
    for step, n in enumerate(runs.active):
        c = runs.first[:n] + step
        states[c] = state[:n]
        update[c] = U = tape.u[c] - tape.w[c] @ state[:n]
        state[:n] = tape.gamma[c] * state[:n] + tape.rk[c].mT @ U
    exit[runs.order] = state
    if not output:
        return None, exit, made
    o = tape.read @ states + (tape.scale * tape.decay * tape.qk) @ update  # of all: what is not walked yet comes again
    v = tape.operands[2]
    return to_tokens(o, v, tape.grid, v.dtype), exit, made


def walk_ahead(adjoint: Any, runs: Runs, states: States) -> States:
    """What `pull_back` takes as states, with what of its work needs no adjoint: here none is left."""
    return states
