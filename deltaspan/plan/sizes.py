"""Bytes that a rank hands to each collective and keeps between its two directions."""

from deltaspan.layout import Partition, halo_plan
from deltaspan.plan.cuts import Cut
from deltaspan.plan.segments import segment_table
from deltaspan.plan.tables import crossings


def head_ranges(hv: int, world_size: int) -> list[range]:
    """The value heads whose states each rank composes: ceil(HV / W) a rank, in order; late ranks may own none."""
    each = -(-hv // world_size)
    return [range(min(hv, rank * each), min(hv, (rank + 1) * each)) for rank in range(world_size)]


def collective_bytes(
    part: Partition,
    rank: int,
    *,
    HV: int,
    K: int,
    V: int,
    state_size: int,
    channels: int,
    width: int,
    row_size: int,
    exchange: str,
    resend: bool = False,
    replay: bool = False,
) -> dict[str, tuple[int, int]]:
    """(sent, received) bytes of one rank by collective, for one layer's forward and backward; its own share counts.

    `summaries` and `entry_states` belong to the forward, `adjoint_offsets` and `exit_adjoints` to the backward, `halo`
    and `halo_gradient` to the convolution over `channels` channels. `state_size` and `row_size` are the bytes of one
    element of a state and of a convolution row; gradients of rows travel in the state's type. What is gathered is sent
    once. A ring's hops are counted together.

    resend: the backward sends the maps again that were not kept. replay: it runs the forward's exchange again.
    """
    n_out, n_in, n_through = crossings(part)
    own = len(head_ranges(HV, part.world_size)[rank])
    state, pair = K * V * state_size, (K * V + K * K) * state_size
    mine_out, mine_in, all_out, all_in = (int(x) for x in (n_out[rank], n_in[rank], n_out.sum(), n_in.sum()))
    maps = (K * K * state_size * int(n) if resend else 0 for n in (n_through[rank], n_through.sum()))
    mine_maps, all_maps = maps
    twice = 2 if replay else 1
    states = {
        "all_to_all": {
            "summaries": (twice * pair * HV * mine_out, twice * pair * own * all_out),
            "entry_states": (twice * state * own * all_in, twice * state * HV * mine_in),
            "adjoint_offsets": (HV * (state * mine_in + mine_maps), own * (state * all_in + all_maps)),
            "exit_adjoints": (state * own * all_out, state * HV * mine_out),
        },
        "ring": {
            "entry_states": (twice * state * HV * mine_out, twice * state * HV * mine_in),
            "exit_adjoints": (state * HV * mine_in, state * HV * mine_out),
        },
        "all_gather": {
            "summaries": (twice * pair * HV * mine_out, twice * pair * HV * all_out),
            "adjoint_offsets": (HV * (state * mine_in + mine_maps), HV * (state * all_in + all_maps)),
        },
    }[exchange]
    halo = halo_plan(part, width, rank)
    forward, backward = (halo.send_counts, halo.recv_counts), (halo.head_send_counts, halo.tail_recv_counts)
    return {
        **states,
        "halo": tuple(int(counts.sum()) * channels * row_size for counts in forward),
        "halo_gradient": tuple(int(counts.sum()) * channels * state_size for counts in backward),
    }


def retained_bytes(
    part: Partition,
    rank: int,
    *,
    HV: int,
    K: int,
    V: int,
    state_size: int,
    exchange: str,
    segments: Cut,
    transfers: bool = True,
) -> int:
    """Bytes of states and maps that one rank keeps from forward to backward: states at the start of segments that state
    enters, and with `transfers` the maps of segments that pass it on and what the exchange's way back needs."""
    table = segment_table(part, rank, segments)
    numbers = HV * K * V * len(table.entered)
    if transfers:
        n_out, _, n_through = crossings(part)
        own = len(head_ranges(HV, part.world_size)[rank])
        numbers += (
            HV * K * K * len(table.bridges)
            + {
                "all_to_all": n_out.sum() * own * (K * V + K * K),
                "ring": n_through[rank] * HV * K * K,
                "all_gather": n_out.sum() * HV * (K * V + K * K),
            }[exchange]
        )
    return state_size * int(numbers)
