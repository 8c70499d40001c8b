"""Fragments cut into segments: as exact as whole ones for every rule, the same bits by every way, nothing more kept."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deltaspan as ds
from deltaspan import reference
from deltaspan.kernels import torch as tier
from deltaspan.kernels.stages import Runs
from deltaspan.plan import RULES, Cut, count_of, segment_table
from tests.helpers import gloo, same_bits
from tests.op.support import (
    GRADIENTS,
    LAYOUTS,
    Pack,
    assert_exact,
    differing,
    draw,
    join,
    leaf,
    offsets,
    run_rule,
    simulate,
    split,
    true_rule,
)

LENGTHS = [420, 1, 0, 700, 64, 65]  # up to 11 chunks a document, and documents that cannot be cut
TOLERANCE = 1e-10  # FP64 as deltaspan promises it
DECAYS = ("moderate", "slow", "mixed", "cut")
# multiprocessors to plan for, so that few heads give few segments, more, and one a chunk
MACHINES = (8, 40, 10_000)


def drawn(rng: torch.Generator, dtype: torch.dtype = torch.float64, **options) -> Pack:
    return draw(rng, LENGTHS, H=1, HV=3, K=6, V=5, **options).to(dtype)


def truth(pack: Pack) -> dict[str, Tensor]:
    """By chunks, which the reference's own tests hold against the token recurrence."""
    return true_rule(pack, reference.chunked_gated_delta_rule)


def cuts(ctx: ds.Context, hv: int = 3, segments: Cut | None = None) -> list[Cut]:
    return [ctx._segments(rank, hv, segments) for rank in range(ctx.part.world_size)]


ROWS = [
    pytest.param(rule, layout, 1 + (r + i) % 4, MACHINES[(r + 2 * i) % 3], DECAYS[(r + i) % 4], id=f"{rule}-{layout}")
    for r, rule in enumerate(RULES)
    for i, layout in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("rule", "layout", "world_size", "sm_count", "decay"), ROWS)
def test_every_rule(rng: torch.Generator, rule: str, layout: str, world_size: int, sm_count: int, decay: str) -> None:
    pack = drawn(rng, decay=decay)
    ctx = simulate(split(pack.cu_seqlens, world_size, layout, rng), p_rule=rule, sm_count=sm_count)
    assert cuts(ctx) == ds.plan_segments(ctx.part, hv=3, sm_count=sm_count, rule=rule)
    assert_exact(join(ctx.part, run_rule(pack, ctx)), truth(pack), TOLERANCE)


