"""A group of ranks, right and timed, over NCCL with a GPU for every rank, or over gloo on CPUs.

    torchrun --nproc-per-node 2 -m deltaspan.bench.group [--parts verify,steps,graphs,wire] [--pack P1,P4]
        [--heads 16,48] [--decay moderate] [--backend hopper] [--samples 8] [--seed 0] [--device cuda] [--json FILE]

Exit 0 if every check holds, on all ranks alike. docs/cluster.md says what the parts are and how to read the record.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import deltaspan as ds
from deltaspan.bench.check import BOUND
from deltaspan.bench.facts import commit, machine, versions
from deltaspan.bench.files import claim
from deltaspan.bench.group.checks import verified
from deltaspan.bench.group.graphs import NOT_RUN, captured, probed
from deltaspan.bench.group.launch import Member, joined
from deltaspan.bench.group.report import document
from deltaspan.bench.group.steps import Asked, measured
from deltaspan.bench.operands import REGIMES
from deltaspan.bench.timing import FEWEST_SAMPLES
from deltaspan.kernels.select import has_hopper
from deltaspan.plan import NVLINK
from deltaspan.verify import Report

PARTS = ("verify", "steps", "graphs", "wire")
TOY = {"toy": [300, 1, 0, 170]}  # what a CPU does in seconds
DEFAULTS = {"cuda": ("P1,P4", "16,48"), "cpu": ("toy", "1,2")}  # packs and heads


def run(member: Member, packs: dict[str, list[int]], parts: Sequence[str], asked: Asked, json_to: Path | None) -> bool:
    """All parts; rank 0 writes the record after every row. Returns whether all holds."""
    record = {
        "machine": machine(member.device.type) | {"hosts": len(set(member.gather(socket.gethostname())))},
        "versions": versions([]) | {"nccl": _nccl(member)},
        "commit": commit(),
        "world_size": member.world_size,
        "over": member.backend,
        "gpus": member.gather(_gpu(member)),
        **asked._asdict(),
        "bound": BOUND,
        "model": NVLINK._asdict(),
        "parts": list(parts),
        "checks": [],
        "rows": [],
        "graphs": {"not_run": NOT_RUN if member.backend == "gloo" else None, "rows": []},
        "wire": None,
    }
    checks = []

    def tell(text: str) -> None:
        if member.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def write() -> None:
        record["ok"] = all(row["ok"] for row in (*record["checks"], *record["rows"], *record["graphs"]["rows"]))
        if member.rank == 0 and json_to is not None:
            json_to.write_text(json.dumps(record) + "\n", encoding="utf-8")
            json_to.with_suffix(".md").write_text(document(record), encoding="utf-8")

    write()
    if "verify" in parts:
        for rows in verified(member, asked.seed, tell):
            checks += rows
            record["checks"] = Report({}, checks, asked.seed).to_json()["checks"]
            write()
    if "steps" in parts:
        for row in measured(member, packs, asked, tell):
            record["rows"].append(row)
            write()
    if "graphs" in parts and member.backend == "nccl":
        name = next(iter(packs))
        for row in captured(member, name, packs[name], asked, tell):
            record["graphs"]["rows"].append(row)
            write()
    if "wire" in parts and member.world_size > 1:
        record["wire"] = probed(member, asked.samples, tell)
        write()
    if member.rank == 0:
        print(document(record))
    return all(member.gather(record["ok"]))


def _run_or_end(*given: Any) -> bool:
    try:
        return run(*given)
    except Exception:
        traceback.print_exc()
        os._exit(1)  # at once: the others are out of step, and to leave the group properly may hang


def _gpu(member: Member) -> str | None:
    return torch.cuda.get_device_name(member.device) if member.device.type == "cuda" else None


def _nccl(member: Member) -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if member.backend == "nccl" else None


def _packs(names: str) -> dict[str, list[int]]:
    known = json.loads(files("deltaspan").joinpath("data/packs.json").read_text(encoding="utf-8"))["packs"] | TOY
    if unknown := set(names.split(",")) - known.keys():
        raise ValueError(f"--pack must be some of {', '.join(known)}, got {min(unknown)!r}")
    return {name: known[name] for name in names.split(",")}


def _asked(member: Member, heads: str, decay: str, backend: str | None, samples: int, seed: int) -> Asked:
    H, _, HV = heads.partition(",")
    if not (H.isdecimal() and HV.isdecimal() and int(H) and int(HV) and int(HV) % int(H) == 0):
        raise ValueError(f"--heads must be H,HV, two numbers from 1 on and HV a multiple of H, got {heads!r}")
    if decay not in REGIMES:
        raise ValueError(f"--decay must be one of {', '.join(REGIMES)}, got {decay!r}")
    if samples < FEWEST_SAMPLES:
        raise ValueError(f"--samples must be at least {FEWEST_SAMPLES}, got {samples}")
    if seed < 0:
        raise ValueError(f"--seed must be at least 0, got {seed}")
    backend = backend or ("hopper" if has_hopper(member.device) else "torch")
    served = ds.chosen_backend(backend, device=member.device, group=int(HV) // int(H))
    return Asked((int(H), int(HV)), decay, served, samples, seed)


def _refusal(member: Member, json_to: Path | None) -> str | None:
    """Why rank 0, which writes it, cannot write the record."""
    if member.rank == 0 and json_to is not None:
        try:
            claim({"--json": json_to, "the page beside it": json_to.with_suffix(".md")})
        except (ValueError, OSError) as error:
            return str(error)
    return None


def main(
    parts: Annotated[str, typer.Option(help=f"Some of {', '.join(PARTS)}, with commas between.")] = ",".join(PARTS),
    pack: Annotated[str | None, typer.Option(help="Packs by name, such as P1,P4; graphs take the first.")] = None,
    heads: Annotated[str | None, typer.Option(help="Key heads and value heads.")] = None,
    decay: Annotated[str, typer.Option(help=f"One of {', '.join(REGIMES)}.")] = "moderate",
    backend: Annotated[str | None, typer.Option(help="A tier by name; default: hopper where it runs.")] = None,
    samples: Annotated[int, typer.Option(help="Of each time, after warming up.")] = FEWEST_SAMPLES,
    seed: Annotated[int, typer.Option(help="Of cases and operands.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")] = None,
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the record, and a page beside it.")] = None,
) -> None:
    """Verify and time a group of ranks."""
    try:
        wished = parts.split(",")
        if unknown := set(wished) - set(PARTS):
            raise ValueError(f"--parts must be some of {', '.join(PARTS)}, got {min(unknown)!r}")
        with joined(device) as member:
            usual = DEFAULTS[member.device.type]
            packs = _packs(pack or usual[0])
            asked = _asked(member, heads or usual[1], decay, backend, samples, seed)
            if refusal := member.gather(_refusal(member, json_to))[0]:
                raise ValueError(refusal)
            ok = _run_or_end(member, packs, wished, asked, json_to)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if ok else 1)


if __name__ == "__main__":
    typer.run(main)
