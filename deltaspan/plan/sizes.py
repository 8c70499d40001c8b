"""Bytes that a rank hands to each collective and keeps between its two directions."""

from deltaspan.layout import Partition, halo_plan
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
) -> dict[str, tuple[int, int]]:
    """(sent, received) bytes of one rank by collective, for one layer's forward and backward; its own share counts.

    `summaries` and `entry_states` belong to the forward, `adjoint_offsets` and `exit_adjoints` to the backward, `halo`
    and `halo_gradient` to the convolution over `channels` channels. `state_size` and `row_size` are the bytes of one
    element of a state and of a convolution row; gradients of rows travel in the state's type. What is gathered is sent
    once. A ring's hops are counted together.
    """
    n_out, n_in = crossings(part)
    own = len(head_ranges(HV, part.world_size)[rank])
    state, pair = K * V * state_size, (K * V + K * K) * state_size
    mine_out, mine_in, all_out, all_in = (int(x) for x in (n_out[rank], n_in[rank], n_out.sum(), n_in.sum()))
    states = {
        "all_to_all": {
            "summaries": (pair * HV * mine_out, pair * own * all_out),
            "entry_states": (state * own * all_in, state * HV * mine_in),
            "adjoint_offsets": (state * HV * mine_in, state * own * all_in),
            "exit_adjoints": (state * own * all_out, state * HV * mine_out),
        },
        "ring": {
            "entry_states": (state * HV * mine_out, state * HV * mine_in),
            "exit_adjoints": (state * HV * mine_in, state * HV * mine_out),
        },
        "all_gather": {
            "summaries": (pair * HV * mine_out, pair * HV * all_out),
            "adjoint_offsets": (state * HV * mine_in, state * HV * all_in),
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
    part: Partition, rank: int, *, HV: int, K: int, V: int, state_size: int, exchange: str, segments: int
) -> int:
    """Bytes that one rank keeps from forward to backward beyond the operands: states at the start of segments that
    state enters, maps of those that pass it on, and what the exchange's way back needs."""
    n_out, n_in = crossings(part)
    own = len(head_ranges(HV, part.world_size)[rank])
    maps = {
        "all_to_all": n_out.sum() * own * (K * V + K * K),
        "ring": n_out[rank] * HV * K * K,
        "all_gather": n_out.sum() * HV * (K * V + K * K),
    }[exchange]
    table = segment_table(part, rank, segments)
    return state_size * int(HV * K * (len(table.entered) * V + len(table.bridges) * K) + maps)
