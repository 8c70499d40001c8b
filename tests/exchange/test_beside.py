"""What is asked for beside other work: when it is carried out, with which results, on every kind of group."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deltaspan.exchange import AllGather, AllToAll, Beside, ProcessGroup, Program, SimulatedGroup, one_by_one
from tests.helpers import gloo, same_bits


def exchange(x: Tensor, world_size: int, log: list[str]) -> Program[Tensor]:
    once = yield AllGather("first", x, (len(x),) * world_size)
    log.append("first came")
    twice = yield AllToAll("second", once, (len(x),) * world_size, (len(x),) * world_size)
    return twice + once


def program(rank: int, world_size: int, log: list[str], worth: bool = True) -> Program[tuple[Tensor, Tensor]]:
    x = torch.arange(3.0) + 10 * rank
    crossing = yield Beside(exchange, (x, world_size, log), worth)
    log.append("meanwhile")
    mine = x * 2
    return mine, (yield crossing)


def expected(world_size: int) -> list[tuple[Tensor, Tensor]]:
    everyone = torch.cat([torch.arange(3.0) + 10 * rank for rank in range(world_size)])
    blocks = everyone.split(3)
    return [(2 * blocks[rank], everyone + torch.cat([blocks[rank]] * world_size)) for rank in range(world_size)]


def right(found: list[tuple[Tensor, Tensor]], world_size: int) -> bool:
    pairs = zip(found, expected(world_size), strict=True)
    return all(same_bits(a, b) for rows in pairs for a, b in zip(*rows, strict=True))


def test_simulated_ranks_do_it_at_once_and_stay_in_step() -> None:
    log: list[str] = []
    # also where only one of them has something to do meanwhile
    assert right(SimulatedGroup(2).run([program(0, 2, log), program(1, 2, log, worth=False)]), 2)
    assert log == ["first came"] * 2 + ["meanwhile"] * 2


def test_one_by_one_leaves_collectives_alone() -> None:
    log: list[str] = []
    asked, steps = [], one_by_one(program(0, 1, log))
    arrived: Any = None
    with pytest.raises(StopIteration) as end:
        while True:
            asked.append(steps.send(arrived))
            arrived = asked[-1].send
    assert [a.name for a in asked] == ["first", "second"] and right([end.value.value], 1)


def on_gloo() -> tuple[Tensor, Tensor]:
    group = ProcessGroup(dist.group.WORLD)
    assert not group.beside
    return group.run([program(dist.get_rank(), 2, [])])[0]


def test_real_ranks_over_gloo() -> None:
    assert right(gloo(2).run(on_gloo), 2)


def streams(worth: bool, meanwhile: str = "meanwhile") -> list[str]:
    """What a group with a stream of its own asks of streams, with tensors on the CPU in the place of a GPU's."""
    group, calls = ProcessGroup(dist.new_group([dist.get_rank()], use_local_synchronization=True)), []
    group.beside = True
    stream, current = mock.Mock(), mock.Mock()
    stream.wait_stream = lambda other: calls.append("beside waits" if other is current else "wrong")
    stream.record_event = lambda: calls.append("mark") or mock.Mock(device="cuda")
    current.wait_event = lambda event: calls.append("waits for the mark")
    entered = mock.MagicMock()
    entered.__enter__ = lambda *_: calls.append("beside")
    entered.__exit__ = lambda *_: calls.append("back")

    class Told(list):
        def append(self, said: str) -> None:
            calls.append(said)

    class OnGpu(Tensor):
        device = torch.device("cuda", 0)

    module = "deltaspan.exchange.process_group"
    with (
        mock.patch(f"{module}._stream_beside", lambda device, reader: stream),
        mock.patch(f"{module}.torch.cuda.current_stream", lambda device: current),
        mock.patch(f"{module}.torch.cuda.stream", lambda s: entered if s is stream else None),
        mock.patch(f"{module}.Tensor", OnGpu),
    ):
        x = torch.arange(3.0)

        def asking() -> Program[Tensor]:
            crossing = yield Beside(exchange_of, (x.as_subclass(OnGpu),), worth)
            if crossing.end is not None:
                assert crossing.operands[0] is not None
            calls.append(meanwhile)
            if meanwhile == "raises":
                raise MemoryError
            return (yield crossing)

        def exchange_of(_: Tensor) -> Program[Tensor]:
            return (yield from exchange(x, 1, Told()))

        if meanwhile == "raises":
            with pytest.raises(MemoryError):
                group.run([asking()])
        else:
            assert same_bits(group.run([asking()])[0], x + x)
    return calls


def test_a_stream_of_its_own_is_forked_and_joined() -> None:
    order = ["beside waits", "beside", "first came", "back", "mark", "meanwhile", "waits for the mark"]
    assert gloo(2).run(streams, True) == [order] * 2
    assert gloo(2).run(streams, False) == [["first came", "meanwhile"]] * 2
    order[-2] = "raises"  # what is on its way is waited for, for its memory is let go of
    assert gloo(2).run(streams, True, "raises") == [order] * 2
