"""What the kernels' benchmark judges and how it shows it; what it times needs a GPU."""

import pytest
import torch
from typer.testing import CliRunner

import deltaspan as ds
from deltaspan.bench import kernels
from deltaspan.bench.shards import local_shard


def test_the_error_of_a_convolution_is_told_from_its_roundings(rng: torch.Generator) -> None:
    D = 2 * kernels.CHECKED_CHANNELS + 1  # every second one is checked
    x, weight = torch.randn(90, D, generator=rng).bfloat16(), torch.randn(D, 4, generator=rng)
    part = ds.partition([0, 50, 90], 1)
    y = ds.causal_conv1d(x, weight, ds.build_context(part, device="cpu"))
    error, floor = kernels.convolution_errors(x, weight, part.cu_seqlens, y)
    assert 1e-3 < floor < 2**-8 and error <= kernels.FLOOR_EXCESS * floor
    y[51, 2] += 0.25  # a history row of the wrong document in one channel
    error, same = kernels.convolution_errors(x, weight, part.cu_seqlens, y)
    assert same == floor and error > kernels.FLOOR_EXCESS * floor


def test_the_table_shows_every_row() -> None:
    row = {
        "shard": "2x70",
        "gigabytes": 3.0,
        "kernel_ms": 1.5,
        "copy_ms": 1.0,
        "ratio": 1.5,
        "error": 2e-3,
        "floor": 1e-3,
    }
    rows = [{"kernel": "prep", **row, "ok": True}, {"kernel": "convolution", **row, "ok": False}]
    shown = kernels.table({"rows": rows})
    columns = {column.header: list(column.cells) for column in shown.columns}
    assert columns["kernel"] == ["prep", "convolution"] and columns["ok"] == ["yes", "NO"]
    assert columns["TB/s"] == ["2.00", "2.00"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_it_says_what_it_needs() -> None:
    app = kernels.typer.Typer()
    app.command()(kernels.main)
    for options, says in (["--shards", "P9"], "P4/16"), ([], "compute capability 9.0"):
        done = CliRunner().invoke(app, options)
        assert done.exit_code == 2 and says in done.stderr


@pytest.mark.gpu
def test_rows_on_a_gpu() -> None:
    for row, name in (kernels.prep_row, "prep"), (kernels.convolution_row, "convolution"):
        made = row(local_shard("2x500"), 0)
        assert made["kernel"] == name and made["ok"] and made["kernel_ms"] > 0 and made["copy_ms"] > 0
