"""A benchmark from what is asked for to its record: every row is judged, then timed, then written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import deltaspan as ds
from deltaspan.bench import facts
from deltaspan.bench.check import BOUND, Truth, objection
from deltaspan.bench.operands import DECAYS, HEAD_DIM, Operands, draw
from deltaspan.bench.peers import Peer, first_line, peers_by_name
from deltaspan.bench.shards import LOCAL_SHARDS, Shard, local_shard, shards_of_packs
from deltaspan.bench.sides import Deltaspan, Side, TimedGroup
from deltaspan.bench.timing import FEWEST_SAMPLES, Phases, Samples, Stopwatch, interleave, is_steady, peak_mib
from deltaspan.op.context import default_rule, multiprocessors
from deltaspan.plan import plan_segments, wire_time

CONTROL = "control"  # our side once more
LARGEST_SEED = (1 << 63) - 1  # that a generator takes
PEAKS = {"forward": "forward_peak_mib", "step": "peak_mib"}

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What to time.

    shards: names of local shards, or "all".
    packs, cp, layouts: lengths of documents by name, world sizes, and layouts or "all": every combination of them.
    heads: H and HV.
    peers: by name.
    phases: what is timed, "forward" alone or both.
    device: "cpu" or "cuda"; None for a GPU if there is one.
    """

    shards: Sequence[str] = ()
    packs: Mapping[str, Sequence[int]] = field(default_factory=dict)
    cp: Sequence[int] = ()
    layouts: Sequence[str] = ()
    heads: Sequence[int] = (16, 48)
    peers: Sequence[str] = ()
    phases: Sequence[str] = tuple(PEAKS)
    decay: str = "moderate"
    backend: str = "auto"
    device: str | None = None
    samples: int = FEWEST_SAMPLES
    seed: int = 0