@pytest.mark.parametrize("segments", [1, 2, 3, 4, 5, 7, 11, (2, 1, 2), (1, 3), (3, 1, 1, 4)])
@pytest.mark.parametrize(("world_size", "layout"), [(1, "contiguous"), (2, "zigzag"), (3, "ragged"), (2, "contiguous")])
def test_every_cut(rng: torch.Generator, world_size: int, layout: str, segments: Cut) -> None:
    pack = drawn(rng, decay="slow")
    ctx = simulate(split(pack.cu_seqlens, world_size, layout, rng))
    longest = max(-(-f.length // 64) for rank in ctx.part.fragments for f in rank)
    if count_of(segments) > longest:
        with pytest.raises(ValueError, match=f"at most {longest} "):
            run_rule(pack, ctx, segments=segments)
        return
    assert_exact(join(ctx.part, run_rule(pack, ctx, segments=segments)), truth(pack), TOLERANCE)


@pytest.mark.parametrize("unit_keys", [True, False])
def test_hard_keys(rng: torch.Generator, unit_keys: bool) -> None:
    """Nothing decays, and every write erases nearly all: maps of segments are far from the identity."""
    pack = drawn(rng, decay="zero", key_noise=1e-3, beta=(0.9, 1), key_length=(1, 1) if unit_keys else (0.9, 1.2))
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"), p_rule="occ", sm_count=10_000)
    assert max(cuts(ctx)) > 4
    assert_exact(join(ctx.part, run_rule(pack, ctx, unit_keys=unit_keys)), truth(pack), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_err_no_more_than_whole_fragments(rng: torch.Generator, dtype: torch.dtype) -> None:
    """In RMS over the pack, by more than the 1.1 that several ranks may have of one, and a rounding of fp32 for every
    segment that is composed: in bf16 that is nothing beside the rounded outputs."""
    pack, segments = drawn(rng, dtype, decay="slow"), 8
    ctx, true = simulate(split(pack.cu_seqlens, 2, "contiguous")), truth(pack)
    whole, cut = (join(ctx.part, run_rule(pack, ctx, segments=n)) for n in (1, segments))
    for name in true:
        errors = [(x[name].double() - true[name]).square().mean().sqrt().item() for x in (whole, cut)]
        scale = true[name].square().mean().sqrt().item()
        assert errors[1] <= 1.1 * errors[0] + segments * 2**-24 * scale, (name, errors, scale)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_same_bits_by_every_way(rng: torch.Generator, dtype: torch.dtype, layout: str) -> None:
    """Exchanges, autograd and explicit calls, saved and replayed; the number of segments as planned or as given."""
    pack = drawn(rng, dtype)
    ctx = simulate(split(pack.cu_seqlens, 3, layout, rng), p_rule="occ", sm_count=40)
    expected = run_rule(pack, ctx)
    for exchange in ("all_to_all", "ring", "all_gather"):
        for found, rank in zip(run_rule(pack, ctx, exchange=exchange), expected, strict=True):
            assert differing(found, rank) == []
        options = {"exchange": exchange, "initial_state": pack.initial_state, "output_final_state": True}
        operands = [ctx.shard(x) for x in pack[1:6]]
        _, _, saved = ds.forward(*operands, ctx, **options)
        kept = [sum(x.untyped_storage().nbytes() for x in s.tensors) for s in saved]
        assert kept == ds.saved_bytes(ctx, H=1, HV=3, K=6, V=5, dtype=dtype, exchange=exchange)
        douts = {"do": ctx.shard(pack.do), "dfinal_state": pack.dfinal_state}
        for given in (saved, None, saved):
            for found, rank in zip(ds.backward(*operands, ctx, **douts, saved=given, **options), expected, strict=True):
                assert [n for n in GRADIENTS if not same_bits(getattr(found, n), rank[n])] == []


def test_a_given_count_is_the_planned_one(rng: torch.Generator) -> None:
    pack = drawn(rng)
    part = split(pack.cu_seqlens, 2, "contiguous")
    planned = simulate(part, p_rule="occ", sm_count=12)
    (count,) = set(cuts(planned))
    assert count > 1
    whole = simulate(part, p_rule="one")
    found, expected = run_rule(pack, whole, segments=count), run_rule(pack, planned)
    assert [differing(a, b) for a, b in zip(found, expected, strict=True)] == [[], []]
    uncut = run_rule(pack, whole)
    assert any(differing(a, b) for a, b in zip(uncut, expected, strict=True))
    by_default = {"H": 1, "HV": 3, "K": 6, "V": 5}
    assert ds.saved_bytes(whole, **by_default, segments=count) == ds.saved_bytes(planned, **by_default)
    assert ds.saved_bytes(whole, **by_default) < ds.saved_bytes(planned, **by_default)


def test_a_plan_for_each_count_of_heads(rng: torch.Generator) -> None:
    """One context serves layers of different heads, each with its own cut."""
    ctx = simulate(split(offsets(LENGTHS), 2, "zigzag"), p_rule="occ", sm_count=24)
    found = {}
    for HV in (1, 4, 24):
        pack = draw(rng, LENGTHS, H=1, HV=HV, K=4, V=3)
        assert_exact(join(ctx.part, run_rule(pack, ctx)), truth(pack), TOLERANCE)
        found[HV] = cuts(ctx, HV)
    assert found[1] > found[4] > found[24]


def on_rank(seed: int, part: ds.Partition, exchange: str) -> dict[str, Tensor]:
    ctx = ds.build_context(part, dist.group.WORLD, device="cpu", p_rule="occ", sm_count=400)
    return run_rule(drawn(torch.Generator().manual_seed(seed), torch.bfloat16), ctx, exchange=exchange)[0]


@pytest.mark.parametrize(("world_size", "exchange"), [(2, "all_to_all"), (4, "ring"), (4, "all_gather")])
def test_real_ranks_give_the_bits_of_simulated_ones(rng: torch.Generator, world_size: int, exchange: str) -> None:
    seed = rng.initial_seed()
    part = split(offsets(LENGTHS), world_size, "ragged", rng)
    ctx = simulate(part, p_rule="occ", sm_count=400)
    assert max(cuts(ctx)) > 1
    expected = run_rule(drawn(torch.Generator().manual_seed(seed), torch.bfloat16), ctx)
    found = gloo(world_size).run(on_rank, seed, part, exchange)
    assert [differing(a, b) for a, b in zip(found, expected, strict=True)] == [[]] * world_size


def test_uninitialised_memory_is_never_read(rng: torch.Generator) -> None:
    """Torch fills it with NaN where it is asked for determinism."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"), p_rule="occ", sm_count=40)
    plain = run_rule(pack, ctx)
    torch.use_deterministic_algorithms(True)
    try:
        filled = run_rule(pack, ctx)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [differing(a, b) for a, b in zip(filled, plain, strict=True)] == [[], []]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "do"])
def test_a_bad_number_stays_in_its_document(rng: torch.Generator, name: str, value: float) -> None:
    """And in the outputs from its chunk on: earlier segments' are as they were."""
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "contiguous"), p_rule="occ", sm_count=40)
    start, token = pack.cu_seqlens[3], pack.cu_seqlens[3] + 300
    seam = ctx.part.tokens(0)
    chunk = seam + (token - seam) // 64 * 64  # whose tokens meet in products
    assert start < seam < chunk
    x = getattr(pack, name).clone()
    x[0, token].view(-1)[-1] = value
    clean, ill = (join(ctx.part, run_rule(p, ctx)) for p in (pack, pack._replace(**{name: x})))
    others = torch.ones(pack.cu_seqlens[-1], dtype=torch.bool)
    others[start : pack.cu_seqlens[4]] = False
    for result in ("o", *GRADIENTS[:5]):
        assert same_bits(ill[result][:, others], clean[result][:, others]), result
    assert same_bits(ill["o"][:, start:chunk], clean["o"][:, start:chunk])
    keep = [0, 1, 2, 4, 5]
    assert all(same_bits(ill[n][keep], clean[n][keep]) for n in ("final_state", "dinitial_state"))
    assert any(not ill[n].isfinite().all() for n in ill)


def test_a_long_key_is_loud_in_all_later_segments(rng: torch.Generator) -> None:
    pack = drawn(rng)
    ctx = simulate(split(pack.cu_seqlens, 2, "contiguous"), p_rule="occ", sm_count=10_000)
    start, stop = pack.cu_seqlens[3:5]
    k = pack.k.clone()
    k[0, start + 130] *= 1.1
    clean, ill = (join(ctx.part, run_rule(p, ctx)) for p in (pack, pack._replace(k=k)))
    assert ill["o"][0, start + 130 : stop].isnan().all() and ill["final_state"][3].isnan().all()
    assert same_bits(ill["o"][:, : start + 130], clean["o"][:, : start + 130])
    assert same_bits(ill["o"][:, stop:], clean["o"][:, stop:])


def test_backward_twice_and_thirty_runs(rng: torch.Generator) -> None:
    pack = drawn(rng, torch.bfloat16)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"), p_rule="occ", sm_count=40)
    leaves = [leaf(x) for x in pack[1:6]]
    o, _ = ds.chunk_gated_delta_rule(*map(ctx.shard, leaves), ctx)
    first = torch.autograd.grad(o, leaves, ctx.shard(pack.do), retain_graph=True)
    for _ in range(29):
        again = torch.autograd.grad(o, leaves, ctx.shard(pack.do), retain_graph=True)
        assert all(map(same_bits, first, again))


def test_only_what_crosses_is_summarised(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that nothing follows needs no summary, and one that nothing precedes no adjoint's."""
    pack = drawn(rng)
    part = ds.partition(pack.cu_seqlens, 1)
    ctx = ds.build_context(part, device="cpu", p_rule="occ", sm_count=40)
    table = segment_table(part, 0, cuts(ctx)[0])
    documents = sum(1 for a, b in itertools.pairwise(pack.cu_seqlens) if b > a)
    assert len(table.left) == len(table.entered) == len(table.joined) == len(table.first) - documents > 0
    assert set(table.left) == set(table.joined) and set(table.entered) == set(table.joined + 1)
    (cut,) = (ctx._cut(view, 3, None) for view in ctx._views)
    assert len(cut.left.order) == len(cut.entered.order) == len(table.joined)


@pytest.mark.parametrize("mode", [{}, {"save_transfer": False}, {"boundary_mode": "replay"}], ids=str)
@pytest.mark.parametrize("segments", [1, 2, 3, (1, 2, 1)])
@pytest.mark.parametrize(("world_size", "layout"), [(1, "contiguous"), (3, "contiguous"), (2, "zigzag"), (3, "ragged")])
def test_maps_are_made_of_what_is_entered_and_left(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, world_size: int, layout: str, segments: Cut, mode: dict
) -> None:
    """And of nothing else, in either direction; what is not made was not needed."""
    pack = drawn(rng, decay="slow")
    ctx = simulate(split(pack.cu_seqlens, world_size, layout, rng))
    if isinstance(segments, int):
        segments = min(segments, -(-ctx.part.longest // 64))
    tables = [segment_table(ctx.part, rank, segments) for rank in range(world_size)]
    wanted = [sorted(table.first[np.intersect1d(table.left, table.entered)]) for table in tables]
    assert sum(map(len, wanted)) < sum(len(table.left) for table in tables) or not any(len(t.left) for t in tables)
    made, transfer = [], tier.transfer

    def counted(tape: object, runs: Runs) -> Tensor:
        made.append(runs.first.sort().values.tolist())
        return transfer(tape, runs)

    monkeypatch.setattr(tier, "transfer", counted)
    assert_exact(join(ctx.part, run_rule(pack, ctx, segments=segments, **mode)), truth(pack), TOLERANCE)
    linked = [first for view, first in zip(ctx._views, wanted, strict=True) if ctx._cut(view, 3, segments).linked]
    assert made == linked * (2 if mode else 1)
