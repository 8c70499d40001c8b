"""A suite from its cases to its report."""

import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from deltaspan.verify import step
from deltaspan.verify.bounds import RANKS_TO_ONE, roundoff
from deltaspan.verify.cases import Case, quick_cases
from deltaspan.verify.checks import rows_of
from deltaspan.verify.errors import Error
from deltaspan.verify.processes import RanksFailed, run_on_ranks
from deltaspan.verify.report import Report, Row, machine_facts
from deltaspan.verify.run import CaseRun

SUITES = {"quick": quick_cases}
DEVICES = ("cpu", "cuda")
PATIENCE_S = 60.0  # for a case, which takes a second

Advance = Callable[[str, int, int], None]


def run_suite(
    suite: str = "quick",
    *,
    device: str | None = None,
    seed: int | None = None,
    progress: Advance = lambda stage, done, total: None,
) -> Report:
    """Whether context parallelism is exact on this machine: its torch, its BLAS, its gloo.

    Starts processes of its own: a script has to call it under `if __name__ == "__main__":`.

    Args:
        suite: "quick", a minute or two on two cores.
        device: "cpu" or "cuda", for all but the real ranks, which compute on the CPU; None for a GPU if there is one.
        seed: of cases and inputs, at least 0; None for a fresh one. The report has it.
        progress: called as work proceeds with the stage's name, what is done of it, and how much there is.

    Raises:
        ValueError: an unknown suite or device, a device that this machine lacks, a seed below 0.
    """
    if suite not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}, got {suite!r}")
    device = check_request(device, seed)
    seed = secrets.randbits(32) if seed is None else seed
    # Results have the same bits only at equal thread counts, and the real ranks have one thread each.
    with one_thread():
        rows = run_cases(SUITES[suite](seed), device, progress)
        facts = machine_facts(device)
    return Report(facts, [Row(row.name, row.row, row.ok, {**row.figures, "seed": seed}) for row in rows], seed)


def check_request(device: str | None, seed: int | None) -> str:
    """The device to compute on.

    Raises:
        ValueError: an unknown device, one that this machine lacks, a seed below 0.
    """
    if device not in (None, *DEVICES):
        raise ValueError(f"device must be one of {', '.join(DEVICES)} or None, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be cpu on a machine without a CUDA device, got 'cuda'")
    if seed is not None and seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def run_cases(cases: Sequence[Case], device: str, progress: Advance = lambda stage, done, total: None) -> list[Row]:
    """Every check of every case, then what the cases say together."""
    returned = _of_processes(cases, progress)
    rows, pools = [], defaultdict(Pool)
    for done, case in enumerate(cases):
        progress("checking cases", done, len(cases))
        run = CaseRun(case, "cpu" if case.real else device, returned.get(case))  # the processes meet over gloo
        rows += rows_of(run)
        if case.world_size > 1 and case.dtype != "float64":
            _add(pools, run)
    progress("checking cases", len(cases), len(cases))
    return rows + [pool.row(*key) for key, pool in sorted(pools.items())]


def _of_processes(cases: Sequence[Case], progress: Advance) -> dict[Case, list | RanksFailed]:
    returned: dict[Case, list | RanksFailed] = {}
    for world_size in sorted({case.world_size for case in cases if case.real}):
        own = [case for case in cases if case.real and case.world_size == world_size]
        advance = partial(progress, f"{world_size} processes over gloo")
        advance(0, len(own))
        outcomes = run_on_ranks(step.of_process, own, world_size, advance, PATIENCE_S)
        returned |= zip(own, outcomes, strict=True)
    return returned


class Pool:
    """One result of all cases of a type with several ranks, beside one rank with the same inputs.

    Float64 is not compared: its roundings are a hundred thousand times smaller than what it is promised to.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.squares = [0.0, 0.0]  # of relative RMS errors times tokens: of several ranks, of one
        self.worst = [0.0, 0.0]  # elements

    def add(self, tokens: int, sides: Sequence[Sequence[Error]]) -> None:
        self.tokens += tokens
        for i, errors in enumerate(sides):
            values = {error.measure: error.value for error in errors}
            self.squares[i] += tokens * values["tensor"] ** 2
            self.worst[i] = max(self.worst[i], values["element"])

    def row(self, dtype: str, tensor: str) -> Row:
        sides = {"tensor": [math.sqrt(x / self.tokens) for x in self.squares], "element": self.worst}
        judged = []
        for measure, (many, one) in sides.items():
            times, plus = RANKS_TO_ONE[measure]
            limit = times * one + plus * roundoff(dtype)
            judged.append((many / limit, {"over": measure, "error": many, "bound": limit, "one_rank": one}))
        ratio, figures = max(judged, key=lambda found: found[0])
        return Row(
            "many ranks against one", f"{dtype} {tensor}", ratio <= 1,
            {"tensor": tensor, **figures, "tokens": self.tokens},
        )  # fmt: skip


def _add(pools: defaultdict[tuple[str, str], Pool], run: CaseRun) -> None:
    try:
        many, one = run.errors_of_many, run.errors_of_one
    except Exception:
        return  # the case's own rows are red
    for tensor in many:
        pools[run.case.dtype, tensor].add(run.part.total_tokens, (many[tensor], one[tensor]))


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
