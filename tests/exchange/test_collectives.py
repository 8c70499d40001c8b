"""Every collective gives on real ranks what it gives on simulated ones, and both give what its words say."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deltaspan.exchange import AllGather, AllToAll, PeerToPeer, ProcessGroup, Program, SimulatedGroup, transport
from tests.helpers import gloo, same_bits

TYPES = (torch.bfloat16, torch.float64, torch.int64, torch.bool)
ROWS = {"vectors": (3,), "numbers": (), "matrices": (2, 5), "nothing": (0,), "nothings": (4, 0, 2)}
SENT = {"some": 0.7, "few": 0.15, "none": 0.0}  # how many of the pairs of ranks have anything to say


def counts(seed: int, world_size: int, share: float) -> list[list[int]]:
    """Rows from each rank to each."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, 4, (world_size, world_size), generator=rng)
    return (rows * (torch.rand(world_size, world_size, generator=rng) < share)).tolist()


def rows_of(sender: int, n: int, dtype: torch.dtype, row: tuple[int, ...]) -> Tensor:
    """Strided, so that nothing relies on how rows lie in memory."""
    rng = torch.Generator().manual_seed(100 + sender)
    x = torch.randint(-9, 9, (*row, n), generator=rng).to(dtype)
    return x.movedim(-1, 0)


def program(rank: int, table: list[list[int]], dtype: torch.dtype, row: tuple[int, ...]) -> Program[list[Tensor]]:
    sent, received = tuple(table[rank]), tuple(line[rank] for line in table)
    sums = tuple(map(sum, table))
    there = yield AllToAll("there", rows_of(rank, sum(sent), dtype, row), sent, received)
    everyone = yield AllGather("everyone", rows_of(rank, sums[rank], dtype, row), sums)
    back = yield AllToAll("back", there, received, sent)
    again = yield PeerToPeer("again", back, sent, received)
    return [there, everyone, back, again]


def real(seed: int, share: float, dtype: torch.dtype, row: tuple[int, ...]) -> list[Tensor]:
    group = ProcessGroup(dist.group.WORLD)
    assert group.ranks == (dist.get_rank(),) and group.default_device().type == "cpu"
    return group.run([program(dist.get_rank(), counts(seed, group.world_size, share), dtype, row)])[0]


@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_real_and_simulated(rng: torch.Generator, dtype: torch.dtype, row: str, sent: str) -> None:
    seed, W = rng.initial_seed(), 2
    table = counts(seed, W, SENT[sent])
    simulated = SimulatedGroup(W).run([program(r, table, dtype, ROWS[row]) for r in range(W)])
    for rank, arrived in enumerate(gloo(W).run(real, seed, SENT[sent], dtype, ROWS[row])):
        assert all(map(same_bits, arrived, simulated[rank]))

    # and what they agree on is what the words say
    rows = [rows_of(r, sum(table[r]), dtype, ROWS[row]) for r in range(W)]
    for rank, (there, everyone, back, again) in enumerate(simulated):
        blocks = [rows[r].split(table[r])[rank] for r in range(W)]
        assert same_bits(there, torch.cat(blocks))
        assert same_bits(everyone, torch.cat(rows))
        assert same_bits(back, rows[rank])
        assert same_bits(again, there)


def test_four_real_ranks(rng: torch.Generator) -> None:
    seed, args = rng.initial_seed(), (0.5, torch.bfloat16, (3,))
    table = counts(seed, 4, 0.5)
    simulated = SimulatedGroup(4).run([program(r, table, *args[1:]) for r in range(4)])
    for rank, arrived in enumerate(gloo(4).run(real, seed, *args)):
        assert all(map(same_bits, arrived, simulated[rank]))


def test_a_rank_of_its_own() -> None:
    alone = transport(None)
    assert alone.world_size == 1 and alone.ranks == (0,)
    (arrived,) = alone.run([program(0, [[2]], torch.float64, (3,))])
    assert all(same_bits(x, rows_of(0, 2, torch.float64, (3,))) for x in arrived)
    assert transport(group := SimulatedGroup(3)) is group


def quiet() -> int:
    """A program that asks for nothing returns, whatever the others do."""

    def program() -> Program[int]:
        return 7
        yield

    return ProcessGroup(dist.group.WORLD).run([program()])[0] if dist.get_rank() else 0


def test_nothing_asked() -> None:
    assert gloo(2).run(quiet) == [0, 7]


def broken() -> str:
    """A rank that asks for more than its send holds."""
    try:
        ProcessGroup(dist.group.WORLD).run([asking(AllToAll("errand", torch.zeros(3, 2), (2, 2), (2, 2)))])
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_error_names_the_collective_and_the_rank() -> None:
    for rank, said in enumerate(gloo(2).run(broken)):
        assert said.startswith(f"rank {rank}: collective 'errand' failed: ")


def miscounted() -> str:
    """Rank 1 expects a row more of rank 0 than that sends, as only an error of ours can make it."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    rank = dist.get_rank(group)
    ask = AllToAll("errand", torch.zeros(4, 2), (2, 2), (3, 2) if rank else (2, 2))
    try:
        ProcessGroup(group).run([asking(ask)])
    except RuntimeError as error:
        return str(error)
    return ""


def asking(ask: AllToAll) -> Program[Tensor]:
    return (yield ask)


def test_a_rank_that_is_sent_too_little_says_so() -> None:
    said = gloo(2).run(miscounted)[1]
    assert said.startswith("rank 1: collective 'errand': rank 0 sends 16 bytes, this rank's operands ask for 24")


def destroyed() -> str:
    """What a group says that was destroyed, which nobody then holds."""
    named = dist.new_group()
    group = ProcessGroup(named)
    dist.destroy_process_group(named)
    del named
    try:
        group.run([asking(AllToAll("errand", torch.zeros(4, 2), (2, 2), (2, 2)))])
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_destroyed_group_is_not_kept() -> None:
    for rank, said in enumerate(gloo(2).run(destroyed)):
        assert said == f"rank {rank}: collective 'errand' failed: the process group of this context was destroyed"
