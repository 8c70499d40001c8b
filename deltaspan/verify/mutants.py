"""Faults that the checks are there to catch, planted one by one: a fault that no check notices is a hole in the suite.

A fault replaces one function of the package in this process, while it is planted; the ranks are simulated. The cases
are few and small, all but one in bf16, where bounds are widest. What a check must notice are wrong numbers: a fault
by which a case raises counts as not caught.
"""

import copy
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from random import Random
from typing import NamedTuple
from unittest.mock import patch

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from deltaspan.verify import faults
from deltaspan.verify.cases import Case
from deltaspan.verify.checks import CHECKS, rows_of
from deltaspan.verify.faults import Fault
from deltaspan.verify.report import Figures, Report, Row, machine_facts, shown
from deltaspan.verify.run import CaseRun
from deltaspan.verify.suite import Advance, check_request, one_thread

MUTANT = "mutant"  # the rows' name in the report

FORWARD, GRADIENTS, CONVOLUTION = "forward", "gradients", "convolution"
RESHARD, WAYS, EXCHANGES = "shard and unshard", "every way alike", "all_to_all = ring = all_gather"
ISOLATION = "NaN stays in its document"


@dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    breaks: str  # in one sentence
    checks: tuple[str, ...]  # each has to notice it
    where: str  # module:name
    fault: Fault  # from what stands there to what stands there while it is planted

    @contextmanager
    def planted(self) -> Iterator[None]:
        module, name = self.where.split(":")
        owner = import_module(module)
        with patch.object(owner, name, self.fault(getattr(owner, name))):
            yield


MUTANTS = (
    Mutant(
        "drop the halo", "Convolutions read zeros for the tokens before a fragment.",
        (CONVOLUTION,), "deltaspan.op.conv:fetch_rows", faults.dropped_rows("halo"),
    ),
    Mutant(
        "drop the halo's gradient", "Gradients of a convolution's inputs miss what later fragments read of them.",
        (CONVOLUTION,), "deltaspan.op.conv:fetch_rows", faults.dropped_rows("halo_gradient"),
    ),
    Mutant(
        "swap two ranks' summaries", "Heads' owners take one rank's summary for another's.",
        (FORWARD, GRADIENTS, EXCHANGES), "deltaspan.exchange.all_to_all:_to_owners", faults.swapped_summaries,
    ),
    Mutant(
        "transpose M", "States pass a fragment by the transpose of its map, and adjoints by the map.",
        (FORWARD, GRADIENTS), "deltaspan.kernels.torch.walk:merge", faults.transposed_maps,
    ),
    Mutant(
        "skip a document reset", "State flows from a document into the next one.",
        (FORWARD, GRADIENTS), "deltaspan.layout.fragments:link", faults.joined_documents,
    ),
    Mutant(
        "reduce dq over the wrong group", "The query gradients of value heads are added up for heads that they do "
        "not read.",
        (GRADIENTS,), "deltaspan.kernels.torch:gradients", faults.foreign_key_heads,
    ),
    Mutant(
        "zero entry state in one rank's backward", "One rank's backward starts its fragments from zero.",
        (GRADIENTS, WAYS), "deltaspan.op.again:backward_program", faults.forgotten_entry_states,
    ),
    Mutant(
        "wrong owner of a head", "Ranks take the owners' answers for those of other heads.",
        (FORWARD, GRADIENTS, EXCHANGES), "deltaspan.exchange.all_to_all:_to_homes", faults.next_owners_heads,
    ),
    Mutant(
        "off-by-one cut", "The first token of a fragment is taken for the last one of the fragment before it.",
        (FORWARD, GRADIENTS), "deltaspan.op.view:chunk_grid", faults.late_cut,
    ),
    Mutant(
        "unmasked tail", "Rows of a chunk behind a fragment's end write into the state.",
        (FORWARD, GRADIENTS), "deltaspan.kernels.torch.prep:to_chunks", faults.unmasked_rows,
    ),
    Mutant(
        "adjoint chain in forward order", "Adjoints pass the seams of a document from its begin to its end.",
        (GRADIENTS, EXCHANGES), "deltaspan.op.view:chain_links", faults.first_fragment_first,
    ),
    Mutant(
        "decay of the wrong head", "Every head decays as its neighbour.",
        (FORWARD, GRADIENTS), "deltaspan.kernels.torch:prep", faults.neighbours_decay,
    ),
    Mutant(
        "stale tables", "A batch is computed with the tables of an earlier one of equal length.",
        (FORWARD, GRADIENTS, CONVOLUTION), "deltaspan.op.context:rank_view", faults.former_batch,
    ),
    Mutant(
        "unshard in the order of ranks", "A gathered pack has its tokens in the order of ranks.",
        (RESHARD,), "deltaspan.op.context:gather_tokens", faults.rank_order,
    ),
    Mutant(
        "unshard's gradient is not summed", "A rank's tokens miss the gradients that other ranks have for them.",
        (RESHARD,), "deltaspan.op.context:scatter_gradient", faults.own_share_alone,
    ),
    Mutant(
        "summaries in bf16", "What crosses ranks is rounded to 8 bits.",
        (FORWARD, GRADIENTS), "deltaspan.op.forward:carry_states", faults.rounded_summaries,
    ),
    Mutant(
        "ring without merging", "The ring hands on a fragment's own state without what entered it.",
        (EXCHANGES,), "deltaspan.exchange.ring:carry_states", faults.unmerged_hops,
    ),
    Mutant(
        "mask by multiplication", "Documents meet in a sum that is multiplied by zero.",
        (ISOLATION,), "deltaspan.kernels.torch.gradients:to_tokens", faults.masked_by_zero,
    ),
    Mutant(
        "ignore a final state's gradient", "One rank starts its adjoints from zero at documents' ends.",
        (GRADIENTS,), "deltaspan.op.again:backward_program", faults.unheard_final_gradients,
    ),
    Mutant(
        "states stop at the first segment", "What enters a fragment does not reach its later segments.",
        (FORWARD, GRADIENTS), "deltaspan.op.forward:spread", faults.nothing_through,
    ),
    Mutant(
        "adjoints stop at the last segment", "What adjoints bring to a fragment's end does not reach earlier segments.",
        (GRADIENTS,), "deltaspan.op.backward:spread", faults.nothing_through,
    ),
    Mutant(
        "a fragment's map is its last segment's", "States pass a cut fragment as if it began with its last segment.",
        (FORWARD, GRADIENTS), "deltaspan.op.forward:fold", faults.unfolded_maps,
    ),
    Mutant(
        "segments of a fragment in the wrong order", "A fragment's offsets are composed from its end to its begin.",
        (FORWARD, GRADIENTS), "deltaspan.op.segments:passages", faults.steps_from_the_end,
    ),
)  # fmt: skip


