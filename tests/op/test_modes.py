"""Whatever a forward keeps, and however its backward gets the rest back: the same bits, and nothing kept for longer."""

import copy
import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import deltaspan as ds
from deltaspan.kernels import torch as tier
from deltaspan.op.saved import Saved
from tests.helpers import same_bits
from tests.op.support import GRADIENTS, Pack, alone, differing, draw, leaf, ragged, run_rule, simulate, split

LENGTHS = [260, 1, 0, 9]
SHAPE = {"H": 1, "HV": 3, "K": 6, "V": 5}
CHOICES = {
    "exchange": ("all_to_all", "ring", "all_gather"),
    "save_mode": ("light", "full"),
    "boundary_mode": ("saved", "replay"),
    "save_transfer": (True, False),
}
MODES = [dict(zip(CHOICES, values, strict=True)) for values in product(*CHOICES.values())]
KEEPING = [mode for mode in MODES if mode["boundary_mode"] == "saved"]
CUT = {"p_rule": "occ", "sm_count": 40}  # two or three segments a fragment of three chunks
WHOLE = {"p_rule": "one"}


def label(mode: dict[str, Any]) -> str:
    return "-".join(map(str, mode.values()))


def drawn(rng: torch.Generator, dtype: torch.dtype = torch.float64) -> Pack:
    return draw(rng, LENGTHS, **SHAPE).to(dtype)


def context(pack: Pack, layout: str, rng: torch.Generator, ranks: int = 3, **plan: Any) -> ds.Context:
    """`idle_rank`: ragged, and rank 1 holds nothing."""
    if layout != "idle_rank":
        return simulate(split(pack.cu_seqlens, ranks, layout, rng), **plan)
    table = [(d, at, n, rank if rank != 1 else 0) for d, at, n, rank in ragged(pack.cu_seqlens, ranks, rng)]
    return simulate(ds.partition(pack.cu_seqlens, ranks, fragments=table), **plan)


def forward(pack: Pack, ctx: ds.Context, **options: Any) -> tuple:
    states = {"initial_state": pack.initial_state, "output_final_state": True}
    return ds.forward(*map(ctx.shard, pack[1:6]), ctx, **states, **options)


def backward(pack: Pack, ctx: ds.Context, saved: Any, **options: Any) -> list[dict[str, Tensor]]:
    states = {"initial_state": pack.initial_state, "output_final_state": True, "dfinal_state": pack.dfinal_state}
    operands = [ctx.shard(x) for x in pack[1:6]]
    grads = ds.backward(*operands, ctx, ctx.shard(pack.do), saved=saved, **states, **options)
    return [{name: getattr(rank, name) for name in GRADIENTS} for rank in grads]


def assert_same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], about: Any) -> None:
    names = found[0].keys()
    different = [
        differing(a, {name: b[name] for name in names}) for a, b in zip(found, expected, strict=True)
    ]  # fmt: skip
    assert different == [[]] * len(expected), about


@pytest.mark.parametrize(
    ("layout", "ranks", "dtype", "plan"),
    [
        ("contiguous", 2, torch.float64, CUT),
        ("zigzag", 2, torch.bfloat16, WHOLE),
        ("zigzag_per_document", 2, torch.bfloat16, CUT),
        ("ragged", 2, torch.float64, WHOLE),
        ("ragged", 4, torch.bfloat16, CUT),  # the last one owns no head
        ("idle_rank", 3, torch.float64, CUT),
    ],
)
def test_the_bits_of_the_default(
    rng: torch.Generator, layout: str, ranks: int, dtype: torch.dtype, plan: dict[str, Any]
) -> None:
    pack = drawn(rng, dtype)
    ctx = context(pack, layout, rng, ranks, **plan)
    expected = run_rule(pack, ctx)
    for mode in MODES:
        assert_same(run_rule(pack, ctx, **mode), expected, mode)
        o, final_state, saved = forward(pack, ctx, **mode)
        outputs = [{"o": a, "final_state": b} for a, b in zip(o, final_state, strict=True)]
        assert_same(outputs, expected, mode)
        for given in (saved, None):
            assert_same(backward(pack, ctx, given, **mode), expected, mode)