@dataclass(frozen=True)
class Bench:
    """A request that this machine can serve."""

    request: Request
    device: str
    backend: str  # the tier's name
    shards: Sequence[Shard]
    peers: Sequence[type[Peer]]

    def run(self, tell: Tell = lambda text: None) -> Iterator[dict[str, Any]]:
        """Yields the record after each row: one that is cut short has the rows that were done.

        tell: called with a line about what comes next.
        """
        record = self._opening()
        for number, shard in enumerate(self.shards, start=1):
            tell(f"[{number}/{len(self.shards)}] {shard.name}: {shard.part.total_tokens:,} tokens")
            record["rows"].append(self._row(shard))
            yield record

    def _opening(self) -> dict[str, Any]:
        request = self.request
        return {
            "machine": facts.machine(self.device),
            "versions": facts.versions(self.peers),
            "commit": facts.commit(),
            "decay": request.decay,
            "heads": list(request.heads),
            "backend": self.backend,
            "phases": list(self.request.phases),
            "seed": request.seed,
            "samples": request.samples,
            "bound": BOUND,
            "asked": len(self.shards),
            "rows": [],
        }

    def _row(self, shard: Shard) -> dict[str, Any]:
        """One row; a function of its own, so that nothing of it is left on the device when the next one begins."""
        torch.cuda.empty_cache()
        request, stopwatch = self.request, Stopwatch(self.device)
        group = None if shard.is_local else TimedGroup(shard.cp, stopwatch)
        ctx = ds.build_context(shard.part, group, device=self.device)
        ours = Deltaspan(ctx, self.backend)
        peers = [peer(shard.documents, self.device) for peer in self.peers] if shard.is_local else []

        x = draw(shard.part.total_tokens, request.heads, request.decay, device=self.device, seed=request.seed)
        given, truth = ours.sharded(x), Truth.of(x, shard.part.cu_seqlens, gradients="step" in self.request.phases)
        judged = partial(_judged, truth=truth, x=given, whole=ours.whole, phases=self.request.phases)
        found = {side.name: _absent() | judged(side) for side in (ours, *peers)}
        del truth, judged
        slowest, control = shard.slowest_rank, {}
        for what in self.request.phases:
            calls = {
                side.name: partial(getattr(side, what), given)
                for side in (ours, *peers)
                if what in side.phases and found[side.name]["off"] is None
            }
            taken = self._times(calls, stopwatch.around if group is None else group.during, stopwatch)
            for name, call in calls.items():
                found[name][f"{what}_ms"] = _rounded(taken[name].median)
                found[name]["spread"][what] = {measure: _rounded(ms) for measure, ms in taken[name].spread().items()}
                if group is None:  # simulated ranks share the device: no peak is one rank's
                    found[name][PEAKS[what]] = _rounded(peak_mib(call, self.device), 1)
            if CONTROL in taken:
                control[what] = _rounded(taken[CONTROL].median / taken[ours.name].median)
                slowest = slowest if group is None else taken[ours.name].slowest_rank()

        own = found.pop(ours.name)
        return {
            "pack": shard.pack,
            "cp": shard.cp,
            "layout": shard.layout,
            "slowest_rank": slowest,
            **own,
            **self._wire(shard),
            "peers": found,
            "name": shard.name,
            "cut_by": shard.cut_by,
            "tokens": shard.part.total_tokens,
            "documents": shard.documents,
            "segments": plan_segments(ctx.part, hv=request.heads[1], sm_count=ctx.sm_count, rule=ctx.p_rule),
            "control": control,
            "steady": bool(control) and all(map(is_steady, control.values())),
            "ok": all(side["off"] is None for side in (own, *found.values())),
        }

    def _wire(self, shard: Shard) -> dict[str, float | None]:
        """What a model says of the exchanges, which are in no time: a step's recompute exchanges again."""
        if shard.is_local:
            return {"wire_ms": None, "forward_wire_ms": None}
        of = wire_time(shard.part, HV=self.request.heads[1], K=HEAD_DIM, V=HEAD_DIM, exchange="all_to_all")
        return {"wire_ms": _rounded(2 * of.forward + of.backward), "forward_wire_ms": _rounded(of.forward)}

    def _times(
        self, calls: Mapping[str, Callable[[], object]], watched: Callable[..., Phases], stopwatch: Stopwatch
    ) -> dict[str, Samples]:
        """Of every call by name, and of ours once more as the control."""
        names = list(calls)
        if Deltaspan.name in calls:
            # Opposite in the circle of turns: as far from its own operands in the caches as the circle allows.
            names.insert(names.index(Deltaspan.name) + len(names) // 2 + 1, CONTROL)
        sides = {name: partial(watched, calls[Deltaspan.name if name == CONTROL else name]) for name in names}
        return interleave(sides, stopwatch, self.request.samples)


def prepare(request: Request) -> Bench:
    """Checks a request against this machine.

    Raises:
        ValueError: an unknown name, a count out of range, a device that is missing, or a peer that cannot run.
    """
    if request.device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {request.device!r}")
    if request.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu on a machine without a CUDA device, got 'cuda'")
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if len(request.heads) != 2 or min(request.heads) < 1 or request.heads[1] % request.heads[0]:
        found = ",".join(map(str, request.heads))
        raise ValueError(f"heads must be H,HV, two numbers from 1 on and HV a multiple of H, got {found}")
    if request.decay not in DECAYS:
        raise ValueError(f"decay must be one of {', '.join(DECAYS)}, got {request.decay!r}")
    if request.samples < FEWEST_SAMPLES:
        raise ValueError(f"samples must be at least {FEWEST_SAMPLES}, got {request.samples}")
    if not 0 <= request.seed <= LARGEST_SEED:
        raise ValueError(f"seed must be from 0 to {LARGEST_SEED:,}, got {request.seed}")
    H, HV = request.heads
    backend = ds.chosen_backend(request.backend, device=device, group=HV // H)
    names = LOCAL_SHARDS if list(request.shards) == ["all"] else request.shards
    where = torch.device(device)
    of_packs = shards_of_packs(
        request.packs, request.cp, request.layouts,
        hv=HV, sm_count=multiprocessors(where), rule=default_rule(where),
    )  # fmt: skip
    shards = [*map(local_shard, names), *of_packs]
    return Bench(request, device, backend, shards, peers_by_name(request.peers, device))


def _absent() -> dict[str, Any]:
    """A side's figures before it is timed."""
    return dict.fromkeys(("forward_ms", "step_ms", *PEAKS.values())) | {"spread": {}}


def _judged(
    side: Side, truth: Truth, x: Operands, whole: Callable[[Any], Any], phases: Sequence[str]
) -> dict[str, Any]:
    """errors by result, "forward" being the output of a forward without saving; off: why it is not timed, or None."""
    try:
        results = side.step(x)._asdict() if "step" in phases and "step" in side.phases else {}
        errors = {name: truth.error(name, whole(t)) for name, t in results.items()}
        errors["forward"] = truth.error("o", whole(side.forward(x)))
    except Exception as error:  # a side that cannot serve this shard does not end the run
        return {"errors": {}, "off": first_line(error)}
    return {
        "errors": {name: error if math.isfinite(error) else "not finite" for name, error in errors.items()},
        "off": objection(errors),
    }


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
