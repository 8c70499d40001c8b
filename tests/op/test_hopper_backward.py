"""The Hopper tier's backward through the public calls, on a GPU and on the emulator: exact to bf16, the same bits by
every exchange, from a checkpoint, and by the explicit call."""

import json
from importlib.resources import files

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from tests.helpers import same_bits
from tests.op.hopper import drawn
from tests.op.raw import ALL, draw_raw
from tests.op.support import LAYOUTS, Pack, differing, join, leaf, listed, run_rule, split, true_rule

LENGTHS = [700, 1, 0, 799, 64, 63, 1300, 130]
FEW = [130, 1, 0, 70]  # for the emulator
# Five to eight roundings to bf16 as the tests of the kernel have it, and those of the chunks before and behind.
BF16 = 8e-3
# Where little decays dg is <D, S> at every chunk: less than |D| |S| / 128 or more, with the roundings of all of that.
BOUNDS = {"dg": 2e-2}


def context(part: ds.Partition, device: str, **plan) -> ds.Context:
    return ds.build_context(part, ds.SimulatedGroup(part.world_size), device=device, **plan)


def exact(pack: Pack, ctx: ds.Context, **options) -> dict[str, torch.Tensor]:
    found = join(ctx.part, run_rule(pack, ctx, backend="hopper", **options))
    on_host = pack._replace(**{name: getattr(pack, name).cpu() for name in pack._fields[1:]})
    truth = true_rule(on_host)
    # <D, S> is a sum of K V terms that may cancel, as it did by chance in a document of one token that little decays in
    # while all else does: what it errs by is that of |D| |S| / 128, whatever is left of it.
    some = torch.tensor(pack.cu_seqlens).diff() > 0
    summed = [x[some].double().norm(dim=(2, 3)) for x in (on_host.initial_state, truth["dinitial_state"])]
    beside = {"dg": (summed[0] * summed[1] / 128).norm()}
    for name, true in truth.items():
        error = (found[name].cpu().double() - true).norm() / true.norm().hypot(beside.get(name, true.new_zeros(())))
        assert error < BOUNDS.get(name, BF16), name
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["moderate", "slow", "zero", "strong", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(rng: torch.Generator, layout: str, decay: str) -> None:
    pack = drawn(rng, LENGTHS, "cuda", decay)
    for world_size in (1, 3):
        part = split(pack.cu_seqlens, world_size, layout, rng)
        for plan in ({"p_rule": "one"}, {"p_rule": "occ", "sm_count": 300}):
            ctx = context(part, "cuda", **plan)
            found = exact(pack, ctx)
            for exchange in ("ring", "all_gather"):
                other = join(part, run_rule(pack, ctx, backend="hopper", exchange=exchange))
                assert not differing(other, found), (world_size, plan, exchange)


def test_one_token_of_a_wider_row(hopper: str, rng: torch.Generator) -> None:
    """Along an axis of length 1 any stride is dense to torch: kernels take strides by the word."""
    pack = drawn(rng, [1], hopper)
    ctx = ds.build_context(ds.partition([0, 1], 1), device=hopper)
    gates = torch.stack([pack.g, pack.beta], dim=-2).flatten(-2)  # [1, T, 2 HV], as a projection gives both
    rows = [x.new_empty(1, 2, *x.shape[2:]).copy_(x)[:, :1] for x in (pack.q, pack.k, pack.v)]
    apart = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in rows]
    strided = *apart, *gates.unflatten(-1, (2, -1)).unbind(-2)
    assert strided[4].stride(1) == 2 * pack.beta.shape[2]
    found = []
    for operands in (pack[1:6], strided):
        leaves = [x.detach().requires_grad_() for x in operands]
        o = ds.chunk_gated_delta_rule(*(x for x in leaves), ctx, backend="hopper")[0]
        found.append((o, *torch.autograd.grad(o.float().square().sum(), leaves)))
    assert all(map(same_bits, *found))


@pytest.mark.gpu
def test_a_whole_pack_gives_the_same_bits_a_hundred_times(rng: torch.Generator) -> None:
    """Long enough that every multiprocessor is busy all along, as a race wants it."""
    packs = json.loads(files("deltaspan").joinpath("data/packs.json").read_text(encoding="utf-8"))["packs"]
    pack = drawn(rng, packs["P1"], "cuda", "slow", H=2, HV=6)
    part = split(pack.cu_seqlens, 4, "zigzag", rng)
    ctx = context(part, "cuda")
    first = join(part, run_rule(pack, ctx, backend="hopper"))
    for i in range(100):
        found = join(part, run_rule(pack, ctx, backend="hopper"))
        assert not differing(found, first), i


