"""Inputs that broke others, as their users reported them; the numbers in the names are the order of that list."""

import gc
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

import deltaspan as ds
from deltaspan.reference import chunked_gated_delta_rule, recurrent_gated_delta_rule
from tests.helpers import same_bits
from tests.op.raw import ALL, GATE, draw_raw, join_raw, run_raw, some, true_raw
from tests.op.support import (
    LAYOUTS,
    PER_TOKEN,
    STATES,
    Pack,
    assert_exact,
    documents,
    draw,
    join,
    leaf,
    offsets,
    reduced_precision,
    relative_error,
    run_convolution,
    run_rule,
    simulate,
    split,
    true_convolution,
    true_rule,
)

PAIRS = [pytest.param(layout, d, id=f"{layout}-{d}") for layout, d in zip(LAYOUTS, (64, 128) * 2, strict=True)]


def run(pack: Pack, part: ds.Partition) -> dict[str, Tensor]:
    ctx = simulate(part)
    return join(part, run_rule(pack, ctx)) | join(part, run_convolution(pack, ctx))


def truth(pack: Pack) -> dict[str, Tensor]:
    return true_rule(pack, chunked_gated_delta_rule) | true_convolution(pack)


def of_documents(results: dict[str, Tensor], pack: Pack, first: int, stop: int) -> dict[str, Tensor]:
    """The results of some of a pack's documents; the parameters' gradients belong to none."""
    start, end = pack.cu_seqlens[first], pack.cu_seqlens[stop]
    results = {name: x for name, x in results.items() if name not in ("dweight", "dbias")}
    return {name: x[first:stop] if name in STATES else x[:, start:end] for name, x in results.items()}


@pytest.mark.parametrize(("layout", "dimension"), PAIRS)
def test_1_each_document_as_by_itself(rng: torch.Generator, layout: str, dimension: int) -> None:
    pack = draw(rng, [37, 51, 40], K=dimension, V=dimension)
    found = run(pack, split(pack.cu_seqlens, 2, layout, rng))
    for doc in range(3):
        alone = run(documents(pack, doc, doc + 1), ds.partition([0, (37, 51, 40)[doc]], 1))
        assert_exact(of_documents(found, pack, doc, doc + 1), of_documents(alone, documents(pack, doc, doc + 1), 0, 1))


