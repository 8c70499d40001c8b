"""Bytes that a rank hands to each collective and keeps between its two directions."""

import numpy as np

from deltaspan.layout import Partition, halo_plan


def head_ranges(hv: int, world_size: int) -> list[range]:
    """The value heads whose states each rank composes: ceil(HV / W) a rank, in order; late ranks may own none."""
    each = -(-hv // world_size)
    return [range(min(hv, rank * each), min(hv, (rank + 1) * each)) for rank in range(world_size)]


def crossings(part: Partition) -> tuple[np.ndarray, np.ndarray]:
    """Fragments that state leaves and that it enters, counted by rank: two int64 arrays [W]."""
    return tuple(
        np.add.reduceat(np.append(column, 0), part.rank_rows[:-1]) * (np.diff(part.rank_rows) > 0)
        for column in (part.crossing_out.astype(np.int64), part.crossing_in.astype(np.int64))
    )


def collective_bytes(
    part: Partition, rank: int, *, HV: int, K: int, V: int, state_size: int, channels: int, width: int, row_size: int
) -> dict[str, tuple[int, int]]:
    """(sent, received) bytes of one rank by collective, for one layer's forward and backward; a rank's own share
    counts.

    `summaries` and `entry_states` belong to the forward, `adjoint_offsets` and `exit_adjoints` to the backward,
    `halo` and `halo_gradient` to the convolution over `channels` channels. `state_size` and `row_size` are the bytes of
    one element of a state and of a convolution row; gradients of rows travel in the state's type.
    """
    n_out, n_in = crossings(part)
    own = len(head_ranges(HV, part.world_size)[rank])
    state, pair = K * V * state_size, (K * V + K * K) * state_size
    mine_out, mine_in, all_out, all_in = (int(x) for x in (n_out[rank], n_in[rank], n_out.sum(), n_in.sum()))
    halo = halo_plan(part, width, rank)
    return {
        "summaries": (pair * HV * mine_out, pair * own * all_out),
        "entry_states": (state * own * all_in, state * HV * mine_in),
        "adjoint_offsets": (state * HV * mine_in, state * own * all_in),
        "exit_adjoints": (state * own * all_out, state * HV * mine_out),
        "halo": tuple(int(c.sum()) * channels * row_size for c in (halo.send_counts, halo.recv_counts)),
        "halo_gradient": tuple(
            int(c.sum()) * channels * state_size for c in (halo.head_send_counts, halo.tail_recv_counts)
        ),
    }


def retained_bytes(part: Partition, rank: int, *, HV: int, K: int, V: int, state_size: int) -> int:
    """Bytes that one rank keeps from forward to backward beyond the operands: entry states and received summaries."""
    n_out, n_in = crossings(part)
    own = len(head_ranges(HV, part.world_size)[rank])
    return state_size * int(n_in[rank] * HV * K * V + n_out.sum() * own * (K * V + K * K))
