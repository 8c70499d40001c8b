"""Simulated ranks keep step: what would hang or corrupt real ranks is an error with a name."""

from collections.abc import Sequence

import pytest
import torch

from deltaspan.exchange import AllGather, AllToAll, PeerToPeer, Program, SimulatedGroup
from deltaspan.exchange.collectives import Collective

X = torch.arange(8.0).view(4, 2)


def asking(*collectives: Collective, returns: object = None) -> Program:
    for collective in collectives:  # noqa: UP028, what arrives cannot be sent into a tuple
        yield collective
    return returns


def to_all(
    name: str = "a", send: torch.Tensor = X, sent: Sequence[int] = (2, 2), got: Sequence[int] = (2, 2)
) -> AllToAll:
    return AllToAll(name, send, tuple(sent), tuple(got))


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ([to_all("a")], [to_all("b")], "rank 1 asks for .*'b'.* rank 0 for .*'a'"),
        ([to_all("a")], [AllGather("a", X, (4, 4))], "rank 1 asks for .*AllGather.* rank 0 for .*AllToAll"),
        ([to_all()], [to_all(send=X.double())], "rank 1 asks for .*float64.* rank 0 for .*float32"),
        ([to_all()], [to_all(send=X[:, :1])], r"rank 1 asks for .*\[1\].* rank 0 for .*\[2\]"),
        ([to_all()], [to_all(got=(1, 2))], "a: rank 0 sends 2 rows to rank 1, which expects 1"),
        ([to_all(got=(2, 3))], [to_all()], "a: rank 1 sends 2 rows to rank 0, which expects 3"),
        ([to_all()], [PeerToPeer("a", X, (2, 2), (2, 2))], "rank 1 asks for PeerToPeer.* rank 0 for AllToAll"),
        ([AllGather("c", X, (4, 4), "3 heads")], [AllGather("c", X, (4, 4), "4 heads")], "rank 1 asks for .*, 4 heads"),
        ([to_all()], [], "a: 1 of 2 ranks take no part"),
        ([to_all(), to_all("b")], [to_all()], "b: 1 of 2 ranks take no part"),
        ([], [AllGather("c", X, (4, 4))], "c: 1 of 2 ranks take no part"),
        ([AllGather("c", X, (4, 4))], [AllGather("c", X, (4, 5))], r"c: rank 1 sends 4 rows and expects \(4, 5\)"),
        ([AllGather("c", X, (4, 3))], [AllGather("c", X, (4, 3))], r"c: rank 1 sends 4 rows and expects \(4, 3\)"),
    ],
)
def test_ranks_out_of_step(first: list, second: list, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        SimulatedGroup(2).run([asking(*first), asking(*second)])


def test_results_come_rank_by_rank() -> None:
    assert SimulatedGroup(3).run([asking(returns=r) for r in "abc"]) == ["a", "b", "c"]
    assert SimulatedGroup(2).run([asking(to_all(), to_all("b"), returns=r) for r in (0, 1)]) == [0, 1]


def test_a_program_for_every_rank() -> None:
    with pytest.raises(ValueError):
        SimulatedGroup(3).run([asking(), asking()])
