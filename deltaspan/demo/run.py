"""The demo from start to end: trains on many ranks, on one, asks the oracle, and records what came of it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

import deltaspan as ds
from deltaspan.demo.corpus import Document, TextPack, library_documents, text_packs
from deltaspan.demo.oracle import loss_and_gradients
from deltaspan.demo.processes import train_on_ranks
from deltaspan.demo.settings import DemoSettings, Placement, place
from deltaspan.demo.training import RankOutcome, initial_model
from deltaspan.op.context import default_rule, multiprocessors
from deltaspan.plots.record import plural

# FP32 rounds every product to 2**-24 = 6e-8, and a gradient sums thousands of them through two layers: 2e-6 is what one
# rank shows too. A seam that lost its state would show as 1e-2 and more, as the record's "without_exchange" does.
GRADIENT_BOUND = 2e-5
# A loss of 2 to 6 is rounded to 5e-7, and 1e-6 is seen. But two FP32 runs of one training drift apart, tenfold in some
# twenty steps, since AdamW divides a gradient by its own size, roundoff included: so the room, and an end of judgement.
LOSS_BOUND = 1e-4
JUDGED_STEPS = 20

LAUNCHED = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")  # by which torchrun and srun tell how many they started

Advance = Callable[[str, int, int], None]
Gradients = dict[str, np.ndarray]


@dataclass(frozen=True)
class DemoRun:
    """A run that can start: its packs are read and partitioned, its devices chosen."""

    settings: DemoSettings
    placement: Placement
    packs: list[TextPack]
    first: ds.Partition  # of the first pack

    def partition_record(self) -> dict[str, Any]:
        """The first pack's partition, as `deltaspan plan --json` writes one."""
        part, hv = self.first, self.settings.shape.value_heads
        device = self.placement.device_of(0)
        rule, sms = default_rule(device), multiprocessors(device)
        return {
            "pack": "of step 1",
            "lengths": self.packs[0].lengths,
            "cp": part.world_size,
            "layout": part.layout,
            "rule": rule,
            "hv": hv,
            "sms": sms,
            "fragments": [[list(fragment[:3]) for fragment in fragments] for fragments in part.fragments],
            "segments": ds.plan_segments(part, hv=hv, sm_count=sms, rule=rule),
        }


def prepare(settings: DemoSettings, device: str | None = None, documents: list[Document] | None = None) -> DemoRun:
    """Chooses devices and text.

    Args:
        settings: the run's.
        device: "cpu", "cuda", or None for the best there is.
        documents: the text; None for the sources of Python's standard library.

    Raises:
        ValueError: an unknown layout or device, a count below 1, no documents of fitting lengths, or a process that
            torchrun or srun started beside others: each would start ranks of its own.
    """
    if others := [name for name in LAUNCHED if int(os.environ.get(name) or 1) > 1]:
        raise ValueError(
            f"ranks are started by the demo itself, and {others[0]} is {os.environ[others[0]]}: start it once, without "
            "torchrun or srun"
        )
    placement = place(settings.ranks, device)
    packs = text_packs(library_documents() if documents is None else documents, settings.steps, settings.capacity)
    return DemoRun(
        settings, placement, packs, ds.partition(packs[0].cu_seqlens, settings.ranks, layout=settings.layout)
    )


