"""States composed along documents by every exchange, against one loop along each document."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

import deltaspan as ds
from deltaspan.exchange import (
    EXCHANGES,
    HaloRoute,
    Hop,
    Program,
    Seams,
    SimulatedGroup,
    carry_adjoints,
    carry_states,
    fetch_rows,
)
from deltaspan.kernels import torch as affine
from deltaspan.layout import Partition, halo_plan
from deltaspan.plan import Chains, chain_links, crossings, ring_hops
from tests.helpers import same_bits

LENGTHS = [40, 1, 0, 25, 3, 60]
LAYOUTS = ("contiguous", "zigzag", "zigzag_per_document", "scattered")
K, V = 4, 3


@pytest.fixture(params=LAYOUTS)
def part(request: pytest.FixtureRequest, rng: torch.Generator) -> Partition:
    cu_seqlens = [0, *np.cumsum(LENGTHS).tolist()]
    if request.param != "scattered":
        return ds.partition(cu_seqlens, 3, request.param)
    table = []
    for doc, length in enumerate(LENGTHS):
        cuts = [0, *sorted(torch.randint(0, length + 1, (8,), generator=rng).tolist()), length]
        ranks = torch.randint(0, 3, (9,), generator=rng).tolist()
        table += [(doc, a, b - a, r) for a, b, r in zip(cuts[:-1], cuts[1:], ranks, strict=True)]
    return ds.partition(cu_seqlens, 3, fragments=table)


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float64)


def links(part: Partition) -> tuple[Chains, Chains]:
    return tuple(
        way._replace(steps=tuple(tuple(map(torch.from_numpy, step)) for step in way.steps)) for way in chain_links(part)
    )


def composed(M: Tensor, b: Tensor, chains: Chains) -> Tensor:
    return affine.chain(M, b, chains, maps=False)[1]


def along_documents(part: Partition, M: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Entry states by in number and exit adjoints by out number, fragment by fragment in the order of the tokens."""
    number_out, number_in = np.cumsum(part.crossing_out) - 1, np.cumsum(part.crossing_in) - 1
    entry, leaving = torch.full_like(d, torch.nan), torch.full_like(b, torch.nan)
    for doc in range(part.num_documents):
        chain = part.chains().of(doc).tolist()
        state = torch.zeros_like(b[:1]).squeeze(0)
        for left, entered in pairwise(chain):
            state = M[number_out[left]] @ state + b[number_out[left]]
            entry[number_in[entered]] = state
        adjoint = torch.zeros_like(state)
        for left, entered in reversed([*pairwise(chain)]):
            passed = M[number_out[entered]].mT @ adjoint if part.crossing_out[entered] else adjoint
            adjoint = passed + d[number_in[entered]]
            leaving[number_out[left]] = adjoint
    return entry, leaving


