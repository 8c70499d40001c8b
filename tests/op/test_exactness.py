"""FP64 results and gradients against the token recurrence, for every layout and any number of ranks."""

import pytest
import torch

from tests.op.support import (
    LAYOUTS,
    assert_exact,
    differing,
    draw,
    join,
    run_convolution,
    run_rule,
    simulate,
    split,
    true_convolution,
    true_rule,
)

# FP64 as deltaspan promises it. The truth itself is worth 1e-12: a few hundred products of terms around 1.
TOLERANCE = 1e-10

REGIMES = {
    "moderate": {},
    "slow": {"decay": "slow"},
    "strong": {"decay": "strong"},
    "zero": {"decay": "zero"},
    "mixed_heads": {"decay": "mixed"},
    "minus_infinity": {"decay": "cut"},
    "beta_near_1": {"decay": "slow", "beta": (1 - 1e-6, 1)},
    "beta_near_2": {"decay": "slow", "beta": (2 - 1e-6, 2)},
    "beta_0": {"beta": (0, 0)},
    "collinear_keys": {"decay": "slow", "key_noise": 1e-3, "beta": (0.9, 1)},
    "reflected_collinear_keys": {"decay": "zero", "key_noise": 1e-3, "beta": (1.9, 2)},
    "long_keys": {"key_length": (0.5, 1.4)},
    "very_long_keys": {"decay": "strong", "key_length": (1, 4)},
}
WORLDS = (1, 2, 3, 4, 8)
SHAPES = (  # H, HV, K, V: ratios 1 to 5, heads that no world size divides, fewer heads than ranks, K != V
    (2, 4, 8, 8),
    (1, 1, 8, 8),
    (1, 3, 4, 12),
    (2, 2, 16, 5),
    (1, 4, 7, 8),
    (3, 6, 4, 4),
    (1, 5, 6, 9),
)
LENGTHS = [70, 1, 0, 130, 3, 64, 17]

ROWS = [
    pytest.param(regime, layout, WORLDS[(r + i) % 5], SHAPES[(2 * r + i) % 7], id=f"{regime}-{layout}")
    for r, regime in enumerate(REGIMES)
    for i, layout in enumerate(LAYOUTS)
]


def test_rows_pair_everything_with_everything() -> None:
    rows = [row.values for row in ROWS]
    for a, b in ((1, 2), (1, 3), (2, 3)):
        pairs = {(row[a], row[b]) for row in rows}
        assert len(pairs) == len({a for a, _ in pairs}) * len({b for _, b in pairs})
    assert {row[2] for row in rows} == set(WORLDS)


@pytest.mark.parametrize(("regime", "layout", "world_size", "shape"), ROWS)
def test_rule(rng: torch.Generator, regime: str, layout: str, world_size: int, shape: tuple[int, ...]) -> None:
    H, HV, K, V = shape
    pack = draw(rng, LENGTHS, H=H, HV=HV, K=K, V=V, **REGIMES[regime])
    part = split(pack.cu_seqlens, world_size, layout, rng)
    found = join(part, run_rule(pack, simulate(part), unit_keys="long" not in regime))
    assert_exact(found, true_rule(pack), TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_of_unit_length_need_no_promise(rng: torch.Generator, layout: str) -> None:
    pack = draw(rng, LENGTHS)
    part = split(pack.cu_seqlens, 3, layout, rng)
    assert_exact(join(part, run_rule(pack, simulate(part), unit_keys=False)), true_rule(pack), TOLERANCE)


def test_decays_below_minus_1000_count_as_that(rng: torch.Generator) -> None:
    """To the bit, and with no gradient at all, where roundings of what cancels would leave some."""
    pack = draw(rng, LENGTHS, decay="cut")
    cut = pack.g < -1000
    ctx = simulate(split(pack.cu_seqlens, 3, "zigzag"))
    found = join(ctx.part, run_rule(pack, ctx))
    assert cut.any() and not found["dg"][cut].any()
    for depth in (-1001.0, -1e30):
        assert differing(join(ctx.part, run_rule(pack._replace(g=pack.g.masked_fill(cut, depth)), ctx)), found) == []
    limit = join(ctx.part, run_rule(pack._replace(g=pack.g.clamp(min=-1000)), ctx))
    del limit["dg"], found["dg"]
    assert differing(limit, found) == []


def test_scale(rng: torch.Generator) -> None:
    pack = draw(rng, [70, 20])
    part = split(pack.cu_seqlens, 3, "zigzag")
    assert_exact(join(part, run_rule(pack, simulate(part), scale=-2)), true_rule(pack, scale=-2), TOLERANCE)


CONVOLUTIONS = [
    pytest.param(layout, W, taps, ("silu", None)[(n + i) % 2], (n + i) % 4 < 2, id=f"{layout}-{W}-{taps}")
    for n, (W, taps) in enumerate([(1, 4), (2, 3), (3, 1), (4, 2), (8, 4), (8, 70), (3, 5)])
    for i, layout in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("layout", "world_size", "taps", "activation", "bias"), CONVOLUTIONS)
def test_convolution(
    rng: torch.Generator, layout: str, world_size: int, taps: int, activation: str | None, bias: bool
) -> None:
    pack = draw(rng, LENGTHS, taps=taps)
    part = split(pack.cu_seqlens, world_size, layout, rng)
    ctx = simulate(part, conv_kernel_size=taps)
    found = join(part, run_convolution(pack, ctx, activation=activation, bias=bias))
    assert_exact(found, true_convolution(pack, activation=activation, bias=bias), TOLERANCE)
