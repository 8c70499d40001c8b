"""A rank without the others is told as much as it would be, and holds what it would hold."""

from weakref import ref

import pytest
import torch
from torch import Tensor

from deltaspan.exchange import AllGather, AllToAll, Beside, PeerToPeer, Program, Rehearsal, SimulatedGroup

COUNTS = [[2, 0, 1], [3, 1, 0], [0, 2, 2]]  # rows from each rank to each


def program(rank: int, device: str) -> Program[list[Tensor]]:
    sent, received = tuple(COUNTS[rank]), tuple(row[rank] for row in COUNTS)
    x = torch.zeros(5, sum(sent), device=device, dtype=torch.bfloat16).mT
    there = yield AllToAll("there", x, sent, received)
    back = yield PeerToPeer("back", there, received, sent)
    return [there, back, (yield AllGather("everyone", back, tuple(map(sum, COUNTS))))]


@pytest.mark.parametrize("beside", [False, True], ids=["gloo", "NCCL"])
def test_what_arrives_has_its_shape_and_memory(beside: bool) -> None:
    whole = SimulatedGroup(3).run([program(rank, "cpu") for rank in range(3)])
    for rank, expected in enumerate(whole):
        (found,) = Rehearsal(rank, 3, beside=beside).run([program(rank, "meta")])
        for x, there in zip(found, expected, strict=True):
            assert (x.shape, x.dtype, x.device.type) == (there.shape, there.dtype, "meta")
            assert x.untyped_storage().nbytes() == there.nbytes


@pytest.mark.parametrize("worth", [False, True])
def test_what_runs_beside_holds_its_operands_until_it_is_waited_for(worth: bool) -> None:
    """As over NCCL, if it has a stream of its own."""

    def carry(x: Tensor) -> Program[Tensor]:
        return (yield AllGather("rows", x, (2, 2)))

    def asking() -> Program[list[bool]]:
        x = torch.empty(2, 3, device="meta")
        lives, asked = ref(x), Beside(carry, (x,), worth)
        del x
        crossing = yield asked
        del asked
        while_it_runs = lives() is not None
        assert (yield crossing).shape == (4, 3)
        del crossing
        return [while_it_runs, lives() is not None]

    assert Rehearsal(1, 2, beside=True).run([asking()]) == [[worth, False]]