@pytest.mark.parametrize(("layout", "dimension"), PAIRS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_2_a_change_stays_in_its_document(rng: torch.Generator, world_size: int, layout: str, dimension: int) -> None:
    pack, other = (draw(rng, [16, 16], K=dimension, V=dimension).to(torch.bfloat16) for _ in range(2))
    part = split(pack.cu_seqlens, world_size, layout, rng)
    before = run(pack, part)
    for changed, token in ((0, 15), (1, 16)):
        rows = {name: getattr(pack, name).clone() for name in PER_TOKEN}
        for name, x in rows.items():
            x[:, token] = getattr(other, name)[:, token]
        after = run(pack._replace(**rows), part)
        kept = 1 - changed
        was, now = (of_documents(r, pack, kept, kept + 1) for r in (before, after))
        assert [name for name in was if not same_bits(was[name], now[name])] == []
        was, now = (of_documents(r, pack, changed, changed + 1) for r in (before, after))
        assert [name for name in was if same_bits(was[name], now[name])] == []


@pytest.mark.parametrize(("layout", "dimension"), PAIRS)
@pytest.mark.parametrize("lengths", [[10], [2], [4, 6], [1, 1]])
def test_3_few_tokens_over_three_ranks(rng: torch.Generator, lengths: list[int], layout: str, dimension: int) -> None:
    pack = draw(rng, lengths, K=dimension, V=dimension)
    part = split(pack.cu_seqlens, 3, layout, rng)
    assert sorted(t for rank in range(3) for t in part.token_ids(rank).tolist()) == list(range(sum(lengths)))
    assert_exact(run(pack, part), truth(pack))


@pytest.mark.parametrize(("layout", "dimension"), PAIRS)
@pytest.mark.parametrize(("lengths", "world_size"), [([513, 511], 2), ([514, 510], 2), ([257, 255, 257, 255], 4)])
def test_4_documents_around_the_ranks_borders(
    rng: torch.Generator, lengths: list[int], world_size: int, layout: str, dimension: int
) -> None:
    pack = draw(rng, lengths, K=dimension, V=dimension)
    assert_exact(run(pack, split(pack.cu_seqlens, world_size, layout, rng)), truth(pack))


@pytest.mark.parametrize("sizes", [[1, 2, 1, 2], [2, 1, 40, 1], [1, 1, 1, 1], [30, 1, 2, 1]])
def test_4_ranks_of_one_and_two_tokens(rng: torch.Generator, sizes: list[int]) -> None:
    pack = draw(rng, [sum(sizes)])
    table = [[(0, start, stop - start)] for start, stop in pairwise(offsets(sizes))]
    part = ds.partition(pack.cu_seqlens, 4, fragments=table)
    assert_exact(run(pack, part), truth(pack))
    part = ds.partition(pack.cu_seqlens, 4, fragments=table[::-1])
    assert_exact(run(pack, part), truth(pack))


@pytest.mark.parametrize(("layout", "dimension"), PAIRS)
def test_5_a_head_that_forgets_beside_one_that_does_not(rng: torch.Generator, layout: str, dimension: int) -> None:
    pack = draw(rng, [150], H=2, HV=2, K=dimension, V=dimension)
    pack = pack._replace(g=torch.tensor([0.0, -10.0], dtype=torch.float64).expand(1, 150, 2))
    part = split(pack.cu_seqlens, 2, layout, rng)
    found, true = run_rule(pack, simulate(part)), true_rule(pack, chunked_gated_delta_rule)
    for rank in range(2):
        mine = torch.from_numpy(part.token_ids(rank))
        for name in ("dk", "dg"):
            for head in range(2):
                assert_exact({name: found[rank][name][:, :, head]}, {name: true[name][:, mine, head]})


@pytest.mark.parametrize(
    ("tokens", "dimension"),
    [
        (1024, 64),
        (48, 256),  # CPUs, too, take the short way through products as large as these
        pytest.param(32768, 64, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_6_states_cross_many_ranks_in_fp32(rng: torch.Generator, tokens: int, dimension: int) -> None:
    pack = draw(rng, [8 * tokens], H=1, HV=1, K=dimension, V=dimension)
    pack = pack._replace(g=torch.full_like(pack.g, -1e-4)).to(torch.bfloat16)
    part = split(pack.cu_seqlens, 8, "contiguous")
    with reduced_precision(False):
        off = join(part, run_rule(pack, simulate(part)))
    with reduced_precision(True):
        on = join(part, run_rule(pack, simulate(part)))
    assert [name for name in off if not same_bits(off[name], on[name])] == []
    true = true_rule(pack, chunked_gated_delta_rule)
    for name in ("final_state", "dinitial_state", "dg", "dbeta"):
        assert relative_error(off[name], true[name])[0] <= 5e-6, name  # TF32 would leave 1e-4, and bf16 1e-3


@pytest.mark.parametrize(("count", "H", "HV"), [(2050, 1, 1), (64, 16, 32)])
def test_7_many_documents_as_two_halves(rng: torch.Generator, count: int, H: int, HV: int) -> None:
    pack = draw(rng, [16] * count, H=H, HV=HV, K=8, V=8, D=4).to(torch.bfloat16)
    found = run(pack, ds.partition(pack.cu_seqlens, 1))
    for first, stop in ((0, count // 2), (count // 2, count)):
        half = documents(pack, first, stop)
        alone = run(half, ds.partition(half.cu_seqlens, 1))
        own, alone = of_documents(found, pack, first, stop), of_documents(alone, half, 0, stop - first)
        assert [name for name in own if not same_bits(own[name], alone[name])] == []


def test_7_more_than_262_144_tokens(rng: torch.Generator) -> None:
    pack = draw(rng, [2048] * 128 + [100, 156], H=1, HV=1, K=4, V=4, D=1)
    last = documents(pack, 126, 130)
    ctx = simulate(ds.partition(pack.cu_seqlens, 2))
    o = torch.cat(ds.chunk_gated_delta_rule(*(ctx.shard(x) for x in pack[1:6]), ctx)[0], dim=1)
    assert o.shape[1] == 262_400
    true, _ = chunked_gated_delta_rule(*last[1:6], last.cu_seqlens)
    assert_exact({"o": o[:, -last.cu_seqlens[-1] :]}, {"o": true})


def test_8_a_packed_row_past_two_to_the_31(rng: torch.Generator) -> None:
    T, H, HV, K, pitch, last = 60_000, 1, 1, 64, 36_864, 256
    packed = torch.empty(T, pitch, dtype=torch.bfloat16)  # 4.4 GB, of which only what is read is ever touched
    q, k, v = (packed[:, at : at + heads * K].view(T, heads, K) for at, heads in ((0, H), (12_288, H), (24_576, HV)))
    for x in (q, k, v):
        x.copy_(torch.randn(x.shape, generator=rng) / K**0.5 / 2)
    assert v[-1].data_ptr() - q.data_ptr() > 2**32  # bytes; 2^31 elements
    g, beta = -torch.rand(T, HV, generator=rng), torch.rand(T, HV, generator=rng)
    weight = torch.randn(K, 4, generator=rng)

    def calls(cu_seqlens: list[int], *operands: Tensor) -> list[Tensor]:
        ctx = ds.build_context(ds.partition(cu_seqlens, 1), device="cpu")
        leaves = [leaf_of(x) for x in operands]
        o, _ = ds.chunk_gated_delta_rule(*leaves, ctx)
        y = ds.causal_conv1d(leaves[2][:, 0], weight, ctx)
        return [o.detach(), y.detach(), *torch.autograd.grad((o, y), leaves, (operands[2], operands[2][:, 0]))]

    for start, cu_seqlens in ((0, [0, T - last, T]), (T - last, [0, last])):
        operands = [x[start:] for x in (q, k, v, g, beta)]
        strided, copied = calls(cu_seqlens, *operands), calls(cu_seqlens, *(x.clone() for x in operands))
        assert all(map(same_bits, strided, copied))


def leaf_of(x: Tensor) -> Tensor:
    """A leaf over the same memory, strides and all."""
    return x.detach().requires_grad_()


def test_8_a_packed_row_past_two_to_the_31_by_its_views(rng: torch.Generator) -> None:
    T, K, pitch, last = 60_000, 64, 36_864, 256
    row = torch.empty(T, pitch, dtype=torch.bfloat16)[:, -3 * K :]
    row.copy_(torch.randn(row.shape, generator=rng) / K**0.5 / 2)
    g, beta, do = (torch.randn(T, *size, generator=rng) for size in ((1,), (1,), (1, K)))
    way = {"use_gate_in_kernel": True, "A_log": torch.zeros(1), "use_beta_sigmoid_in_kernel": True}

    def call(row: Tensor, cu_seqlens: list[int]) -> tuple[Tensor, Tensor]:
        row, start = leaf_of(row), T - cu_seqlens[-1]
        ctx = ds.build_context(ds.partition(cu_seqlens, 1), device="cpu")
        o, _ = ds.chunk_gated_delta_rule(*ds.packed_qkv_views(row, H=1, HV=1), g[start:], beta[start:], ctx, **way)
        return o.detach()[-last:], torch.autograd.grad(o, row, do[start:].bfloat16())[0][-last:]

    whole, rebased = call(row, [0, T - last, T]), call(row[-last:].clone(), [0, last])
    assert all(map(same_bits, whole, rebased))


@pytest.mark.parametrize(("layout", "dimension"), PAIRS)
def test_9_the_gate_of_a_padded_buffer(rng: torch.Generator, layout: str, dimension: int) -> None:
    raw = draw_raw(rng, [120, 89], GATE, K=dimension, V=dimension)
    raw = raw._replace(A_log=torch.full_like(raw.A_log, np.log(16)))
    truth = true_raw(raw)
    part = split(raw.pack.cu_seqlens, 2, layout, rng)
    assert_exact(join_raw(part, run_raw(raw, simulate(part))), truth)
    rows = {name: getattr(raw.pack, name) for name in PER_TOKEN[:6]}
    longer = raw.replace(
        **{n: torch.cat([x, x.new_full((1, 47, *x.shape[2:]), torch.nan)], 1) for n, x in rows.items()}
    )
    ctx = ds.build_context(ds.partition(raw.pack.cu_seqlens, 1), device="cpu")
    names = [*PER_TOKEN[:5], *raw.parameters]
    leaves = {n: leaf(getattr(longer.pack, n)) for n in PER_TOKEN[:5]} | {n: leaf(x) for n, x in raw.parameters.items()}
    states = {"initial_state": raw.pack.initial_state, "output_final_state": True}
    o = ds.chunk_gated_delta_rule(**leaves, ctx=ctx, **states, **raw.way)
    grads = torch.autograd.grad(o, list(leaves.values()), (longer.pack.do, raw.pack.dfinal_state))
    found = {f"d{name}": grad for name, grad in zip(names, grads, strict=True)}
    assert not any(found[f"d{name}"][:, 209:].any() for name in PER_TOKEN[:5])
    assert_exact({n: x if "_" in n else x[:, :209] for n, x in found.items()}, {n: truth[n] for n in found})


@pytest.mark.parametrize(("layout", "dimension"), PAIRS)
@pytest.mark.parametrize("cu_seqlens", [[0, 16, 40, 40, 40], [0, 0, 16], [0, 8, 8, 16]])
def test_10_empty_documents(rng: torch.Generator, cu_seqlens: list[int], layout: str, dimension: int) -> None:
    pack = draw(rng, [b - a for a, b in pairwise(cu_seqlens)], K=dimension, V=dimension)
    found = run(pack, split(cu_seqlens, 2, layout, rng))
    assert_exact(found, truth(pack))
    for doc in (n for n, (a, b) in enumerate(pairwise(cu_seqlens)) if a == b):
        assert same_bits(found["final_state"][doc], pack.initial_state[doc])
        assert same_bits(found["dinitial_state"][doc], pack.dfinal_state[doc])


@pytest.mark.parametrize(("layout", "dimension"), PAIRS)
def test_11_padded_documents(rng: torch.Generator, layout: str, dimension: int) -> None:
    real = torch.tensor([*range(7), *range(8, 17), *range(20, 36)])  # of documents of 8, 12 and 16
    padded = draw(rng, [8, 12, 16], K=dimension, V=dimension)
    used = torch.zeros(36, dtype=torch.float64).index_fill(0, real, 1)  # nobody reads what stands on the padding,
    padded = padded._replace(do=padded.do * used[:, None, None], dy=padded.dy * used[:, None])
    padded = padded._replace(dfinal_state=torch.zeros_like(padded.dfinal_state))  # nor the states after it
    pack = padded._replace(cu_seqlens=[0, 7, 16, 32], **{name: getattr(padded, name)[:, real] for name in PER_TOKEN})

    part = split(padded.cu_seqlens, 2, layout, rng)
    ctx = simulate(part)
    for x in (padded.q, padded.x):
        assert all(same_bits(whole, x) for whole in ctx.unshard(ctx.shard(x)))
        assert all(map(same_bits, ctx.shard(ctx.unshard(ctx.shard(x))[1]), ctx.shard(x)))

    found, expected = run(padded, part), truth(pack)
    found = {name: x if name in STATES else x[:, real] for name, x in found.items()}
    del found["final_state"], expected["final_state"]  # padding writes to them, as any token
    assert_exact(found, expected)


def test_12_a_thousand_contexts(rng: torch.Generator) -> None:
    def alive() -> tuple[int, int]:
        gc.collect()
        things = gc.get_objects()
        return sum(type(x) is ds.Context for x in things), sum(type(x) is Tensor for x in things)

    pack = draw(rng, [7], H=1, HV=1, K=4, V=4)
    before = alive()
    for step in range(1000):
        cu_seqlens = [0, *torch.randint(0, 8, (2,), generator=rng).sort().values.tolist(), 7]
        ctx = simulate(split(cu_seqlens, 2, LAYOUTS[step % 3]))
        found, _ = ds.chunk_gated_delta_rule(*(ctx.shard(x) for x in pack[1:6]), ctx)
        true, _ = recurrent_gated_delta_rule(*pack[1:6], cu_seqlens)
        found = torch.cat(found, dim=1)[:, np.argsort(np.concatenate([ctx.part.token_ids(r) for r in (0, 1)]))]
        assert relative_error(found, true)[1] <= 1e-10, cu_seqlens
    del ctx, found, true, _
    assert alive() == before


@pytest.mark.parametrize(("layout", "dimension"), PAIRS)
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_13_rows_of_zero_under_any_number_of_value_heads(
    rng: torch.Generator, group: int, layout: str, dimension: int
) -> None:
    raw = draw_raw(rng, [37, 20], ALL, H=2, HV=2 * group, K=dimension, V=dimension)
    raw = raw.replace(q=some(raw.pack.q, 0), k=some(raw.pack.k.flip(1), 0).flip(1))
    part = split(raw.pack.cu_seqlens, 2, layout, rng)
    assert_exact(join_raw(part, run_raw(raw, simulate(part))), true_raw(raw))
    narrow = run_raw(raw.to(torch.bfloat16, raw=torch.bfloat16), simulate(part))
    assert {r[n].dtype for r in narrow for n in ("dA_log", "ddt_bias")} == {torch.float32}
    assert all(x.isfinite().all() for r in narrow for x in r.values())


@pytest.mark.parametrize(("layout", "dimension"), PAIRS)
def test_14_gates_beyond_the_range_of_fp32(rng: torch.Generator, layout: str, dimension: int) -> None:
    raw = draw_raw(rng, [40, 33, 20], GATE, bias=False, K=dimension, V=dimension)
    raw = raw._replace(A_log=torch.full_like(raw.A_log, 100)).replace(g=some(raw.pack.g - 97, -200))
    part = split(raw.pack.cu_seqlens, 2, layout, rng)
    truth = true_raw(raw)
    assert_exact(join_raw(part, run_raw(raw, simulate(part))), truth)
    found = join_raw(part, run_raw(raw.to(torch.float32), simulate(part)))
    # operands near -100 are rounded by 4e-6, which is the relative error of their gate
    assert all(relative_error(found[name], truth[name])[0] <= 1e-4 for name in truth)


@pytest.mark.parametrize(("layout", "dimension"), PAIRS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_14_a_token_that_forgets_all(rng: torch.Generator, dtype: torch.dtype, layout: str, dimension: int) -> None:
    pack = draw(rng, [40, 33, 20], K=dimension, V=dimension).to(dtype)
    g = pack.g.clone()
    g[:, 50] = -torch.inf
    part = split(pack.cu_seqlens, 2, layout, rng)
    clean, found = (join(part, run_rule(p, simulate(part))) for p in (pack, pack._replace(g=g)))
    assert_exact(found, true_rule(pack._replace(g=g)), 1e-10 if dtype == torch.float64 else 2e-4)
    assert not found["dg"][:, 50].any()
    for doc in (0, 2):
        own, untouched = (of_documents(r, pack, doc, doc + 1) for r in (found, clean))
        assert [name for name in own if not same_bits(own[name], untouched[name])] == []
