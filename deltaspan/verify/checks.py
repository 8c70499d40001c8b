"""The checks: each looks at one run of a case, and says whether it holds and by what figures."""

import dataclasses
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from deltaspan.exchange import EXCHANGES
from deltaspan.verify import step
from deltaspan.verify.bounds import bound
from deltaspan.verify.cases import PACKS, WAYS, Inputs
from deltaspan.verify.errors import Rows
from deltaspan.verify.report import Figures, Row
from deltaspan.verify.run import CaseRun
from deltaspan.verify.step import CONVOLUTION, GRADIENTS, OUTPUTS, PER_PARAMETER, Results


class Verdict(NamedTuple):
    ok: bool
    figures: Figures


Check = Callable[[CaseRun], Verdict | None]
"""None: the check does not apply to the case."""


def judge(run: CaseRun, names: Sequence[str]) -> Verdict | None:
    """The error that comes nearest to its bound, or exceeds it most, of these tensors."""
    judged = [
        (error.value / limit, name, error, limit)
        for name in names
        for error in run.errors_of_many.get(name, ())
        for limit in (bound(run.case.dtype, name, error.measure),)
    ]
    if not judged:
        return None
    ratio, name, error, limit = max(judged, key=lambda found: found[0])
    values = {other.measure: other for other in run.errors_of_many[name]}
    worst = values["element"]
    document, head, token, seam = worst.place if error.measure == "tensor" else error.place
    return Verdict(
        ratio <= 1,
        {
            "tensor": name, "over": error.measure, "error": error.value, "bound": limit,
            "document": None if name in PER_PARAMETER else document,
            "head": None if name in CONVOLUTION else head,
            "token": token, "seam": seam and str(seam),
            "rms": values["tensor"].value, "worst_element": worst.value,
        },
    )  # fmt: skip


def forward(run: CaseRun) -> Verdict | None:
    return judge(run, OUTPUTS)


def gradients(run: CaseRun) -> Verdict | None:
    return judge(run, GRADIENTS)


def convolution(run: CaseRun) -> Verdict | None:
    return judge(run, CONVOLUTION)


def real_ranks(run: CaseRun) -> Verdict | None:
    """Processes give the bits of simulated ranks, in every result of every rank."""
    if not run.case.real:
        return None
    # dz alone is no result of a single rank: simulated ranks share z.
    return compare(*([_without(row, "dz") for row in rows] for rows in (run.simulated, run.shards)))


def _without(results: Results, name: str) -> Results:
    return {other: x for other, x in results.items() if other != name}


def compare(expected: Sequence[Results], found: Sequence[Results]) -> Verdict:
    """Bit by bit; the figures name the first result that differs."""
    for rank, (want, have) in enumerate(zip(expected, found, strict=True)):
        for name in want:
            if name not in have or not same_bits(want[name], have[name]):
                return Verdict(False, {"tensor": name, "rank": rank})
    return Verdict(True, {"tensors": sum(map(len, expected))})


def same_bits(a: Tensor, b: Tensor) -> bool:
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def reshard(run: CaseRun) -> Verdict:
    """`unshard` undoes `shard` on every rank, and both have the gradients that they promise. All are whole numbers."""
    inputs, total = run.inputs, sum(run.inputs.dz)[: len(run.inputs.z)]
    padded = torch.cat([inputs.z, inputs.z.new_zeros(step.TAIL, inputs.z.shape[1])])
    expected = [
        {"whole": padded, "dshard": total[step.token_ids(run.part, rank)]} for rank in range(run.part.world_size)
    ]
    verdict = compare(expected, [{name: row[name] for name in ("whole", "dshard")} for row in run.shards])
    if not verdict.ok:
        return verdict
    return compare([{"dz": total}], [{"dz": sum(row["dz"] for row in run.shards)}])


def ways(run: CaseRun) -> Verdict:
    """The case's way gives the same bits as two others, which its seed chooses: one of them keeps what its backward
    reads where the case's own replays, or the other way round."""
    rng, own = Random(run.case.seed), run.case.way
    first = rng.choice([way for way in WAYS if WAYS[way].again != WAYS[own].again])
    return _alike(run, "way", [first, rng.choice([way for way in WAYS if way not in (own, first)])])