def drawn(rng: torch.Generator, part: Partition, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """M and b by out number, d by in number."""
    N_out, N_in = part.crossing_out.sum(), part.crossing_in.sum()
    return 0.4 * normal(rng, N_out, heads, K, K), normal(rng, N_out, heads, K, V), normal(rng, N_in, heads, K, V)


def test_composition(rng: torch.Generator, part: Partition) -> None:
    M, b, d = drawn(rng, part, 2)
    forward, backward = links(part)
    entry, leaving = along_documents(part, M, b, d)
    close = {"rtol": 0, "atol": 1e-12}  # at most eight products of terms around 1
    torch.testing.assert_close(composed(M, b, forward), entry, **close)
    torch.testing.assert_close(composed(M.mT, d, backward), leaving, **close)


def test_composition_keeps_documents_apart(rng: torch.Generator, part: Partition) -> None:
    M, b, d = drawn(rng, part, 1)
    forward, backward = links(part)
    clean = composed(M, b, forward), composed(M.mT, d, backward)
    out_doc, in_doc = part.table.doc[part.crossing_out], part.table.doc[part.crossing_in]
    for doc in set(out_doc.tolist()):
        of_out, of_in = (torch.from_numpy(x == doc) for x in (out_doc, in_doc))
        ill_M, ill_b, ill_d = M.clone(), b.clone(), d.clone()
        ill_M[of_out], ill_b[of_out], ill_d[of_in] = torch.nan, torch.inf, torch.nan
        ill = composed(ill_M, ill_b, forward), composed(ill_M.mT, ill_d, backward)
        assert same_bits(ill[0][~of_in], clean[0][~of_in]) and not ill[0][of_in].isfinite().any()
        assert same_bits(ill[1][~of_out], clean[1][~of_out]) and not ill[1][of_out].isfinite().any()


def seams(part: Partition, rank: int) -> Seams:
    n_out, n_in, n_through = (tuple(n.tolist()) for n in crossings(part))
    own = part.rows(rank)
    through = part.crossing_in[part.crossing_out], part.crossing_in[own][part.crossing_out[own]]

    def hops() -> tuple[tuple[Hop, ...], ...]:
        return tuple(
            tuple(Hop(step == 0, *map(torch.from_numpy, hop[:4]), *hop[4:]) for step, hop in enumerate(way))
            for way in ring_hops(part, rank)
        )

    numbers = (torch.from_numpy(np.flatnonzero(x)) for x in through)
    return Seams(rank, n_out, n_in, n_through, *numbers, *links(part), hops)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("heads", [1, 2, 4, 5])
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "sent again"])
def test_states_and_adjoints_come_home(
    rng: torch.Generator, part: Partition, heads: int, exchange: str, keep: bool
) -> None:
    """By the maps of fragments that state enters and leaves alone."""
    M, b, d = drawn(rng, part, heads)
    forward, backward = links(part)

    def program(rank: int, *share: Tensor) -> Program[tuple[Tensor, Tensor]]:
        mine, (M, b, d) = seams(part, rank), share
        M = M[mine.own_through]
        entry, kept = yield from carry_states(exchange, mine, affine, M, b, "")
        both = (kept, None) if keep else (None, M)
        return entry, (yield from carry_adjoints(exchange, mine, affine, *both, d, ""))

    n_out, n_in = (n.tolist() for n in crossings(part)[:2])
    shares = zip(M.split(n_out), b.split(n_out), d.split(n_in), strict=True)
    done = SimulatedGroup(3).run([program(rank, *share) for rank, share in enumerate(shares)])
    entry, leaving = (torch.cat(x) for x in zip(*done, strict=True))
    # as if each head were composed by itself: who composes it, and where, changes no bit
    assert same_bits(entry, composed(M, b, forward))
    assert same_bits(leaving, composed(M.mT, d, backward))


def test_rows_of_a_halo(rng: torch.Generator, part: Partition) -> None:
    """The rows that arrive are those of the tokens that the plan promised, of all tensors side by side."""
    width = 4
    whole = [torch.arange(part.total_tokens)[:, None].double(), normal(rng, part.total_tokens, 3)]
    plans = [halo_plan(part, width, rank) for rank in range(3)]

    def program(rank: int):
        p, mine = plans[rank], torch.from_numpy(part.token_ids(rank))
        index, sent, received = torch.tensor(p.send_index), tuple(p.send_counts.tolist()), tuple(p.recv_counts.tolist())
        route = HaloRoute(index, sent, received, False)
        return (yield from fetch_rows("halo", route, [x[mine] for x in whole]))

    for rank, (tokens, rows) in enumerate(SimulatedGroup(3).run([program(rank) for rank in range(3)])):
        assert same_bits(rows, whole[1][tokens[:, 0].long()])
        table = part.table
        for slot, row in enumerate(range(part.rows(rank).start, part.rows(rank).stop)):
            for tap, at in enumerate(plans[rank].history_row[slot]):
                if at >= 0:
                    assert tokens[at, 0] == table.start[row] - (width - 1) + tap


def test_a_quiet_halo_asks_for_nothing() -> None:
    route = HaloRoute(torch.zeros(0, dtype=torch.int64), (0,), (0,), True)
    program = fetch_rows("halo", route, [torch.ones(5, 2), torch.ones(5, 3)])
    with pytest.raises(StopIteration) as end:
        next(program)
    assert [x.shape for x in end.value.value] == [(0, 2), (0, 3)]
