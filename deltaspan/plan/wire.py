"""How long exchanges take between ranks, by a model: a collective takes a latency, and its bytes at a rate.

It knows no network's shape: every rank sends and receives at its own rate, and the one with most bytes counts.
"""

from typing import NamedTuple

import numpy as np

from deltaspan.layout import Partition
from deltaspan.plan.sizes import head_ranges
from deltaspan.plan.tables import chain_links, crossings


class Wire(NamedTuple):
    latency_us: float  # of a collective, however little it carries
    gb_per_s: float  # of a rank, in each direction
    gathered_gb_per_s: float  # where all ranks have all rows, and copy them side by side


# Two H200s of one host, as `deltaspan.bench.group` measured them: all-to-all 238 GB/s, point to point 244.
NVLINK = Wire(latency_us=13.3, gb_per_s=240.0, gathered_gb_per_s=130.0)


class WireTime(NamedTuple):
    """Milliseconds of an exchange of states."""

    forward: float
    backward: float


def wire_time(
    part: Partition, *, HV: int, K: int, V: int, exchange: str, state_size: int = 4, wire: Wire = NVLINK
) -> WireTime:
    """Of one layer's two exchanges. What a rank sends itself takes no time."""
    ways = _bytes_between(part, HV, K * K * state_size, K * V * state_size, exchange)
    rate = wire.gathered_gb_per_s if exchange == "all_gather" else wire.gb_per_s
    return WireTime(*(sum(wire.latency_us / 1e3 + n / rate / 1e6 for n in of_way) for of_way in ways))


def _bytes_between(
    part: Partition, HV: int, size_of_map: int, state: int, exchange: str
) -> tuple[list[int], list[int]]:
    """Forward and backward, by collective: the most bytes that one rank sends to others, or has from them."""
    n_out, n_in, _ = crossings(part)
    if part.world_size == 1 or not n_out.any():
        return [], []
    pair = size_of_map + state
    if exchange == "ring":
        links = chain_links(part)
        forward = [state * HV * _busiest(part, out, entered) for _, out, entered in links.forward.steps]
        return forward, [state * HV * _busiest(part, out, entered) for _, entered, out in links.backward.steps]
    if exchange == "all_gather":  # padded to the longest
        others = (part.world_size - 1) * HV
        return [int(pair * others * n_out.max())], [int(state * others * n_in.max())]
    own = np.array([len(heads) for heads in head_ranges(HV, part.world_size)])

    def to_owners(size: int, rows: np.ndarray) -> int:
        return int(size * max((rows * (HV - own)).max(), ((rows.sum() - rows) * own).max()))

    # back home the same rows go the other way: what was received is sent
    return [to_owners(pair, n_out), to_owners(state, n_in)], [to_owners(state, n_in), to_owners(state, n_out)]


def _busiest(part: Partition, left: np.ndarray, entered: np.ndarray) -> int:
    """Rows of the rank with most in one hop of a ring, of fragments by their out numbers and in numbers. A way back has
    the same between the same ranks."""
    of_out, of_in = (np.repeat(np.arange(part.world_size), n) for n in crossings(part)[:2])
    pairs = np.stack([of_out[left], of_in[entered]])
    return max(int(np.bincount(ranks, minlength=1).max()) for ranks in pairs[:, pairs[0] != pairs[1]])
