"""What the wire is said to take, against the bytes that collectives are handed; and who walks while states cross."""

import numpy as np
import pytest
import torch

import deltaspan as ds
from deltaspan.layout import LAYOUTS
from deltaspan.plan import Wire, chain_links, collective_bytes, plan_segments, segment_table, walked_ahead, wire_time
from deltaspan.plan.wire import _bytes_between

HEADS = {"HV": 6, "K": 16, "V": 12}
STATE, PAIR = 4 * 16 * 12, 4 * 16 * (12 + 16)


def drawn(rng: torch.Generator, world_size: int, layout: str) -> ds.Partition:
    lengths = torch.randint(0, 900, (6,), generator=rng).tolist()
    return ds.partition([0, *np.cumsum([*lengths, 5000])], world_size, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_are_those_of_the_collectives_but_for_what_stays(rng: torch.Generator, layout: str) -> None:
    """Heads divide by ranks, so that of what an owner is handed its own part is that of its own fragments."""
    part = drawn(rng, 3, layout)
    table = part.table
    n_out = [int(part.crossing_out[part.rows(rank)].sum()) for rank in range(3)]
    n_in = [int(part.crossing_in[part.rows(rank)].sum()) for rank in range(3)]
    for exchange, names in (
        ("all_to_all", ("summaries", "entry_states", "adjoint_offsets", "exit_adjoints")),
        ("all_gather", ("summaries", "adjoint_offsets")),
    ):
        handed = [
            collective_bytes(part, r, **HEADS, state_size=4, channels=0, width=4, row_size=2, exchange=exchange)
            for r in range(3)
        ]
        found = [n for way in _bytes_between(part, 6, PAIR - STATE, STATE, exchange) for n in way]
        for name, between in zip(names, found, strict=True):
            counts, size = (n_in, STATE) if name in ("entry_states", "adjoint_offsets") else (n_out, PAIR)
            size = STATE if name == "exit_adjoints" else size
            if exchange == "all_gather":
                assert between == 2 * 6 * size * max(counts)  # every rank is sent as much as the longest has
                continue
            own = [2 * size * count for count in counts]
            away = [[sent - own[r], got - own[r]] for r, (sent, got) in enumerate(h[name] for h in handed)]
            assert between == max(map(max, away))
    forward, backward = _bytes_between(part, 6, PAIR - STATE, STATE, "ring")
    assert len(forward) == len(backward) == len(chain_links(part).forward.steps)
    crossing = np.flatnonzero(table.next >= 0)
    away = int((table.rank[crossing] != table.rank[table.next[crossing]]).sum())
    assert max(forward) <= 6 * STATE * away <= 3 * sum(forward)  # a hop's busiest rank has a third of it at least


def test_time_is_latency_and_bytes_at_a_rate() -> None:
    part = ds.partition([0, 4096], 2)
    wire = Wire(latency_us=10.0, gb_per_s=100.0, gathered_gb_per_s=50.0)
    given = {"HV": 2, "K": 100, "V": 100, "wire": wire}
    # one of two heads crosses: 80 KB of map and offset there and 40 KB back; the adjoint 40 KB each way
    there = wire_time(part, exchange="all_to_all", **given)
    assert there.forward == pytest.approx(0.02 + 0.0008 + 0.0004) and there.backward == pytest.approx(0.02 + 0.0008)
    assert wire_time(part, exchange="ring", **given) == pytest.approx((0.0108, 0.0108))
    assert wire_time(part, exchange="all_gather", **given) == pytest.approx((0.0132, 0.0116))
    assert wire_time(ds.partition([0, 64, 128], 2), exchange="ring", **given) == (0, 0)  # nothing crosses
    assert wire_time(ds.partition([0, 4096], 1, layout="zigzag"), exchange="ring", **given) == (0, 0)


def ahead_of(part: ds.Partition, segments: list[int], hv: int = 48) -> list[tuple[np.ndarray, np.ndarray]]:
    """By rank, what is walked ahead, and what might be."""
    found = []
    for rank, cut in enumerate(segments):
        table = segment_table(part, rank, cut)
        free = ~part.crossing_in[part.rows(rank)][table.fragment]
        found.append((walked_ahead(part, rank, table, hv=hv, sm_count=132), free))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_that_a_state_enters_is_walked_ahead(rng: torch.Generator, layout: str) -> None:
    for world_size in (1, 2, 5):
        part = drawn(rng, world_size, layout)
        for ahead, free in ahead_of(part, plan_segments(part, hv=48, sm_count=132)):
            assert not (ahead & ~free).any()
            assert world_size > 1 or not ahead.any()


def test_walks_are_divided_where_that_ends_sooner() -> None:
    quiet, none, some, few, full, every = (
        ahead_of(ds.partition([0, *np.cumsum(lengths)], 2), [segments, segments], hv)[rank][0]
        for lengths, segments, hv, rank in (
            ([64_000, 64_000], 1, 48, 0),  # nothing crosses
            ([128_000], 1, 48, 1),  # everything goes on from the other rank
            ([13_000, 7_000, 17_000], 5, 4, 1),  # some does, and all do not fit side by side
            ([40_000, 2_000], 1, 48, 1),  # some does, and there is room for both side by side
            ([100_000, 90_000], 8, 48, 1),  # some does, and the others would hold the whole device
            ([128_000], 4, 48, 0),  # all begins here, and is sent first
        )
    )
    assert not any(found.any() for found in (quiet, none, few, full, every))
    assert some.tolist() == [False] * 5 + [True] * 5
