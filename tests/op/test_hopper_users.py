"""Inputs that broke others, through the Hopper tier's forward; the numbers in the names are the order of that list.

What the tier cannot tell from any other input (layouts, halos, refusals) is tested on the torch tier alone.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import deltaspan as ds
from deltaspan.bench.operands import draw as draw_there
from deltaspan.reference import chunked_gated_delta_rule
from tests.helpers import same_bits
from tests.op.hopper import BF16, drawn, relative, run
from tests.op.support import LAYOUTS, Pack, documents, offsets, reduced_precision, split


def true(pack: Pack) -> tuple[Tensor, Tensor]:
    given = (x.double() for x in pack[1:6])
    return chunked_gated_delta_rule(*given, pack.cu_seqlens, initial_state=pack.initial_state.double())


def context(part: ds.Partition, device: str, **plan) -> ds.Context:
    return ds.build_context(part, ds.SimulatedGroup(part.world_size), device=device, **plan)


def test_1_each_document_as_by_itself(hopper: str, rng: torch.Generator) -> None:
    """To the bit, on one rank and in one piece."""
    lengths = [37, 51, 140]
    pack = drawn(rng, lengths, hopper, H=1, HV=2)
    o, final = run(pack, context(ds.partition(pack.cu_seqlens, 1), hopper))
    for doc, (first, end) in enumerate(pairwise(pack.cu_seqlens)):
        own = documents(pack, doc, doc + 1)
        alone = run(own, context(ds.partition(own.cu_seqlens, 1), hopper))
        assert same_bits(o[:, first:end], alone[0]) and same_bits(final[doc : doc + 1], alone[1])


@pytest.mark.parametrize("world_size", [1, 2])
def test_2_a_change_stays_in_its_document(hopper: str, rng: torch.Generator, world_size: int) -> None:
    pack, other = (drawn(rng, [16, 16], hopper, H=1, HV=2) for _ in range(2))
    ctx = context(split(pack.cu_seqlens, world_size, "zigzag"), hopper)
    before = run(pack, ctx)
    for changed, token in ((0, 15), (1, 16)):
        rows = {name: getattr(pack, name).clone() for name in pack._fields[1:6]}
        for name, x in rows.items():
            x[:, token] = getattr(other, name)[:, token]
        after = run(pack._replace(**rows), ctx)
        for doc in range(2):
            own = slice(16 * doc, 16 * doc + 16)
            kept = same_bits(after[0][:, own], before[0][:, own]), same_bits(after[1][doc], before[1][doc])
            assert kept == (doc != changed,) * 2


@pytest.mark.parametrize("lengths", [[10], [2], [1, 1], [0, 16, 24, 0, 0]])
def test_3_and_10_few_tokens_and_empty_documents(hopper: str, rng: torch.Generator, lengths: list[int]) -> None:
    pack = drawn(rng, lengths, hopper, H=1, HV=2)
    for layout in LAYOUTS:
        o, final = run(pack, context(split(pack.cu_seqlens, 3, layout, rng), hopper))
        assert all(relative(*pair) < BF16 for pair in zip((o, final), true(pack), strict=True))
        for doc in (n for n, length in enumerate(lengths) if not length):
            assert same_bits(final[doc], pack.initial_state[doc])


def test_5_a_head_that_forgets_beside_one_that_does_not(hopper: str, rng: torch.Generator) -> None:
    pack = drawn(rng, [300], hopper, H=1, HV=2)
    pack.g.copy_(torch.tensor([0.0, -10.0]))
    o, final = run(pack, context(ds.partition(pack.cu_seqlens, 2), hopper))
    for found, truth, axis in zip((o, final), true(pack), (2, 1), strict=True):
        for head in range(2):
            assert relative(found.select(axis, head), truth.select(axis, head)) < BF16


def test_6_reduced_precision_changes_nothing(hopper: str, rng: torch.Generator) -> None:
    """A document over eight ranks, 32,768 tokens on each where a GPU computes."""
    pack = drawn(rng, [8 * (32768 if hopper == "cuda" else 100)], hopper, H=1, HV=1)
    pack.g.fill_(-1e-4)
    ctx = context(ds.partition(pack.cu_seqlens, 8), hopper)
    results = []
    for allowed in (False, True):
        with reduced_precision(allowed):
            results.append(run(pack, ctx))
    assert all(map(same_bits, *results))
    assert all(relative(*pair) < BF16 for pair in zip(results[0], true(pack), strict=True))


@pytest.mark.parametrize(
    ("count", "H", "HV"), [(6, 1, 2), pytest.param(2050, 16, 32, marks=pytest.mark.gpu, id="2050 documents")]
)
def test_7_many_documents_as_two_halves(hopper: str, rng: torch.Generator, count: int, H: int, HV: int) -> None:
    if hopper == "cpu" and count > 100:
        pytest.skip("for a GPU")
    q, k, v, g, beta, _ = draw_there(16 * count, (H, HV), "moderate", device=hopper, seed=rng.initial_seed())
    ctx = context(ds.partition(offsets([16] * count), 1), hopper)
    given = {"output_final_state": True, "backend": "hopper"}
    (o,), (final,), _ = ds.forward(*([x] for x in (q, k, v, g, beta)), ctx, **given)
    half = context(ds.partition(offsets([16] * (count // 2)), 1), hopper)
    for i, tokens in enumerate((slice(0, 8 * count), slice(8 * count, None))):
        own = ([x[:, tokens]] for x in (q, k, v, g, beta))
        (alone,), (state,), _ = ds.forward(*own, half, **given)
        assert same_bits(o[:, tokens], alone)
        assert same_bits(final[i * count // 2 : (i + 1) * count // 2], state)


@pytest.mark.gpu
def test_7_more_than_two_to_the_31_elements(rng: torch.Generator) -> None:
    """262,400 tokens of 64 heads: the last documents of a pack as by themselves."""
    lengths, last = [2048] * 128 + [100, 156], 2304
    q, k, v, g, beta, _ = draw_there(sum(lengths), (16, 64), "moderate", device="cuda", seed=rng.initial_seed())
    assert v.numel() > 2**31
    ctx = ds.build_context(ds.partition(offsets(lengths), 1))
    o = ds.forward(q, k, v, g, beta, ctx, segments=1, backend="hopper")[0]
    ctx = ds.build_context(ds.partition(offsets(lengths[-3:]), 1))
    own = [x[:, -last:] for x in (q, k, v, g, beta)]
    assert same_bits(o[:, -last:], ds.forward(*own, ctx, segments=1, backend="hopper")[0])
    truth, _ = chunked_gated_delta_rule(*(x.double() for x in own), ctx.part.cu_seqlens)
    assert relative(o[:, -last:], truth) < BF16


@pytest.mark.gpu
def test_8_a_packed_row_past_two_to_the_31(rng: torch.Generator) -> None:
    T, H, HV, pitch, last = 60_000, 2, 4, 36_864, 256
    there = torch.Generator("cuda").manual_seed(rng.initial_seed())
    row = torch.empty(T, pitch, dtype=torch.bfloat16, device="cuda")[:, -(2 * H + HV) * 128 :]
    row.copy_(torch.randn(row.shape, generator=there, device="cuda") / 12)
    assert T * pitch > 2**31
    g, beta = (torch.rand(T, HV, generator=there, device="cuda") for _ in range(2))

    def call(row: Tensor, cu_seqlens: list[int]) -> Tensor:
        ctx = ds.build_context(ds.partition(cu_seqlens, 1))
        tokens = slice(T - cu_seqlens[-1], None)
        q, k, v = ds.packed_qkv_views(row, H=H, HV=HV)
        way = {"use_qk_l2norm_in_kernel": True, "backend": "hopper", "segments": 1}
        return ds.forward(q, k, v, -g[tokens], beta[tokens], ctx, **way)[0][-last:]

    assert same_bits(call(row, [0, T - last, T]), call(row[-last:].clone(), [0, last]))


@pytest.mark.gpu
def test_15_the_same_bits_thirty_times(rng: torch.Generator) -> None:
    pack = drawn(rng, [3000, 1, 2000, 70], "cuda")
    ctx = context(split(pack.cu_seqlens, 4, "zigzag"), "cuda", p_rule="occ", sm_count=300)
    first = run(pack, ctx)
    assert all(all(map(same_bits, run(pack, ctx), first)) for _ in range(29))