def exchanges(run: CaseRun) -> Verdict | None:
    """All exchanges give the same bits."""
    others = [exchange for exchange in EXCHANGES if exchange != run.case.exchange]
    return _alike(run, "exchange", others) if run.part.crossing_out.any() else None


def _alike(run: CaseRun, factor: str, others: Sequence[str]) -> Verdict:
    """The op's results beside those of the same case with other values of a factor."""
    own, compared = getattr(run.case, factor), 0
    for other in others:
        results = step.operation(dataclasses.replace(run.case, **{factor: other}), run.inputs, run.context)
        verdict = compare([{name: row[name] for name in results[0]} for row in run.simulated], results)
        if not verdict.ok:
            return Verdict(False, {factor: f"{own} and {other}"} | verdict.figures)
        compared += verdict.figures["tensors"]
    return Verdict(True, {"tensors": compared})


def isolation(run: CaseRun) -> Verdict | None:
    """A NaN in one document changes no bit of any other's results, nor fails to show in its own."""
    lengths, rng = PACKS[run.case.pack], Random(run.case.seed)
    if len(lengths) == 1:
        return None
    document = rng.choice([document for document, length in enumerate(lengths) if length])
    names, token, inputs = plant(run, document, rng)
    clean, dirty = (step.whole(run.part, shards) for shards in (run.simulated, run.simulate(inputs)))
    figures = {"planted": f"{' and '.join(names)} of document {document}", "token": token}
    tokens, traces = Rows.tokens(run.part), {}
    for name in [name for name in clean if name not in PER_PARAMETER]:
        of = run.rows(name, tokens).document
        traces[name] = bool(dirty[name][of == document].isnan().any())
        differs = (clean[name].view(torch.int64) != dirty[name].view(torch.int64)).flatten(1).any(1)
        others = of[differs & (of != document)]
        if len(others):
            return Verdict(False, {"tensor": name, "document": int(others[0])} | figures)
    for name, results in zip(names, (OUTPUTS + GRADIENTS, CONVOLUTION), strict=True):
        if not any(traces.get(result) for result in results):
            return Verdict(False, figures | {"trouble": f"{name} left no trace in its own document"})
    return Verdict(True, figures)


def plant(run: CaseRun, document: int, rng: Random) -> tuple[tuple[str, str], int, Inputs]:
    """Puts a NaN into one operand of the op and one of the convolution: at a seam of the document if there is one.

    Returns the operands and the token, for operands that have tokens.
    """
    inputs = run.inputs
    of_op = ["q", "k", "v", "g", "beta", "do"]
    of_op += ["initial_state", "dfinal_state"] if inputs.initial_state is not None else []
    names = rng.choice(of_op), rng.choice(["x", "dy"])
    start, length = run.case.cu_seqlens[document], PACKS[run.case.pack][document]
    seams = [seam for seam in Rows.tokens(run.part).seams if seam.document == document]
    token = rng.choice(seams).offset - rng.randrange(2) if seams else rng.randrange(length)
    changed = {}
    for name in names:
        value = getattr(inputs, name)
        several = isinstance(value, tuple)
        tensor = (value[0] if several else value).clone()
        tensor[document if name.endswith("state") else start + token].view(-1)[0] = torch.nan
        changed[name] = (tensor, *value[1:]) if several else tensor
    return names, token, dataclasses.replace(inputs, **changed)


CHECKS: dict[str, Check] = {
    "forward": forward,
    "gradients": gradients,
    "convolution": convolution,
    "processes = simulated ranks": real_ranks,
    "shard and unshard": reshard,
    "every way alike": ways,
    "all_to_all = ring = all_gather": exchanges,
    "NaN stays in its document": isolation,
}


def rows_of(run: CaseRun, names: Sequence[str] = tuple(CHECKS)) -> list[Row]:
    """The checks of a case, by their names, that apply. One that raises is red, with what it raised."""
    rows = []
    for name in names:
        try:
            verdict = CHECKS[name](run)
        except Exception as error:
            verdict = Verdict(False, {"trouble": f"{type(error).__name__}: {error}"})
        if verdict is not None:
            rows.append(Row(name, run.case.label, bool(verdict.ok), dict(verdict.figures)))
    return rows
