"""How far forwards are from float64 on a whole pack: ours on one rank and on many, beside peers' on the same operands.

    python -m deltaspan.bench.accuracy [--pack NAME] [--peers fla,flash_qla,flashinfer] [--json FILE]

Exit 0 if ours is within every bound: 2e-2 of an element (`deltaspan.verify`), on many ranks 1.1 of its own RMS error on
one and 1.5 of its worst element there, 1.1 of the better peer's RMS error; and if its bits do not depend on what the
process allows matrix products (TF32).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import deltaspan as ds
from deltaspan.bench.check import Truth
from deltaspan.bench.facts import commit, end_without_hopper, machine, versions
from deltaspan.bench.operands import REGIMES, Operands, draw
from deltaspan.bench.peers import PEERS, peers_by_name
from deltaspan.bench.sides import Deltaspan
from deltaspan.layout import LAYOUTS
from deltaspan.verify.errors import Rows, errors

HEADS = (16, 48)
CPS = (1, 4, 8)
ELEMENT = 2e-2
TO_PEERS, RANKS_TO_ONE, ELEMENT_TO_ONE = 1.1, 1.1, 1.5
Figures = dict[str, float]  # by measure of `deltaspan.verify.errors`


def report(
    lengths: Sequence[int], *, cps: Sequence[int] = CPS, decays: Sequence[str] = REGIMES, heads: Sequence[int] = HEADS,
    peers: Sequence[str] = (), backend: str = "hopper", device: str = "cuda", seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """By regime of decay: errors of every side, and what of ours is out of bounds."""
    others, rows = peers_by_name(peers, device), []
    for decay in decays:
        x = draw(sum(lengths), heads, decay, device=device, seed=seed)
        truth = Truth.of(x, [0, *accumulate(lengths)], gradients=False)
        found: dict[str, Figures] = {}
        for peer in others:
            found[peer.name] = _figures(
                peer(lengths, device).forward(x), truth, ds.partition([0, *accumulate(lengths)], 1)
            )
        same_bits = True
        for cp in cps:
            for layout in LAYOUTS if cp > 1 else LAYOUTS[:1]:
                part = ds.partition([0, *accumulate(lengths)], cp, layout=layout)
                o, as_with_tf32 = _ours(x, part, backend, device)
                same_bits &= as_with_tf32
                found["one rank" if cp == 1 else f"CP{cp} {layout}"] = _figures(o, truth, part)
                del o
        objections = [*_objections(found, [peer.name for peer in others])]
        rows.append({"decay": decay, "errors": found, "out": objections + ["TF32 changes bits"] * (not same_bits)})
    return {
        "machine": machine(device), "versions": versions(others), "commit": commit(), "heads": list(heads),
        "lengths": list(lengths), "backend": backend, "seed": seed, "rows": rows,
    }  # fmt: skip


def _ours(x: Operands, part: ds.Partition, backend: str, device: str) -> tuple[Tensor, bool]:
    """Our output in the pack's order, and whether it has the same bits when the process allows TF32."""
    group = ds.SimulatedGroup(part.world_size) if part.world_size > 1 else None
    side = Deltaspan(ds.build_context(part, group, device=device), backend)
    given, precision = side.sharded(x), torch.backends.cuda.matmul.fp32_precision
    outputs = []
    for allowed in ("ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = allowed
        try:
            outputs.append(side.whole(side.forward(given)))
        finally:
            torch.backends.cuda.matmul.fp32_precision = precision
    return outputs[0], torch.equal(*outputs)


def _figures(o: Tensor, truth: Truth, part: ds.Partition) -> Figures:
    """The worst of every measure over the heads of the truth."""
    group = truth.slabs[0].o.shape[1]
    heads = [head * group + i for head in truth.key_heads for i in range(group)]
    true = torch.cat([slab.o for slab in truth.slabs], dim=1)
    tiny = torch.finfo(torch.float32).tiny
    return {e.measure: e.value for e in errors(o[0, :, heads].double(), true, Rows.tokens(part).to(o.device), tiny)}


def _objections(found: Mapping[str, Figures], peers: Sequence[str]) -> Iterator[str]:
    best = min((found[name]["tensor"] for name in peers), default=None)
    one = found["one rank"]
    for name, figures in found.items():
        if name in peers:
            continue
        bounds = [("element", ELEMENT)]
        if best is not None:
            bounds.append(("tensor", TO_PEERS * best))
        if name != "one rank":
            bounds += [("tensor", RANKS_TO_ONE * one["tensor"]), ("element", ELEMENT_TO_ONE * one["element"])]
        for measure, bound in bounds:
            if not figures[measure] <= bound:
                yield f"{name}: {measure} {figures[measure]:.2e} > {bound:.2e}"


def table(record: Mapping[str, Any]) -> Table:
    measures = list(record["rows"][0]["errors"]["one rank"])
    shown = Table("decay", "side", *measures, "out of bounds")
    for row in record["rows"]:
        for i, (side, figures) in enumerate(row["errors"].items()):
            cells = (f"{figures[measure]:.2e}" if measure in figures else "" for measure in measures)
            shown.add_row("" if i else row["decay"], side, *cells, "" if i else "; ".join(row["out"]) or "no")
    return shown


def main(
    pack: Annotated[str, typer.Option(help="A pack by name.")] = "P4",
    peers: Annotated[str, typer.Option(help=f"Some of {', '.join(PEERS)}, with commas between.")] = "",
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the record to a file.")] = None,
) -> None:
    """Compare forwards with float64 on a whole pack."""
    known = json.loads(files("deltaspan").joinpath("data/packs.json").read_text(encoding="utf-8"))["packs"]
    if pack not in known:
        typer.echo(f"error: --pack: unknown {pack!r}; known are {', '.join(known)}", err=True)
        raise typer.Exit(2)
    wished = peers.split(",") if peers else []
    if unknown := set(wished) - PEERS.keys():
        typer.echo(f"error: --peers: unknown {min(unknown)!r}; known are {', '.join(PEERS)}", err=True)
        raise typer.Exit(2)
    end_without_hopper()
    try:
        record = report(known[pack], peers=wished)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    Console(width=140).print(table(record))
    if json_to is not None:
        json_to.write_text(json.dumps(record) + "\n", encoding="utf-8")
    raise typer.Exit(1 if any(row["out"] for row in record["rows"]) else 0)


if __name__ == "__main__":
    typer.run(main)