def run_demo(run: DemoRun, advance: Advance = lambda stage, done, total: None) -> dict[str, Any]:
    """Trains on many ranks and on one, from the same seed, and checks both against each other and against FP64.

    Args:
        run: from `prepare`.
        advance: called as work proceeds with the stage's name, what is done of it, and how much there is.

    Returns:
        the record, ready for JSON: settings, partition, losses, ranks, checks, `ok`.

    Raises:
        RankFailed: a rank ended before its training did.
    """
    settings = run.settings
    many, seconds_many = _trained(run, settings.ranks, f"training on {plural(settings.ranks, 'rank')}", advance)
    (one, *_), seconds_one = _trained(run, 1, "training on 1 rank, the same", advance)
    began = time.perf_counter()
    exact, deaf = _oracle(run, advance)
    seconds_oracle = time.perf_counter() - began

    checks = _checks(settings.ranks, many[0], one, exact)
    return {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "versions": {"deltaspan": ds.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "settings": asdict(settings) | {"device": run.placement.device, "backend": run.placement.backend},
        "documents": [[document.name for document in pack.documents] for pack in run.packs],
        "partition": run.partition_record(),
        "losses": {"ranks": many[0].losses, "one": one.losses},
        "ranks": [{"tokens": r.tokens, "sent_bytes": r.sent, "received_bytes": r.received} for r in many],
        "bounds": {"loss": LOSS_BOUND, "gradient": GRADIENT_BOUND, "judged_steps": JUDGED_STEPS},
        "checks": checks,
        "without_exchange": dict(zip(("parameter", "error"), worst_error(deaf, exact), strict=True)),
        "seconds": {"ranks": seconds_many, "one": seconds_one, "oracle": seconds_oracle},
        "ok": all(check["ok"] for check in checks),
    }


def worst_error(found: Gradients, exact: Gradients) -> tuple[str, float]:
    """The parameter whose gradient is furthest off, and how far: |found - exact| / |exact|, norms of the tensors."""
    errors = {
        name: float(np.linalg.norm(found[name].astype(np.float64) - truth) / np.linalg.norm(truth))
        for name, truth in exact.items()
    }
    # A NaN is the worst of all, and would lose every comparison.
    name = max(errors, key=lambda name: np.nan_to_num(errors[name], nan=np.inf))
    return name, errors[name]


def _trained(run: DemoRun, ranks: int, stage: str, advance: Advance) -> tuple[list[RankOutcome], float]:
    steps = run.settings.steps
    advance(stage, 0, steps)
    began = time.perf_counter()
    outcomes = train_on_ranks(
        run.settings, ranks, run.packs, run.placement, lambda step, _: advance(stage, step + 1, steps)
    )
    return outcomes, time.perf_counter() - began


def _oracle(run: DemoRun, advance: Advance) -> tuple[Gradients, Gradients]:
    """The first step's gradients in FP64; and what they would be if no rank told another anything.

    For the second, every fragment is a document of its own: no state enters it, and no convolution row.
    """
    stage = "the first step in float64"
    parameters = dict(initial_model(run.settings).named_parameters())
    pack, part = run.packs[0], run.first
    shuffled = np.concatenate([part.token_ids(rank) for rank in range(part.world_size)])
    pieces = [0, *accumulate(part.table.length.tolist())]
    gradients, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have it
    for order, cu_seqlens in ((slice(None), pack.cu_seqlens), (torch.from_numpy(shuffled), pieces)):
        advance(stage, len(gradients), 2)
        tokens, labels = pack.tokens[:, order], pack.labels[:, order]
        _, found = loss_and_gradients(parameters, run.settings.shape, tokens, labels, cu_seqlens)
        gradients.append({name: gradient.numpy() for name, gradient in found.items()})
    torch.set_num_threads(threads)
    advance(stage, 2, 2)
    return tuple(gradients)


def _checks(ranks: int, many: RankOutcome, one: RankOutcome, exact: Gradients) -> list[dict[str, Any]]:
    apart = np.abs(np.subtract(many.losses, one.losses))
    apart[JUDGED_STEPS:] *= 0  # which leaves a NaN what it is, and argmax takes that for the largest
    step = int(np.argmax(apart))
    found = [(f"losses on {plural(ranks, 'rank')} and on 1", f"step {step + 1}", float(apart[step]), LOSS_BOUND)]
    for count, outcome in ((ranks, many), (1, one)):
        name, error = worst_error(outcome.first_gradients, exact)
        found.append((f"gradients on {plural(count, 'rank')} and float64", name, error, GRADIENT_BOUND))
    return [
        {"name": name, "worst": worst, "value": value, "bound": bound, "ok": value <= bound}
        for name, worst, value, bound in found
    ]
