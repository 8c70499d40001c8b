"""The Hopper tier through the public calls, on a GPU and on the emulator: exact to bf16, same bits by every way, and
what it refuses."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import deltaspan as ds
from deltaspan.kernels import select
from deltaspan.reference import chunked_gated_delta_rule
from tests.helpers import same_bits
from tests.op.hopper import BF16, drawn, relative, run
from tests.op.raw import ALL, draw_raw, made_ready
from tests.op.support import LAYOUTS, draw, offsets, split

LENGTHS = [700, 1, 0, 799, 64, 63, 1300, 130]
FEW = [330, 1, 0, 90]  # for the emulator


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if every device were a Hopper GPU with Triton."""
    monkeypatch.setattr(select, "_not_on", lambda device: None)
    monkeypatch.setattr(select, "_without_triton", lambda: None)
    select._chosen.cache_clear()
    yield
    select._chosen.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["moderate", "slow", "zero", "strong", "mixed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward(rng: torch.Generator, layout: str, decay: str) -> None:
    """Whole fragments and cut ones, over several ranks, by every exchange with the same bits."""
    pack = drawn(rng, LENGTHS, "cuda", decay)
    truth = chunked_gated_delta_rule(
        *(x.double() for x in pack[1:6]), pack.cu_seqlens, initial_state=pack.initial_state.double()
    )
    for world_size in (1, 3):
        part = split(pack.cu_seqlens, world_size, layout, rng)
        for plan in ({"p_rule": "one"}, {"p_rule": "occ", "sm_count": 300}):
            ctx = ds.build_context(part, ds.SimulatedGroup(world_size), **plan)
            found = run(pack, ctx)
            assert all(relative(*pair) < BF16 for pair in zip(found, truth, strict=True)), (world_size, plan)
            for exchange in ("ring", "all_gather"):
                assert all(map(same_bits, run(pack, ctx, exchange=exchange), found))


@pytest.mark.parametrize(
    ("layout", "decay", "exchange"),
    [
        ("contiguous", "slow", "ring"),
        ("zigzag", "moderate", "all_gather"),
        pytest.param("contiguous", "slow", "all_gather", marks=pytest.mark.slow),
        pytest.param("zigzag", "moderate", "ring", marks=pytest.mark.slow),
    ],
)
def test_forward_in_few_chunks(hopper: str, rng: torch.Generator, layout: str, decay: str, exchange: str) -> None:
    pack = drawn(rng, FEW, hopper, decay, H=1, HV=2)
    truth = chunked_gated_delta_rule(
        *(x.double() for x in pack[1:6]), pack.cu_seqlens, initial_state=pack.initial_state.double()
    )
    ctx = ds.build_context(
        split(pack.cu_seqlens, 3, layout, rng), ds.SimulatedGroup(3), device=hopper, p_rule="occ", sm_count=60
    )
    assert max(ctx._segments(rank, 2, None) for rank in range(3)) > 1
    found = run(pack, ctx)
    assert all(relative(*pair) < BF16 for pair in zip(found, truth, strict=True))
    assert all(map(same_bits, run(pack, ctx, exchange=exchange), found))


def test_raw_operands_in_few_chunks(hopper: str, rng: torch.Generator) -> None:
    """Through exchanges and segments, to the truth of operands made ready in FP64."""
    raw = draw_raw(rng, FEW, ALL, H=1, HV=2, K=128, V=128).to(torch.bfloat16, raw=torch.bfloat16)
    pack = raw.pack._replace(**{name: getattr(raw.pack, name).to(hopper) for name in raw.pack._fields[1:]})
    A_log, dt_bias = raw.A_log.to(hopper), raw.dt_bias.to(hopper)
    q, k, g, beta = made_ready(raw, *(x.double() for x in (pack.q, pack.k, pack.g, pack.beta, A_log, dt_bias)))
    truth = chunked_gated_delta_rule(
        q, k, pack.v.double(), g, beta, pack.cu_seqlens, initial_state=pack.initial_state.double()
    )
    part = split(pack.cu_seqlens, 2, "zigzag", rng)
    ctx = ds.build_context(part, ds.SimulatedGroup(2), device=hopper, p_rule="occ", sm_count=60)
    found = run(pack, ctx, A_log=[A_log] * 2, dt_bias=[dt_bias] * 2, **ALL)
    assert all(relative(*pair) < BF16 for pair in zip(found, truth, strict=True))


def test_the_layer_gives_its_backend_to_both_kernels(
    hopper: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(rng.initial_seed())
    layer = ds.nn.GatedDeltaNet(16, 1, 2).to(hopper, torch.bfloat16)
    x = torch.randn(1, 90, 16).to(hopper, torch.bfloat16)
    ctx = ds.build_context(ds.partition([0, 70, 90], 1), device=hopper)
    tier, called = select.tier("hopper"), []
    for name in ("convolve", "walk"):
        stage = getattr(tier, name)
        monkeypatch.setattr(tier, name, lambda *a, stage=stage, name=name, **b: called.append(name) or stage(*a, **b))
    with torch.no_grad():
        plain = layer(x, ctx, backend="torch")
        assert called == []
        y = layer(x, ctx, backend="hopper")
    assert set(called) == {"convolve", "walk"}
    assert relative(y, plain.double()) < 3 * BF16  # roundings of the rule, of its norm and gate, and of the projection


@pytest.mark.parametrize(("sm_count", "in_its_place"), [(1, True), (1000, False)])
def test_what_nobody_leads_back_has_the_same_bits(
    hopper: str, rng: torch.Generator, sm_count: int, in_its_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running sums then lie where the output will, if every walk is one program; not if one is two."""
    pack = drawn(rng, [330, 1, 0, 90], hopper, H=1, HV=2)
    monkeypatch.setattr(select.tier("hopper"), "MAP_CHUNKS", 1)  # of few chunks it would not be worth it
    tier, lies = select.tier("hopper"), []
    prepared = tier.prepared
    monkeypatch.setattr(tier, "prepared", lambda *a, o, **b: lies.append(o is not None) or prepared(*a, o=o, **b))
    ctx = ds.build_context(ds.partition(pack.cu_seqlens, 1), device=hopper, sm_count=sm_count)
    found = []
    for wanted in (False, True):
        given = [x.detach().requires_grad_(wanted) for x in pack[1:6]]
        found.append(ds.chunk_gated_delta_rule(*given, ctx, backend="hopper", segments=(2, 1, 2))[0].detach())
    assert same_bits(*found)
    assert lies == [in_its_place, False]


@pytest.mark.gpu
def test_capture_and_no_wait(rng: torch.Generator) -> None:
    """A captured forward gives the eager one's bits, and no call waits for the device."""
    pack = drawn(rng, LENGTHS, "cuda")
    ctx = ds.build_context(ds.partition(pack.cu_seqlens, 1), p_rule="occ", sm_count=300)
    eager = run(pack, ctx)[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            o, _ = ds.chunk_gated_delta_rule(*pack[1:6], ctx, initial_state=pack.initial_state, backend="hopper")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert same_bits(o, eager)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured, _ = ds.chunk_gated_delta_rule(*pack[1:6], ctx, initial_state=pack.initial_state, backend="hopper")
    captured.fill_(torch.nan)
    graph.replay()
    assert same_bits(captured, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("calls", [1, 3])
def test_a_thread_of_its_own(rng: torch.Generator, calls: int) -> None:
    """Which has no CUDA context before its first launch, that of a kernel with descriptors; run, and played."""
    pack = drawn(rng, LENGTHS, "cuda")
    ctx = ds.build_context(ds.partition(pack.cu_seqlens, 1))

    def forward() -> torch.Tensor:
        return ds.forward(*pack[1:6], ctx, backend="hopper")[0]

    expected = [forward() for _ in range(calls)][-1]
    with ThreadPoolExecutor(1) as thread:
        assert same_bits(thread.submit(forward).result(), expected)


@pytest.mark.gpu
def test_strided_and_raw_operands(rng: torch.Generator) -> None:
    """Columns of a packed row are read in place; raw operands as ready ones, to the rounding of what is made ready."""
    pack = drawn(rng, LENGTHS, "cuda", HV=4)
    ctx = ds.build_context(ds.partition(pack.cu_seqlens, 1))
    plain = ds.forward(*pack[1:6], ctx, backend="hopper")[0]
    row = torch.cat([x.flatten(2) for x in pack[1:4]], dim=-1)
    q, k, v = ds.packed_qkv_views(row, H=2, HV=4)
    assert q.stride(1) == row.shape[2]
    assert same_bits(ds.forward(q, k, v, pack.g, pack.beta, ctx, backend="hopper")[0], plain)
    raw = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}
    A_log, dt_bias = torch.rand(4, device="cuda"), torch.randn(4, device="cuda")
    operands = 3 * pack.q, 2 * pack.k, pack.v, torch.randn_like(pack.g), torch.randn_like(pack.beta)
    results = [
        ds.forward(*operands, ctx, A_log=A_log, dt_bias=dt_bias, backend=b, **raw)[0] for b in ("hopper", "torch")
    ]
    assert relative(results[0], results[1].double()) < 2 * BF16


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"unit_keys": False}, "unit_keys=True alone"),
        ({"scale": 0.0}, "scales from 1e-12 on, not 0.0"),
        ({"scale": -1.0}, "scales from 1e-12 on, not -1.0"),
        ({"HV": 9}, "up to 8 value heads to a key head, not 9"),
        ({"dtype": torch.float32}, "bf16 operands with K = V = 128, not torch.float32"),
        ({"K": 64}, "K=64 and V=64"),
    ],
)
def test_refused(anywhere: None, rng: torch.Generator, changed: dict, says: str) -> None:
    """Whatever the device: by the call alone."""
    dim, dtype = changed.get("K", 128), changed.get("dtype", torch.bfloat16)
    options = {name: value for name, value in changed.items() if name not in ("K", "dtype", "HV")}
    pack = draw(rng, [70], H=1, HV=changed.get("HV", 2), K=dim, V=dim).to(dtype)
    ctx = ds.build_context(ds.partition(pack.cu_seqlens, 1), device="cpu")
    with pytest.raises(ValueError, match=says):
        ds.forward(*pack[1:6], ctx, backend="hopper", **options)


def test_refused_where_there_is_no_such_device(rng: torch.Generator) -> None:
    pack = draw(rng, [20], K=128, V=128).to(torch.bfloat16)
    ctx = ds.build_context(ds.partition(offsets([20]), 1), device="cpu")
    with pytest.raises(ValueError, match=r"compute capability 9\.0, not on cpu"):
        ds.forward(*pack[1:6], ctx, backend="hopper")
    with pytest.raises(ValueError, match="not on cpu"):
        ds.saved_bytes(ctx, H=2, HV=4, backend="hopper")
    assert ds.chosen_backend("auto") == "torch"
