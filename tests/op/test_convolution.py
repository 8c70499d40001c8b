"""The convolution's bits: the same for every layout, for tensors together and one by one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import deltaspan as ds
from deltaspan.exchange import Program
from tests.helpers import same_bits
from tests.op.support import LAYOUTS, draw, join, leaf, run_convolution, simulate, split

LENGTHS = [20, 1, 0, 33, 2, 12]


class Counting(ds.SimulatedGroup):
    """Remembers how many collectives each run took."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.collectives: list[int] = []

    def run(self, programs: Sequence[Program]) -> list[Any]:
        self.collectives.append(0)

        def counted(program: Program) -> Program[Any]:
            arrived = None
            while True:
                try:
                    asked = program.send(arrived)
                except StopIteration as end:
                    return end.value
                self.collectives[-1] += 1
                arrived = yield asked

        return super().run([counted(program) for program in programs])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ["silu", None])
def test_rows_do_not_depend_on_the_layout(rng: torch.Generator, activation: str | None, dtype: torch.dtype) -> None:
    pack = draw(rng, LENGTHS, D=5).to(dtype)
    one = run_convolution(pack, simulate(ds.partition(pack.cu_seqlens, 1)), activation=activation)[0]
    for world_size in (1, 2, 3, 8):
        for layout in LAYOUTS:
            part = split(pack.cu_seqlens, world_size, layout, rng)
            found = join(part, run_convolution(pack, simulate(part), activation=activation))
            for name in ("y", "dx"):
                assert same_bits(found[name], one[name]), (name, layout, world_size)


def test_tensors_together_and_one_by_one(rng: torch.Generator) -> None:
    widths = [3, 1, 7]
    pack = draw(rng, LENGTHS, D=sum(widths)).to(torch.bfloat16)
    group = Counting(3)
    ctx = ds.build_context(split(pack.cu_seqlens, 3, "zigzag"), group, device="cpu")
    group.collectives.clear()
    split_up = [[x.split(widths, dim=-1) for x in ctx.shard(whole)] for whole in (pack.x, pack.dy)]
    xs, dys = ([[t.contiguous() for t in shard] for shard in shards] for shards in split_up)
    weights, biases = pack.weight.split(widths), pack.bias.split(widths)

    def step(x: list, weight: Any, bias: Any, dy: list[Tensor]) -> list[Tensor]:
        """All ranks' y and gradients, rank by rank; tuples go in together."""
        together = isinstance(weight, tuple)
        given = [[leaf(t) for t in (t if together else (t,))] for t in (*x, weight, bias)]
        operands = [tuple(t) if together else t[0] for t in given]
        y = ds.causal_conv1d(operands[: len(x)], operands[-2], ctx, bias=operands[-1])
        flat = [t for of_rank in y for t in (of_rank if together else (of_rank,))]
        return [*flat, *torch.autograd.grad(flat, [t for column in given for t in column], dy)]

    every = step([tuple(x) for x in xs], weights, biases, [t for of_rank in dys for t in of_rank])
    assert group.collectives == [3, 3]  # one of each rank, in either direction
    n = len(widths)
    for i in range(n):
        single = step([x[i] for x in xs], weights[i], biases[i], [dy[i] for dy in dys])
        assert all(map(same_bits, every[i::n], single))


def test_weights_for_each_rank_and_for_all(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag_per_document"))
    by_rank = run_convolution(pack, ctx)
    weight, bias = leaf(pack.weight), leaf(pack.bias)
    y = ds.causal_conv1d(ctx.shard(pack.x), weight, ctx, bias=bias)
    assert all(same_bits(a, b["y"]) for a, b in zip(y, by_rank, strict=True))
    for grad, name in zip(
        torch.autograd.grad(y, (weight, bias), ctx.shard(pack.dy)), ("dweight", "dbias"), strict=True
    ):
        assert torch.allclose(grad, by_rank[0][name] + by_rank[1][name], rtol=0, atol=1e-12)


def test_narrow_weights(rng: torch.Generator) -> None:
    """Are read in FP32, and their gradients arrive in their type."""
    pack = draw(rng, LENGTHS).to(torch.bfloat16)
    ctx = simulate(split(pack.cu_seqlens, 2, "contiguous"))
    narrow = pack._replace(weight=pack.weight.bfloat16(), bias=pack.bias.bfloat16())
    for a, b in zip(run_convolution(narrow, ctx), run_convolution(narrow.to(torch.bfloat16), ctx), strict=True):
        assert same_bits(a["y"], b["y"]) and same_bits(a["dx"], b["dx"])
        assert same_bits(a["dweight"], b["dweight"].bfloat16()) and same_bits(a["dbias"], b["dbias"].bfloat16())