@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_one_rank_alone(rng: torch.Generator, save_mode: str) -> None:
    """Without and with segments, and where the whole buffer is longer than the pack."""
    pack = drawn(rng)
    padded = pack._replace(**{n: torch.cat([x := getattr(pack, n), x[:, :5]], 1) for n in ("q", "k", "v", "g", "beta")})
    for plan, operands in product((WHOLE, CUT), (pack, padded)):
        ctx = ds.build_context(ds.partition(pack.cu_seqlens, 1), device="cpu", **plan)
        expected = step_alone(operands, ctx)
        for rest in ({}, {"boundary_mode": "replay"}, {"save_transfer": False}):
            assert all(map(same_bits, step_alone(operands, ctx, save_mode=save_mode, **rest), expected))


def step_alone(pack: Pack, ctx: ds.Context, **options: Any) -> list[Tensor]:
    leaves = [leaf(x) for x in pack[1:6]]
    o, _ = ds.chunk_gated_delta_rule(*leaves, ctx, **options)
    return [o.detach(), *torch.autograd.grad(o.sin().sum(), leaves)]


@pytest.mark.parametrize("mode", MODES, ids=label)
def test_thirty_steps_and_two_backwards_of_each(rng: torch.Generator, mode: dict[str, Any]) -> None:
    """The first step's graph is kept, and gives the same once more in the end."""
    pack = draw(rng, [5], **SHAPE).to(torch.bfloat16)
    ctx = simulate(split(pack.cu_seqlens, 2, "contiguous"))
    leaves = [leaf(x) for x in pack[1:6]]
    steps, roots = [], []
    for _ in range(30):
        o, _ = ds.chunk_gated_delta_rule(*map(ctx.shard, leaves), ctx, **mode)
        roots.append(o)
        steps.append([*o, *torch.autograd.grad(o, leaves, ctx.shard(pack.do), retain_graph=True)])
    steps.append([*roots[0], *torch.autograd.grad(roots[0], leaves, ctx.shard(pack.do))])
    assert all(same_bits(a, b) for step in steps[1:] for a, b in zip(step, steps[0], strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(roots[0], leaves, ctx.shard(pack.do))


@pytest.mark.parametrize("plan", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("mode", MODES, ids=label)
def test_autograd_keeps_what_is_foretold(rng: torch.Generator, mode: dict[str, Any], plan: dict) -> None:
    """Storages are counted, so that a view of something larger does not pass for what it shows."""
    pack = drawn(rng, torch.bfloat16)
    ctx = context(pack, "zigzag", rng, **plan)
    shards = [[leaf(x) for x in ctx.shard(x)] for x in pack[1:6]]
    ours = {x.untyped_storage().data_ptr() for column in shards for x in column}
    kept = {}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in ours and storage.nbytes():
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        roots = ds.chunk_gated_delta_rule(*shards, ctx, **mode)  # held: a freed storage's place may be used again
    foretold = sum(ds.saved_bytes(ctx, **SHAPE, **mode))
    assert sum(kept.values()) == foretold
    assert (foretold > 0) == (mode["boundary_mode"] == "saved")
    del roots


@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_replay_keeps_nothing(rng: torch.Generator, save_mode: str) -> None:
    pack = drawn(rng)
    ctx = context(pack, "zigzag", rng)
    *_, saved = forward(pack, ctx, save_mode=save_mode, boundary_mode="replay")
    assert saved is None
    *_, saved = forward(pack, alone(pack), save_mode=save_mode, boundary_mode="replay")
    assert saved is None


@pytest.mark.parametrize("mode", KEEPING, ids=label)
def test_a_saved_set_serves_again_and_is_left_alone(rng: torch.Generator, mode: dict[str, Any]) -> None:
    pack = drawn(rng)
    ctx = context(pack, "ragged", rng, **CUT)
    expected = run_rule(pack, ctx)
    *_, saved = forward(pack, ctx, **mode)
    before = [t.clone() for s in saved for t in s.tensors]
    for _ in range(2):
        assert_same(backward(pack, ctx, saved, **mode), expected, mode)
    assert all(map(same_bits, before, [t for s in saved for t in s.tensors]))
    assert all((len(s.tape) > 0) == (mode["save_mode"] == "full") for s in saved)
    assert all((s.kept is not None) == (s.maps is not None) == mode["save_transfer"] for s in saved)


def test_a_saved_set_is_frozen(rng: torch.Generator) -> None:
    pack = drawn(rng)
    *_, saved = forward(pack, context(pack, "zigzag", rng))
    for field in dataclasses.fields(Saved):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(saved[0], field.name, None)


@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_another_calls_saved_set_is_refused(rng: torch.Generator, save_mode: str) -> None:
    pack = drawn(rng)
    ctx = context(pack, "zigzag", rng)
    mode = {"save_mode": save_mode}
    *_, saved = forward(pack, ctx, **mode)
    with pytest.raises(ValueError, match=r"^saved was kept by a forward with another context"):
        backward(pack, simulate(ctx.part), saved, **mode)
    for other in ({"V": 4}, {"K": 5}, {"HV": 2}, {"dtype": torch.float32}):
        shape = SHAPE | other
        foreign = draw(rng, LENGTHS, **{n: shape[n] for n in SHAPE}).to(shape.get("dtype", torch.float64))
        with pytest.raises(ValueError, match=r"^saved was kept by a forward with another \w+: .*, got "):
            backward(foreign, ctx, saved, **mode)
    with pytest.raises(ValueError, match=r"^saved was kept by a forward with another \w+: .*, got "):
        ds.backward(
            *map(ctx.shard, pack[1:6]), ctx, ctx.shard(pack.do), saved=saved, output_final_state=True, **mode
        )  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [{"scale": 0.5}, {"exchange": "ring"}, {"save_mode": "full"}, {"save_transfer": False}, {"unit_keys": False},
     {"boundary_mode": "replay"}, {"segments": 1}, {"use_qk_l2norm_in_kernel": True}],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_other_options_are_refused(rng: torch.Generator, other: dict[str, Any]) -> None:
    pack = drawn(rng)
    ctx = context(pack, "zigzag", rng)
    *_, saved = forward(pack, ctx)
    ((name, value),) = other.items()
    with pytest.raises(ValueError, match=rf"^saved was kept by a forward with .*, got .*{name}={value!r}"):
        backward(pack, ctx, saved, **other)


@pytest.mark.parametrize("save_mode", ["light", "full"])
def test_a_saved_tensor_changed_in_place_is_refused(rng: torch.Generator, save_mode: str) -> None:
    pack = drawn(rng)
    ctx = context(pack, "zigzag", rng, **CUT)
    *_, saved = forward(pack, ctx, save_mode=save_mode)
    count = len(saved[1].tensors)
    assert count == (3 if save_mode == "light" else 3 + tier.kept_tensors(False))
    for i in range(count):
        *_, saved = forward(pack, ctx, save_mode=save_mode)
        saved[1].tensors[i].zero_()
        with pytest.raises(ValueError, match=r"^saved holds a tensor that was changed in place since the forward"):
            backward(pack, ctx, saved, save_mode=save_mode)


@pytest.mark.parametrize("wrong", [(1, 2, 3), "sets", {"entry": 1}])
def test_what_is_no_saved_set_is_refused(rng: torch.Generator, wrong: Any) -> None:
    pack = drawn(rng)
    ctx = alone(pack)
    with pytest.raises(TypeError, match=f"^saved must be what forward returned .*, got {type(wrong).__name__}"):
        ds.backward(*pack[1:6], ctx, pack.do, saved=wrong)


@pytest.mark.parametrize("mode", KEEPING, ids=label)
@pytest.mark.parametrize("retained", [False, True])
def test_what_was_kept_is_let_go_at_its_last_reader(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any], retained: bool
) -> None:
    """Maps when the adjoints walk, and the states too when gradients are formed; a retained graph keeps all."""
    pack = drawn(rng)
    ctx = context(pack, "zigzag", rng, ranks=2, **CUT)
    kept: list[Saved] = []  # by rank, with weak references in the place of tensors
    keep = Saved.of_mode

    def of_mode(saved: Saved, *args: Any) -> Saved:
        found = keep(saved, *args)
        kept.append(dataclasses.replace(found, **{n: watched(getattr(found, n)) for n in ("entry", "maps", "kept")}))
        return found

    def watched(x: Tensor | None) -> StorageWeakRef | None:
        return None if x is None else StorageWeakRef(x.untyped_storage())

    seen: dict[str, list[list[bool]]] = {}

    def spied(stage: str, names: tuple[str, ...]) -> Callable:
        real, seen[stage] = getattr(tier, stage), []

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            refs = [getattr(kept[len(seen[stage]) % len(kept)], name) for name in names]  # ranks come in turn
            seen[stage].append([ref.expired() for ref in refs if ref is not None])
            return real(*args, **kwargs)

        return wrapped

    transfers = ("maps", "kept")
    stages = {"adjoint_prep": transfers, "adjoint_walk": transfers, "gradients": ("entry", *transfers)}
    leaves = [leaf(x) for x in pack[1:6]]
    monkeypatch.setattr(Saved, "of_mode", of_mode)
    o, _ = ds.chunk_gated_delta_rule(*map(ctx.shard, leaves), ctx, **mode)
    for stage, names in stages.items():
        monkeypatch.setattr(tier, stage, spied(stage, names))
    assert len(kept) == 2
    grads = torch.autograd.grad(o, leaves, ctx.shard(pack.do), retain_graph=retained)
    maps = 2 * mode["save_transfer"]
    assert seen == {
        "adjoint_prep": [[False] * maps] * 2,  # they are still to be read
        "adjoint_walk": [[not retained] * maps] * 2,
        "gradients": [[not retained] * (1 + maps)] * 2,
    }
    if retained:
        again = torch.autograd.grad(o, leaves, ctx.shard(pack.do))
        assert all(map(same_bits, grads, again))


@pytest.mark.parametrize("K", [3, 15, 17, 31])
def test_maps_formed_again_have_the_same_bits_at_odd_head_dims(rng: torch.Generator, K: int) -> None:
    """Products side by side may depend on how many there are: maps are formed again among the same ones."""
    pack = draw(rng, [320, 40], H=1, HV=3, K=K, V=5)
    ctx = simulate(split(pack.cu_seqlens, 1, "contiguous"))
    expected = run_rule(pack, ctx, segments=4)
    assert [
        differing(*pair) for pair in zip(run_rule(pack, ctx, segments=4, save_transfer=False), expected, strict=True)
    ] == [[]]


def test_a_set_of_another_rank_is_refused(rng: torch.Generator) -> None:
    pack = draw(rng, [64, 64], H=1, HV=4)
    ctx = simulate(split(pack.cu_seqlens, 2, "zigzag"))
    operands = [ctx.shard(x) for x in pack[1:6]]
    _, _, saved = ds.forward(*operands, ctx)
    with pytest.raises(ValueError, match="kept by the forward of rank 1, and given to rank 0"):
        ds.backward(*operands, ctx, ctx.shard(pack.do), saved=saved[::-1])
    with pytest.raises(ValueError, match=r"forward with exchange='all_to_all', got exchange='ring'$"):
        ds.backward(*operands, ctx, ctx.shard(pack.do), saved=saved, exchange="ring")
    copied = copy.deepcopy(saved)
    assert all(a is b for a, b in zip(copied, saved, strict=True))  # read-only: there is nothing to copy
