"""What goes wrong in one document stays there: no bit of another document's results changes."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import deltaspan as ds
from tests.helpers import same_bits
from tests.op.support import (
    LAYOUTS,
    STATES,
    TOKENWISE,
    Pack,
    draw,
    join,
    offsets,
    run_convolution,
    run_rule,
    simulate,
    split,
)

LENGTHS = [70, 1, 45, 40]
STARTS = offsets(LENGTHS)
WORLD_SIZE = 3


def places(part: ds.Partition) -> Iterator[tuple[int, int]]:
    """(document, token of the pack): a document's last token, one on each side of a seam, and a document by itself."""
    fragments = [f for rank in part.fragments for f in rank if f.length]
    seam = next(f for f in fragments if f.doc == 2 and f.prev)
    yield 0, LENGTHS[0] - 1
    yield 1, STARTS[1]
    yield 2, STARTS[2] + seam.offset
    yield 2, STARTS[2] + seam.offset - 1


def plant(pack: Pack, name: str, doc: int, token: int, value: float) -> Pack:
    """The pack with `value` in one element of a token, or of a document's state."""
    x = getattr(pack, name).clone()
    row = x[doc] if name in ("initial_state", "dfinal_state") else x[0, token]
    row.view(-1)[-1] = value
    return pack._replace(**{name: x})


def of_document(result: Tensor, name: str, doc: int) -> Tensor:
    return result[doc] if name in STATES else result[:, STARTS[doc] : STARTS[doc + 1]]


def assert_contained(ill: dict[str, Tensor], clean: dict[str, Tensor], doc: int, where: object) -> None:
    """No bit differs but in one document."""
    for name in clean:
        for other in range(len(LENGTHS)):
            if other != doc:
                a, b = (of_document(x[name], name, other) for x in (ill, clean))
                assert same_bits(a, b), f"{where}: {name} of document {other}"


@pytest.fixture(params=LAYOUTS)
def part(request: pytest.FixtureRequest, rng: torch.Generator) -> ds.Partition:
    """One whose document 2 has a seam."""
    while True:
        part = split(STARTS, WORLD_SIZE, request.param, rng)
        if any(f.prev for rank in part.fragments for f in rank if f.doc == 2):
            return part


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rule(rng: torch.Generator, part: ds.Partition, value: float) -> None:
    pack = draw(rng, LENGTHS, H=1, HV=2, K=4, V=4).to(torch.float32)
    ctx = simulate(part)
    clean = join(part, run_rule(pack, ctx))
    for name in (*TOKENWISE, "initial_state", "do", "dfinal_state"):
        for doc, token in places(part):
            ill = join(part, run_rule(plant(pack, name, doc, token, value), ctx))
            assert_contained(ill, clean, doc, name)
            assert not all(of_document(x, n, doc).isfinite().all() for n, x in ill.items()), f"{name} is not read"


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_convolution(rng: torch.Generator, part: ds.Partition, value: float) -> None:
    pack = draw(rng, LENGTHS).to(torch.float32)
    ctx = simulate(part)

    def rows(pack: Pack) -> dict[str, Tensor]:
        """The parameters' gradients are sums over all documents, and ill if one is."""
        return {n: x for n, x in join(part, run_convolution(pack, ctx)).items() if n in ("y", "dx")}

    clean = rows(pack)
    for name, read_by in (("x", {"y", "dx"}), ("dy", {"dx"})):
        for doc, token in places(part):
            ill = rows(plant(pack, name, doc, token, value))
            assert_contained(ill, clean, doc, name)
            assert {n for n, x in ill.items() if not of_document(x, n, doc).isfinite().all()} == read_by


def with_long_key(pack: Pack, token: int) -> Pack:
    k = pack.k.clone()
    k[:, token] *= 1.1
    return pack._replace(k=k)


def test_long_key(rng: torch.Generator, part: ds.Partition) -> None:
    pack = draw(rng, LENGTHS, H=1, HV=2, K=4, V=4).to(torch.bfloat16)
    ctx = simulate(part)
    clean = join(part, run_rule(pack, ctx))
    for doc, token in places(part):
        ill = join(part, run_rule(with_long_key(pack, token), ctx))
        assert_contained(ill, clean, doc, token)
        assert all(of_document(x, n, doc).isnan().any() for n, x in ill.items())
        assert ill["o"][:, token : STARTS[doc + 1]].isnan().all() and ill["final_state"][doc].isnan().all()
        # loud for whoever trains on this document: no token's key has a gradient that looks fine
        assert of_document(ill["dk"], "dk", doc).isnan().any(-1).all()


def test_long_key_leaves_what_came_before(rng: torch.Generator, part: ds.Partition) -> None:
    pack = draw(rng, LENGTHS, H=1, HV=2, K=4, V=4).to(torch.bfloat16)
    ctx = simulate(part)
    clean = join(part, run_rule(pack, ctx))
    for _, token in places(part):
        ill = join(part, run_rule(with_long_key(pack, token), ctx))
        assert same_bits(ill["o"][:, :token], clean["o"][:, :token])


def test_promise_is_not_asked_for_without_unit_keys(rng: torch.Generator, part: ds.Partition) -> None:
    pack = draw(rng, LENGTHS, key_length=(1.1, 1.1)).to(torch.bfloat16)
    found = join(part, run_rule(pack, simulate(part), unit_keys=False))
    assert all(x.isfinite().all() for x in found.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_breaks_no_promise(rng: torch.Generator, dtype: torch.dtype) -> None:
    """Keys of few channels gain most by rounding: all alike, they may all round up."""
    pack = draw(rng, [4096], H=1, HV=1, K=1, V=1)
    for K in (1, 2, 3, 7, 128):
        k = torch.ones(1, 4096, 1, K, dtype=torch.float64)
        k = torch.nn.functional.normalize(k + 0.1 * torch.rand(k.shape, generator=rng, dtype=torch.float64), dim=-1)
        ill = pack._replace(q=k, k=k, initial_state=torch.zeros(1, 1, K, 1)).to(dtype)
        ctx = ds.build_context(ds.partition([0, 4096], 1), device="cpu")
        o, _ = ds.chunk_gated_delta_rule(ill.q, ill.k, ill.v, ill.g, ill.beta, ctx)
        assert o.isfinite().all()
