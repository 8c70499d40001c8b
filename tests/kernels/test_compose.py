"""Affine maps one after another: merges, chains and what arrives, on the emulator and on a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import deltaspan as ds
from deltaspan.plan import chains_of, passages, segment_table
from tests.emulator import load, path_of
from tests.kernels.test_hopper import TIER, Machine, bits, relative


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(request.param)


def test_merge(rng: torch.Generator, machine: Machine) -> None:
    """In fp32, with the same bits whatever stands beside."""
    M, X, b = (torch.randn(3, 2, 128, 128, generator=rng) for _ in range(3))
    compose = machine.module("compose")
    given = [t.to(machine.device) for t in (M / 11, X, b)]
    for m, truth in ((given[0], M.double() / 11 @ X.double()), (given[0].mT, M.mT.double() / 11 @ X.double())):
        found = compose.merge(m, *given[1:])
        # 128 sums, each rounded by up to 2^-24 of what there is: a walk of errors of 2^-25, of 11 steps
        assert relative(found, truth + b.double()) < 5e-7
        alone = compose.merge(m[1:2, 1:], given[1][1:2, 1:], given[2][1:2, 1:])
        assert torch.equal(alone[0, 0], found[1, 1])
        beside = compose.merge(m, *(torch.cat([t, t.flip(0)], -1) for t in given[1:]))
        assert torch.equal(beside[..., :128], found)
    if machine.device == "cpu":  # and in eleven bits it would be seen
        source = path_of(f"{TIER}.compose").read_text()
        rounded = "b = gl.dot_fma(m.slice(k, PART, 1).load(LEFT).to(gl.float16).to(gl.float32),"
        short = load(f"{TIER}.compose", source.replace("b = gl.dot_fma(m.slice(k, PART, 1).load(LEFT),", rounded))
        short = short.merge(*given)
        assert relative(short, M.double() / 11 @ X.double() + b.double()) > 1e-4


CHAINS = chains_of(  # of three members, of one, and of two; places 1 and 5 are for others to fill
    *(np.array(x) for x in ([0, 2, 0, 7, 0, 2], [0, 0, 1, 0, 2, 1], [4, 1, 2, 0, 1, 3], [0, 3, 3, 2, 1, 0],
                            [0, 6, 4, 2, 3, 7])),
    wanted=np.array([1, 0, 0, 0, 0, 0, 0, 1]), places=8,
)  # fmt: skip


def test_chains_in_the_place_of_their_offsets(rng: torch.Generator, machine: Machine) -> None:
    way = passages(part := ds.partition([0, 700, 900], 1), 0, segment_table(part, 0, (2, 1, 1)))[0]
    assert way.in_place and len(way.chains.steps) == 2
    arrays = {name: torch.from_numpy(getattr(way.chains, name)).int() for name in ("table", "starts", "wanted")}
    chains = way.chains._replace(**{name: x.to(machine.device) for name, x in arrays.items()})
    M, b = (torch.randn(n, 2, 128, 128, generator=rng).to(machine.device) / 11 for n in (2, 4))
    chain, given = machine.module("compose").chain, b.clone()
    expected = chain(M, b, chains, maps=False)[1]
    assert torch.equal(b, given)
    found = chain(M, b, chains, maps=False, in_place=True)[1]
    assert found is b and torch.equal(found, expected)
    apart = given.new_empty(4, 3, 128, 128)[:, :2].copy_(given)  # among others', where it stays
    assert torch.equal(chain(M, apart, chains, maps=False, in_place=True)[1], expected)
    assert torch.equal(apart, given)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("given", ["both", "maps", "offsets"])
@pytest.mark.parametrize("HV", [1, 2])
def test_chains(rng: torch.Generator, machine: Machine, transposed: bool, given: str, HV: int) -> None:
    """The bits of merging member by member; of maps and offsets that lie between others."""
    maps, offsets = (
        torch.randn(5, HV, 128 * 200, generator=rng)[..., : 128 * 128].unflatten(-1, (128, 128)) / n for n in (11, 1)
    )
    device = machine.device
    arrays = {name: torch.from_numpy(getattr(CHAINS, name)).int().to(device) for name in ("table", "starts", "wanted")}
    steps = tuple(tuple(torch.from_numpy(x).to(device) for x in step) for step in CHAINS.steps)
    chains = CHAINS._replace(steps=steps, **arrays)
    M, b = maps.to(device), None if given == "maps" else offsets.to(device)
    M = M.mT if transposed else M
    compose = machine.module("compose")
    found_maps, found_offsets, _ = compose.chain(M, b, chains, maps=given != "offsets")
    assert (found_maps is None, found_offsets is None) == (given == "offsets", given == "maps")
    if found_offsets is not None:  # in two tensors, of which neither keeps the other
        _, near, beyond = compose.chain(M, b, chains, maps=given != "offsets", apart=4)
        assert len(near) == len(beyond) == 4 and near.untyped_storage().nbytes() == near.nbytes
        used = CHAINS.table[:, 2]
        assert torch.equal(torch.cat([near, beyond])[used], found_offsets[used])
    starts = [*CHAINS.starts.tolist()]
    for chain, wanted in enumerate(CHAINS.wanted.tolist()):
        state = passed = None
        for row, offset, place in CHAINS.table[starts[chain] : starts[chain + 1]].tolist():
            if found_offsets is not None:
                state = b[offset] if state is None else compose.merge(M[row], state, b[offset])
                assert torch.equal(found_offsets[place], state)
            if found_maps is not None and wanted:
                passed = M[row] if passed is None else compose.merge(M[row], passed, torch.zeros_like(passed))
                assert torch.equal(found_maps[place], passed)


@pytest.mark.parametrize("HV", [1, 9])  # by 8 columns, and by 64
def test_a_chain_of_six_is_merged_member_by_member(rng: torch.Generator, machine: Machine, HV: int) -> None:
    """Some of whose maps are nothing, at the end, too; each is asked for while others are on their way."""
    order = np.array([2, 0, 5, 1, 4, 3])
    chains = chains_of(np.zeros(6, int), np.arange(6), order, order[::-1], np.arange(6), wanted=np.zeros(1, int))
    arrays = {name: torch.from_numpy(getattr(chains, name)).int() for name in ("table", "starts", "wanted")}
    M, b = (torch.randn(6, HV, 128, 128, generator=rng) / n for n in (11, 1))
    M[[1, 3]], M[5, HV // 2] = -0.0, -0.0
    M, b, compose = M.to(machine.device), b.to(machine.device), machine.module("compose")
    chains = chains._replace(**{name: x.to(machine.device) for name, x in arrays.items()})
    _, found, _ = compose.chain(M, b, chains, maps=False)
    state = b[3]
    assert torch.equal(found[0], state)
    for place, (row, offset) in enumerate(zip(order[1:], order[-2::-1], strict=True), 1):
        state = compose.merge(M[row], state, b[offset])
        assert torch.equal(found[place], state)


@pytest.mark.parametrize("HV", [1, 3])
def test_arrivals(rng: torch.Generator, machine: Machine, HV: int) -> None:
    """The bits of merging; nothing else is read or written, and without joints no map."""
    maps, reached, arrived = (torch.randn(n, HV, 128, 128, generator=rng) for n in (6, 5, 2))
    maps /= 11
    maps[[1, 2, 5]] = torch.nan
    arriving, through, source = (torch.tensor(x).to(machine.device) for x in ([4, 1], [0, 3], [1, 0]))
    compose = machine.module("compose")
    maps, before, arrived = (x.to(machine.device) for x in (maps, reached, arrived))
    expected, found = before.clone(), before.clone()
    expected[[4, 1]] = arrived
    expected[[0, 3]] = compose.merge(maps[[0, 3]], arrived[[1, 0]], before[[0, 3]])
    way = SimpleNamespace(arriving=arriving, through=through, source=source)
    compose.tell(maps, arrived.mT.contiguous().mT, found, way)
    assert torch.equal(found, expected)
    none, found = through[:0], before.clone()
    compose.tell(None, arrived, found, SimpleNamespace(arriving=arriving, through=none, source=none))
    expected[[0, 3]] = before[[0, 3]]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_chains_skip_what_is_not_felt(rng: torch.Generator, machine: Machine, transposed: bool) -> None:
    """With the bits of the product, also where a state is no number; NaN in what is skipped goes unread."""
    maps, b = (torch.randn(5, 2, 128, 128, generator=rng) / n for n in (11, 1))
    b[3, 1, 7, 40], b[1, 0, 2, 3] = torch.nan, torch.inf  # heads of the long chain and of the pair
    plain, skipped = maps.clone(), maps
    skipped[2, :, :], skipped[3, 0] = torch.nan, torch.nan
    skipped[2, :, 0, 0] = skipped[3, 0, 0, 0] = -0.0
    plain[2], plain[3, 0] = 0.0, 0.0
    device, compose = machine.device, machine.module("compose")
    arrays = {name: torch.from_numpy(getattr(CHAINS, name)).int().to(device) for name in ("table", "starts", "wanted")}
    chains = CHAINS._replace(**arrays)
    (M, o, _), (N, p, _) = (
        compose.chain(m.mT if transposed else m, b.to(device), chains, maps=True)
        for m in (x.to(device) for x in (skipped, plain))
    )
    used, wanted = CHAINS.table[:, 2], [0, 4, 3]
    assert o[used].isnan().any() and o[used].isfinite().any()
    torch.testing.assert_close(o[used], p[used], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(M[wanted], N[wanted], rtol=0, atol=0, equal_nan=True)
    assert (bits(M[4]) == -(2**31)).all() and not (bits(N[4]) == -(2**31)).any()  # composed with such
    one, other = (compose.merge(*(t.to(device) for t in (m[2], b[3], b[0]))) for m in (skipped, plain))
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_no_zero_of_a_composed_map_says_that_there_is_none(rng: torch.Generator, machine: Machine) -> None:
    """Where all terms of a sum are zeros below zero."""
    M = -torch.rand(5, 1, 128, 128, generator=rng)
    M[1:4] = 0.0
    device = machine.device
    arrays = {name: torch.from_numpy(getattr(CHAINS, name)).int().to(device) for name in ("table", "starts", "wanted")}
    found, _, _ = machine.module("compose").chain(M.to(device), None, CHAINS._replace(**arrays), maps=True)
    assert not found[[4, 3]].any() and not (bits(found[[4, 3]]) == -(2**31)).any()
