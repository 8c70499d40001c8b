"""The convolution's bits: the same for every layout, for tensors together and one by one; which tier serves it."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from deltaspan.exchange import Program, one_by_one
from deltaspan.kernels import select
from tests.emulator import load
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

        return super().run([counted(one_by_one(program)) for program in programs])


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


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.dtype]]:
    """The Hopper tier on the CPU, its kernels on the emulator; the types of rows that it was given, call by call."""
    served, tier, seen = select.tier, load("deltaspan.kernels.hopper.tier"), []
    kernel = tier.convolve

    def convolve(x: Tensor, *rest: Any) -> Tensor:
        seen.append(x.dtype)
        return kernel(x, *rest)

    tier.convolve = convolve
    monkeypatch.setattr(select, "_not_on", lambda device: None)
    monkeypatch.setattr(select, "_without_triton", lambda: None)
    monkeypatch.setattr(select, "tier", lambda name: tier if name == "hopper" else served(name))
    select._chosen_for_convolution.cache_clear()
    yield seen
    select._chosen_for_convolution.cache_clear()


def assert_near(y: Tensor, other: Tensor) -> None:
    """But for a rounding each to y's type, and in fp32 those of five sums of up to 50 and a few of silu."""
    torch.testing.assert_close(y, other, rtol=2 * torch.finfo(y.dtype).eps + 2**-20, atol=5 * 50 * 2**-24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_serves_the_forward(emulated: list, rng: torch.Generator, dtype: torch.dtype) -> None:
    """y to a rounding of its type, the same bits for every layout; the backward is the torch tier's, to the bit."""
    pack = draw(rng, LENGTHS, D=5).to(dtype)
    found = {}
    for name, part in {
        "one": ds.partition(pack.cu_seqlens, 1),
        "many": split(pack.cu_seqlens, 3, "ragged", rng),
    }.items():
        by_rank = {b: run_convolution(pack, simulate(part), backend=b) for b in ("auto", "hopper", "torch")}
        assert emulated == [dtype] * 2 * part.world_size
        emulated.clear()
        for auto, hopper, torchs in zip(*by_rank.values(), strict=True):
            assert all(same_bits(auto[n], hopper[n]) for n in auto)
            assert all(same_bits(hopper[n], torchs[n]) for n in ("dx", "dweight", "dbias"))
            assert_near(hopper["y"], torchs["y"])
        found[name] = join(part, by_rank["hopper"])
    assert same_bits(found["many"]["y"], found["one"]["y"])


def test_a_checkpoint_computes_again_by_the_kernel(emulated: list, rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS, D=5).to(torch.bfloat16)
    ctx = simulate(ds.partition(pack.cu_seqlens, 1))
    grads = []

    def squares(x: Tensor) -> Tensor:
        return ds.causal_conv1d([x], pack.weight, ctx, backend="hopper")[0].square()  # whose backward reads y

    for reentrant in (None, True, False):
        x = leaf(pack.x)
        y = squares(x) if reentrant is None else checkpoint(squares, x, use_reentrant=reentrant)
        y.backward(pack.dy)
        grads.append(x.grad)
    assert len(emulated) == 5
    assert same_bits(grads[0], grads[1]) and same_bits(grads[0], grads[2])


def test_what_the_kernel_does_not_serve(emulated: list, rng: torch.Generator) -> None:
    for dtype, taps, says in (
        (torch.float64, 4, "bf16, fp16 and fp32 rows, not torch.float64"),
        (torch.bfloat16, 9, "up to 8 taps, not 9"),
    ):
        pack = draw(rng, LENGTHS, taps=taps).to(dtype)
        ctx = simulate(ds.partition(pack.cu_seqlens, 1), conv_kernel_size=taps)
        assert same_bits(run_convolution(pack, ctx)[0]["y"], run_convolution(pack, ctx, backend="torch")[0]["y"])
        with pytest.raises(ValueError, match=rf"backend 'hopper' serves {says}; backend='torch' does"):
            run_convolution(pack, ctx, backend="hopper")
    assert emulated == []


def test_backends_that_are_refused(rng: torch.Generator) -> None:
    pack = draw(rng, LENGTHS).to(torch.bfloat16)
    ctx = simulate(ds.partition(pack.cu_seqlens, 1))
    with pytest.raises(ValueError, match=r"compute capability 9\.0, not on cpu"):
        run_convolution(pack, ctx, backend="hopper")
    for backend in ("cuda", None, ["auto"]):
        with pytest.raises(ValueError, match="backend must be one of"):
            run_convolution(pack, ctx, backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_capture_and_no_wait(rng: torch.Generator, dtype: torch.dtype) -> None:
    """A captured call gives the eager one's bits, and none waits for the device. Two tensors, columns of one row."""
    pack = draw(rng, [700, 1, 0, 799, 64], D=320).to(dtype)
    ctx = ds.build_context(split(pack.cu_seqlens, 3, "zigzag"), ds.SimulatedGroup(3))
    parts = [tuple(x.cuda().split([256, 64], dim=-1)) for x in ctx.shard(pack.x.cuda())]
    weights, biases = (tuple(t.cuda().split([256, 64])) for t in (pack.weight, pack.bias))

    def call(backend: str) -> list[Tensor]:
        return [y for ys in ds.causal_conv1d(parts, weights, ctx, bias=biases, backend=backend) for y in ys]

    eager = call("hopper")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = call("hopper")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call("hopper")
    for y in captured:
        y.fill_(torch.nan)
    graph.replay()
    for first, *others, near in zip(eager, again, captured, call("torch"), strict=True):
        assert all(same_bits(first, other) for other in others)
        assert_near(first, near)