def mutant_cases(seed: int) -> list[Case]:
    """Documents over 4 ranks with seams, chains of several links and tails; heads that forget and heads that do not."""
    rng = Random(seed)
    common = {
        "ranks": "4 ranks", "decay": "heads with and without decay", "heads": "2:6 32x16", "keys": "unit keys",
        "beta": "beta in [0, 1]", "conv": "4 taps", "states": "initial and final states", "exchange": "all_to_all",
        "way": "autograd",
    }  # fmt: skip
    varied = [
        ("uneven documents", "zigzag", "bfloat16", "segments as planned"),
        ("off the chunk grid", "contiguous", "bfloat16", "whole fragments"),
        ("off the chunk grid", "zigzag", "float32", "some segments"),
        ("one long document", "contiguous", "bfloat16", "a segment a chunk"),
    ]
    names = ("pack", "layout", "dtype", "segments")
    return [Case(**dict(zip(names, row, strict=True)), **common, seed=rng.getrandbits(32)) for row in varied]


def run_mutants(
    *,
    device: str | None = None,
    seed: int | None = None,
    progress: Advance = lambda stage, done, total: None,
    mutants: Sequence[Mutant] = MUTANTS,
) -> "MutantReport":
    """Whether the suite's checks notice what they are there for: each of `mutants` by each check that it names.

    First every check of the same cases as they are: where one fails nothing is planted, and the report is not ok.
    Not for several threads: what is planted holds for the process. device, seed, progress: as for `run_suite`.

    Raises:
        ValueError: a device that this machine lacks, a seed below 0.
    """
    device = check_request(device, seed)
    seed = secrets.randbits(32) if seed is None else seed
    with one_thread():
        cases = mutant_cases(seed)
        rows = []
        for done, case in enumerate(cases):
            progress("cases as they are", done, len(cases))
            rows += rows_of(CaseRun(case, device))
        progress("cases as they are", len(cases), len(cases))
        if all(row.ok for row in rows):
            rows += plant_all(mutants, cases, device, progress)
        facts = machine_facts(device)
    return MutantReport(facts, [Row(row.name, row.row, row.ok, {**row.figures, "seed": seed}) for row in rows], seed)


def plant_all(mutants: Sequence[Mutant], cases: Sequence[Case], device: str, progress: Advance) -> list[Row]:
    """A row a mutant: which checks noticed it, by what."""
    bases = [CaseRun(case, device) for case in cases]
    for base in bases:
        _ = base.inputs, base.truth  # once for all: no mutant touches these
    rows = []
    for done, mutant in enumerate(mutants):
        progress("mutants", done, len(mutants))
        with mutant.planted():
            caught = {check: _look(check, bases) for check in mutant.checks}
        figures = {check: found.figures for check, found in caught.items()}
        ok = all(found.noticed for found in caught.values())
        rows.append(Row(MUTANT, mutant.name, ok, {"breaks": mutant.breaks} | figures))
    progress("mutants", len(mutants), len(mutants))
    return rows


class Found(NamedTuple):
    noticed: bool
    figures: str


def _look(check: str, bases: Sequence[CaseRun]) -> Found:
    """What a check says of the first case that it finds not to hold."""
    for base in bases:
        try:
            verdict = CHECKS[check](copy.copy(base))
        except Exception as error:
            return Found(False, f"not noticed, but {type(error).__name__}: {error}")
        if verdict is not None and not verdict.ok:
            return Found(True, shown(verdict.figures))
    return Found(False, "not noticed")


class MutantReport(Report):
    """A report whose table has a line for each mutant."""

    def table(self) -> RenderableType:
        """What caught each mutant; if the cases do not hold as they are, which do not."""
        mutants = [row for row in self.rows if row.name == MUTANT]
        if not mutants:
            return Group("The cases do not hold as they are: nothing was planted.", super().table())
        table = Table("mutant", "noticed by", "figures", show_lines=True)
        for row in mutants:
            verdict = "" if row.ok else "[red]survived[/red]\n"
            noticed = _noticed_by(row.figures)
            table.add_row(
                f"{verdict}{escape(row.row)}", escape("\n".join(noticed)), escape("\n".join(noticed.values()))
            )
        return Group(table, self.caption())


def _noticed_by(figures: Figures) -> dict[str, str]:
    return {name: str(value) for name, value in figures.items() if name in CHECKS}
