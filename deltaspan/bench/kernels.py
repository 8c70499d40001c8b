"""Kernels by themselves on a GPU: device time beside a copy of the bytes that they must move at least.

    python -m deltaspan.bench.kernels [--json FILE]

Prep, and the convolution of a packed q | k | v row. Each is captured in a CUDA graph, so that no launch of the host
stands between; checked against FP64 before it is timed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import deltaspan as ds
from deltaspan.bench.facts import commit, end_without_hopper, machine, versions
from deltaspan.bench.operands import HEAD_DIM, Operands, draw
from deltaspan.bench.shards import LOCAL_SHARDS, Shard, local_shard
from deltaspan.plan import chunk_grid
from deltaspan.reference import causal_conv1d

HEADS = (16, 48)
TAPS = 4
ROUNDS, REPEATS = 15, 8
CHECKED_CHUNKS = 16  # of prep
CHECKED_CHANNELS = 64  # of the convolution
FLOOR_EXCESS = 1.05  # of the error of rounding the exact result to bf16: fp32-class arithmetic adds next to nothing


def report(shards: list[str], *, seed: int = 0) -> dict[str, Any]:
    """By shard and kernel: its time, that of a copy of its bytes, and its error beside that of rounding to bf16."""
    rows = [row(local_shard(name), seed) for name in shards for row in (prep_row, convolution_row)]
    return {"machine": machine("cuda"), "versions": versions([]), "commit": commit(), "rows": rows}


def prep_row(shard: Shard, seed: int) -> dict[str, Any]:
    prep = import_module("deltaspan.kernels.hopper.prep").prep
    grid = chunk_grid(shard.part, 0)
    chunks = torch.tensor(list(zip(grid.start, grid.length, strict=True)), dtype=torch.int32, device="cuda")
    x = draw(shard.part.total_tokens, HEADS, "moderate", device="cuda", seed=seed)
    given = x.k[0], x.g[0], x.beta[0]
    made = prep(*given, chunks)
    return _row("prep", shard, partial(prep, *given, chunks), (*given, *made[:4]), _errors(x, chunks, made.A))


def convolution_row(shard: Shard, seed: int) -> dict[str, Any]:
    H, HV = HEADS
    D, numbers = (2 * H + HV) * HEAD_DIM, torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shard.part.total_tokens, D, generator=numbers, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(D, TAPS, generator=numbers, device="cuda") / TAPS
    ctx = ds.build_context(shard.part, device="cuda", conv_kernel_size=TAPS)
    call = partial(ds.causal_conv1d, x, weight, ctx, backend="hopper")
    y = call()
    return _row("convolution", shard, call, (x, weight, y), convolution_errors(x, weight, shard.part.cu_seqlens, y))


def _row(
    kernel: str, shard: Shard, call: Callable[[], object], moved: Iterable[Tensor], errors: tuple[float, float]
) -> dict[str, Any]:
    """moved: what the call reads or writes at least."""
    size, (error, floor) = sum(t.numel() * t.element_size() for t in moved), errors
    # Read once, written once, by a kernel: as a node of a graph a copy goes another, slower way.
    source = torch.randn(size // 8, device="cuda")
    kernel_ms, copy_ms = graph_times(call, partial(torch.neg, source, out=torch.empty_like(source)))
    return {
        "kernel": kernel, "shard": shard.name, "tokens": shard.part.total_tokens, "gigabytes": size / 1e9,
        "kernel_ms": kernel_ms, "copy_ms": copy_ms, "ratio": kernel_ms / copy_ms, "error": error, "floor": floor,
        "ok": error <= FLOOR_EXCESS * floor,
    }  # fmt: skip


def convolution_errors(x: Tensor, weight: Tensor, cu_seqlens: Sequence[int], y: Tensor) -> tuple[float, float]:
    """Relative RMS of y [T, D] against FP64 in some channels, and that of the exact y rounded to its type."""
    some = slice(None, None, max(1, x.shape[1] // CHECKED_CHANNELS))
    exact = causal_conv1d(x[:, some], weight[some], cu_seqlens)
    found, rounded = ((t.double() - exact).norm() / exact.norm() for t in (y[:, some], exact.to(y.dtype)))
    return found.item(), rounded.item()


def _errors(x: Operands, chunks: Tensor, A: Tensor) -> tuple[float, float]:
    """Relative RMS of A against FP64 over some chunks, and that of the exact A rounded to bf16."""
    which = torch.linspace(0, len(chunks) - 1, min(CHECKED_CHUNKS, len(chunks))).long().unique().tolist()
    group, errors, roundings, size = x.v.shape[2] // x.k.shape[2], 0.0, 0.0, 0.0
    for c in which:
        start, n = chunks[c].tolist()
        k = x.k[0, start : start + n].double().transpose(0, 1).repeat_interleave(group, 0)
        beta = x.beta[0, start : start + n].double().mT
        eye = torch.eye(n, dtype=torch.float64, device=k.device)
        exact = torch.linalg.inv(eye + (beta[..., None] * (k @ k.mT)).tril(-1)) * beta[:, None]
        errors += (A[:, c, :n, :n].double() - exact).square().sum().item()
        roundings += (exact.to(A.dtype).double() - exact).square().sum().item()
        size += exact.square().sum().item()
    return math.sqrt(errors / size), math.sqrt(roundings / size)


def graph_times(*calls: Callable[[], object], rounds: int = ROUNDS, repeats: int = REPEATS) -> list[float]:
    """Median milliseconds of each call on the device, in turns: of so many samples, and launches in each."""
    graphs = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        graph.replay()
        graphs.append(graph)
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for graph, ms in zip(graphs, taken, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            ms.append(begin.elapsed_time(end) / repeats)
    return [median(ms) for ms in taken]


def table(record: dict[str, Any]) -> Table:
    shown = Table("kernel", "shard", "ms", "copy ms", "ratio", "TB/s", "error", "bf16 floor", "ok")
    for row in record["rows"]:
        rate = row["gigabytes"] / row["kernel_ms"]
        shown.add_row(
            row["kernel"], row["shard"], f"{row['kernel_ms']:.3f}", f"{row['copy_ms']:.3f}", f"{row['ratio']:.2f}",
            f"{rate:.2f}", f"{row['error']:.2e}", f"{row['floor']:.2e}", "yes" if row["ok"] else "NO",
        )  # fmt: skip
    return shown


def main(
    shards: Annotated[str, typer.Option(help="all, or names of local shards, with commas between.")] = "all",
    json_to: Annotated[Path | None, typer.Option("--json", help="Write the record to a file.")] = None,
) -> None:
    """Time kernels against a copy of their bytes."""
    names = list(LOCAL_SHARDS) if shards == "all" else shards.split(",")
    try:
        for name in names:
            local_shard(name)  # a wrong name is told at once
    except ValueError as error:
        typer.echo(f"error: --{error}", err=True)
        raise typer.Exit(2) from None
    end_without_hopper()
    record = report(names)
    Console(width=140).print(table(record))
    if json_to is not None:
        json_to.write_text(json.dumps(record) + "\n", encoding="utf-8")
    raise typer.Exit(0 if all(row["ok"] for row in record["rows"]) else 1)


if __name__ == "__main__":
    typer.run(main)