@pytest.mark.parametrize(
    ("layout", "decay", "exchanges"),
    [
        ("contiguous", "moderate", ["ring"]),  # one seam, over which nothing is composed
        ("zigzag", "slow", ["ring", "all_gather"]),
        pytest.param("contiguous", "moderate", ["all_gather"], marks=pytest.mark.slow),
    ],
)
def test_gradients_in_few_chunks(
    hopper: str, rng: torch.Generator, layout: str, decay: str, exchanges: list[str]
) -> None:
    pack = drawn(rng, FEW, hopper, decay, H=1, HV=2)
    part = split(pack.cu_seqlens, 2, layout, rng)
    ctx = context(part, hopper, p_rule="occ", sm_count=60)
    found = exact(pack, ctx)
    for exchange in exchanges:
        assert not differing(join(part, run_rule(pack, ctx, backend="hopper", exchange=exchange)), found)


def test_checkpoint_and_explicit_call(hopper: str, rng: torch.Generator) -> None:
    """The bits of a step that keeps everything, and with a handle nothing is sent twice."""
    pack = drawn(rng, [70, 0, 9], hopper, H=1, HV=1)
    ctx = context(split(pack.cu_seqlens, 2, "zigzag", rng), hopper)
    shards = [listed(ctx, ctx.shard(x)) for x in pack[1:6]]
    dos = listed(ctx, ctx.shard(pack.do))

    def step(how) -> list[torch.Tensor]:
        leaves = [[leaf(x) for x in of_ranks] for of_ranks in shards]
        flat = [x for of_ranks in leaves for x in of_ranks]
        o = how(flat)
        return [t.detach() for t in (*o, *torch.autograd.grad(o, flat, dos))]

    def call(*flat, handle=None) -> list[torch.Tensor]:
        operands = [list(flat[2 * i : 2 * i + 2]) for i in range(5)]
        return ds.chunk_gated_delta_rule(*operands, ctx, backend="hopper", recompute_handle=handle)[0]

    plain = step(lambda flat: call(*flat))
    recomputed = step(lambda flat: checkpoint(call, *flat, use_reentrant=False))
    handle = ds.RecomputeHandle()
    handled = step(lambda flat: checkpoint(lambda *x: call(*x, handle=handle), *flat, use_reentrant=False))
    assert all(map(same_bits, recomputed, plain)) and all(map(same_bits, handled, plain))
    o, _, saved = ds.forward(*shards, ctx, backend="hopper")
    explicit = ds.backward(*shards, ctx, dos, saved=saved, backend="hopper")
    by_rank = zip(*(plain[2 + 2 * i : 4 + 2 * i] for i in range(5)), strict=True)
    for rank, expected in enumerate(by_rank):
        assert same_bits(o[rank], plain[rank])
        assert all(map(same_bits, explicit[rank][:5], expected))


def test_raw_operands(hopper: str, rng: torch.Generator) -> None:
    """As the torch tier in FP64, from the same bf16 operands."""
    raw = draw_raw(rng, FEW, ALL, H=1, HV=2, K=128, V=128).to(torch.bfloat16, raw=torch.bfloat16)
    grads = {}
    for dtype, backend, device in ((torch.bfloat16, "hopper", hopper), (torch.float64, "torch", "cpu")):
        leaves = [leaf(getattr(raw.pack, name).to(device, dtype)) for name in ("q", "k", "v", "g", "beta")]
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        gates = [leaf(x.to(device, wide)) for x in (raw.A_log, raw.dt_bias)]
        ctx = context(ds.partition(raw.pack.cu_seqlens, 1), device)
        o, _ = ds.chunk_gated_delta_rule(
            *([x] for x in leaves), ctx, A_log=[gates[0]], dt_bias=[gates[1]], backend=backend, **ALL
        )
        grads[backend] = torch.autograd.grad(o[0], [*leaves, *gates], raw.pack.do.to(device, dtype))
    # the last two are sums over tokens that may cancel: they err by what the root of their terms' squares does
    x, of_tokens = (raw.pack.g + raw.dt_bias).double(), grads["torch"][3].view(raw.pack.g.shape)
    terms = {"A_log": of_tokens * torch.nn.functional.softplus(x) / x.sigmoid(), "dt_bias": of_tokens}
    for name, found, true in zip(("q", "k", "v", "g", "beta", "A_log", "dt_bias"), *grads.values(), strict=True):
        size = true.norm().hypot(terms[name].norm()) if name in terms else true.norm()
        assert (found.cpu().double() - true).norm() < 2 * BF16 * size, name
