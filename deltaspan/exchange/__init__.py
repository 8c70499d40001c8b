"""What ranks tell each other.

A rank's work is a program: a generator that yields each collective it takes part in and is resumed with what arrived.
The same program runs on a real process group, one rank a process, and on a simulated group, all ranks in lockstep.
"""

from deltaspan.exchange.collectives import AllGather, AllToAll, Beside, PeerToPeer, Program, one_by_one
from deltaspan.exchange.compose import Affine
from deltaspan.exchange.halo import HaloRoute, fetch_rows
from deltaspan.exchange.joints import Folded, fold, spread
from deltaspan.exchange.process_group import ProcessGroup
from deltaspan.exchange.rehearsal import Rehearsal
from deltaspan.exchange.reshard import gather_tokens, scatter_gradient
from deltaspan.exchange.seams import Hop, Seams
from deltaspan.exchange.simulated import SimulatedGroup
from deltaspan.exchange.states import EXCHANGES, carry_adjoints, carry_states
from deltaspan.exchange.transport import Transport, transport

__all__ = [
    "EXCHANGES",
    "Affine",
    "AllGather",
    "AllToAll",
    "Beside",
    "Folded",
    "HaloRoute",
    "Hop",
    "PeerToPeer",
    "ProcessGroup",
    "Program",
    "Rehearsal",
    "Seams",
    "SimulatedGroup",
    "Transport",
    "carry_adjoints",
    "carry_states",
    "fetch_rows",
    "fold",
    "gather_tokens",
    "one_by_one",
    "scatter_gradient",
    "spread",
    "transport",
]
