"""States between the segments of a rank's own fragments: folded before the exchange, spread after it.

Both directions do the same: forward with maps M and states, backward with maps M^T and adjoints, from the other end.
A fragment's segments are one affine map to the exchange, so that it never knows how a rank cuts its fragments.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from deltaspan.exchange.compose import Merge
from deltaspan.plan import Passage


class Folded(NamedTuple):
    """What stands at the joints for a state that arrives at the fragment, and what fragments hand on."""

    maps: Tensor  # [J, HV, K, K]
    offsets: Tensor  # [J, HV, K, V], with nothing arriving
    last_maps: Tensor  # [m, HV, K, K], of whole fragments
    last_offsets: Tensor  # [m, HV, K, V]


def fold(merge: Merge, way: Passage[Tensor], maps: Tensor, offsets: Tensor) -> Folded:
    """Composes the segments' maps [rows, HV, K, K] and offsets [rows, HV, K, V] along every fragment."""
    if not way.steps:  # nothing is cut, a fragment is its segment
        return Folded(maps[:0], offsets[:0], maps, offsets)
    K = maps.shape[-1]
    alone = pad(offsets, (K, 0))  # next to a map of nothing: [0 | offset]
    passed = alone.new_empty(len(way.beyond), *alone.shape[1:])
    state = None
    for row, offset, joint in way.steps:
        if state is None:
            state = torch.cat([maps[row], offsets[offset]], -1)
        else:
            state = merge(maps[row], state[: len(joint)], alone[offset])
        passed[joint] = state
    last = torch.cat([maps[way.last_map], offsets[way.last_offset]], -1)
    cut = way.last_map[way.cut], passed[way.last_joint], alone[way.last_offset[way.cut]]
    last[way.cut] = merge(maps[cut[0]], *cut[1:])
    return Folded(passed[..., :K], passed[..., K:], last[..., :K].contiguous(), last[..., K:])


def adjoint_maps(maps: Tensor) -> Tensor:
    """The maps M [B, HV, K, K] of bridges, transposed, and a row of zeros for segments beyond which nothing arrives."""
    return pad(maps.mT, (0, 0, 0, 0, 0, 0, 0, 1))


def spread(merge: Merge, way: Passage[Tensor], folded: Folded, arrived: Tensor) -> Tensor:
    """From the states that the exchange brought, [n, HV, K, V], to those of all segments that are reached."""
    if not way.steps:
        return arrived
    reached = arrived.new_empty(len(way.arriving) + len(way.beyond), *arrived.shape[1:])
    reached[way.arriving] = arrived
    reached[way.beyond] = folded.offsets
    beyond = merge(folded.maps[way.through], arrived[way.source], folded.offsets[way.through])
    reached[way.beyond[way.through]] = beyond
    return reached
