"""Errors of narrow operands, judged as deltaspan promises: against FP64 of the same rounded operands, over 4,096
tokens."""

import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import deltaspan as ds
from deltaspan.kernels.torch.chunks import full_precision
from deltaspan.reference import chunked_gated_delta_rule
from tests.op.support import (
    Pack,
    draw,
    join,
    relative_error,
    run_convolution,
    run_rule,
    simulate,
    split,
    true_convolution,
    true_rule,
)

LENGTHS = [1500, 700, 1, 1024, 871]
SPLITS = [("contiguous", 2), ("zigzag", 4), ("zigzag_per_document", 3), ("ragged", 4)]
NARROW = {"o", "dq", "dk", "dv", "y", "dx"}  # in the operands' type; the rest is FP32
BY_HEAD = {"o", "dq", "dk", "dv", "dg", "dbeta"}
BY_STATE = {"final_state", "dinitial_state"}

# Some hundred FP32 roundings of 6e-8 in a sum leave a few of them in its result. Below this the degrees of context
# parallelism differ only in which roundings happen: the dg of a chunk share one sum's error, so that those of 4,096
# tokens are but 64 draws.
FP32 = 1e-6


def tolerance(name: str, dtype: torch.dtype) -> float:
    """Of the relative RMS. One rounding errs by at most eps / 2 in the mantissa and is uniform: eps / 2 / sqrt(3) of a
    mantissa of at least 1, after FP32 arithmetic."""
    return FP32 + (torch.finfo(dtype).eps / 2 / 3**0.5 if name in NARROW else 0)


def results(pack: Pack, part: ds.Partition) -> dict[str, Tensor]:
    ctx = simulate(part)
    return join(part, run_rule(pack, ctx)) | join(part, run_convolution(pack, ctx))


def pieces(name: str, x: Tensor, cu_seqlens: list[int]) -> Iterator[Tensor]:
    """By document and head, the convolution's rows by document, the parameters' gradients whole."""
    if name in BY_STATE:
        yield from x.flatten(0, 1)
    elif name in BY_HEAD:
        yield from (head for a, b in pairwise(cu_seqlens) for head in x[0, a:b].unbind(1))
    elif name in NARROW:
        yield from (x[0, a:b] for a, b in pairwise(cu_seqlens))
    else:
        yield x


def worst(name: str, found: Tensor, truth: Tensor, cu_seqlens: list[int]) -> float:
    """The largest |found - truth| / (r + |truth|), r the RMS of the truth within its document and head."""
    both = zip(pieces(name, found.double(), cu_seqlens), pieces(name, truth, cu_seqlens), strict=True)
    return max(((f - t).abs() / (t.square().mean().sqrt() + t.abs())).max().item() for f, t in both)


@pytest.mark.parametrize("decay", ["moderate", "slow"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def test_error(rng: torch.Generator, dtype: torch.dtype, decay: str) -> None:
    pack = draw(rng, LENGTHS, K=32, V=32, D=32, decay=decay).to(dtype)
    truth = true_rule(pack, chunked_gated_delta_rule) | true_convolution(pack)
    one = results(pack, split(pack.cu_seqlens, 1, "contiguous"))
    alone = {name: relative_error(one[name], truth[name]) for name in truth}
    for layout, world_size in [("contiguous", 1), *SPLITS]:
        found = results(pack, split(pack.cu_seqlens, world_size, layout, rng))
        assert found.keys() == truth.keys()
        for name in truth:
            where = f"{name} of {layout} on {world_size}"
            rms, largest = relative_error(found[name], truth[name])
            assert rms <= tolerance(name, dtype), where
            assert worst(name, found[name], truth[name], pack.cu_seqlens) <= 2e-2, where
            assert rms <= max(1.1 * alone[name][0], FP32), where
            assert largest <= max(1.5 * alone[name][1], 30 * FP32), where  # a dg is some 100 times the RMS
            assert found[name].dtype == (dtype if name in NARROW else torch.float32), where


def test_beta_in_bf16(rng: torch.Generator) -> None:
    """Is FP32 of the same value, and its gradient arrives in its type."""
    pack = draw(rng, [70, 30]).to(torch.bfloat16)
    narrow = pack._replace(beta=pack.beta.bfloat16())
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    for wide, found in zip(run_rule(narrow.to(torch.bfloat16), ctx), run_rule(narrow, ctx), strict=True):
        assert found.pop("dbeta").equal(wide.pop("dbeta").bfloat16())
        assert all(found[name].equal(wide[name]) for name in wide)


def test_threads_leave_the_setting_as_it_was(rng: torch.Generator) -> None:
    """Whoever enters last and leaves first: FP32 inside, the process's own setting when all are out."""
    backend = torch.backends.mkldnn.matmul
    before, inside = backend.fp32_precision, []
    backend.fp32_precision = "tf32"
    first, last = threading.Event(), threading.Event()

    def stage(wait_for: threading.Event, say: threading.Event) -> None:
        with full_precision():
            say.set()
            wait_for.wait(10)
            inside.append(backend.fp32_precision)

    try:
        threads = [threading.Thread(target=stage, args=pair) for pair in ((last, first), (first, last))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert inside == ["ieee", "ieee"] and backend.fp32_precision == "tf32"
    finally:
        backend.fp32_precision = before
