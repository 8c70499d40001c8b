"""States between the segments of a rank's own fragments: folded before the exchange, spread after it.

Both directions do the same: forward with maps M and states, backward with maps M^T and adjoints, from the other end.
In both a segment, or a fragment, has a map only if state both enters and leaves it.
A fragment's segments are one affine map to the exchange, so that it never knows how a rank cuts its fragments.
"""

from typing import NamedTuple

from torch import Tensor

from deltaspan.exchange.compose import Affine
from deltaspan.plan import Passage


class Folded(NamedTuple):
    """What stands behind the joints for a state that arrives at the fragment, and what fragments hand on."""

    maps: Tensor | None  # [places, HV, K, K], of those that the exchange's states have to be told among them
    offsets: Tensor | None  # [segments reached, HV, K, V], with nothing arriving
    last_maps: Tensor  # [h, HV, K, K], of whole fragments that hand on what is brought to them
    last_offsets: Tensor | None  # [m, HV, K, V], of whole fragments that hand on


def fold(affine: Affine, way: Passage[Tensor], maps: Tensor, offsets: Tensor | None) -> Folded:
    """Composes the segments' maps [rows, HV, K, K], and offsets [rows, HV, K, V] if given, along every fragment; what
    is composed may take the offsets' place."""
    if not way.chains.steps:  # nothing is cut, a fragment is its segment
        return Folded(None, None, maps, offsets)
    passed, states, last, reached = None, offsets, None, way.reached
    if way.composes:
        apart = None if way.chains.places == reached else reached
        passed, states, last = affine.chain(
            maps, offsets, way.chains, maps=way.chains.maps, in_place=way.in_place, apart=apart
        )
    whole = maps.new_empty(0, *maps.shape[1:])
    if passed is not None:
        all_of_them = way.handed.shape[0] == passed.shape[0] - reached
        whole = passed[reached:] if all_of_them else passed[way.handed]
    if last is None and states is not None:
        last = states.new_empty(0, *states.shape[1:])
    return Folded(passed, states, whole, last)


def spread(affine: Affine, way: Passage[Tensor], folded: Folded, arrived: Tensor) -> Tensor:
    """From the states that the exchange brought, [n, HV, K, V], to those of all segments that are reached."""
    if not way.chains.steps:
        return arrived
    if way.arriving.shape[0]:
        affine.tell(folded.maps, arrived, folded.offsets, way)
    return folded.offsets
