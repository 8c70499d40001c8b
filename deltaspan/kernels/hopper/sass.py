"""Machine code of sm_90, as `cuobjdump -sass` shows it: its instructions, and loads that an arrival overtakes.

An arrival on an mbarrier tells others, the copy engine among them, that a place in shared memory may be written again.
A load from there has been issued by then; but only the first use of what it loads waits for it, no barrier and no
arrival does. Nor does the copy engine, which may write first. So what is loaded has to be used before, or a fence
(`fence_async_shared`) stands behind the load; and not only before the arrival, which one warp issues, but before the
barrier ahead of it, which all warps of a partition reach.

Who waits is written in the instructions: each names a scoreboard that it releases when its result is there, 7 for none
(loads from shared memory and shuffles come back in order, so one may release it for loads before it), another for when
its operands have been read, which for a MEMBAR, half of every fence, is when all before it has been carried out, and a
mask of scoreboards that it waits for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_]+)(.*?);?\s+/\* 0x[0-9a-f]{16} \*/\n"
    r"\s+/\* 0x([0-9a-f]{16}) \*/",
    re.MULTILINE,
)
NO_SCOREBOARD = 7
IN_ORDER = ("LDS", "LDSM", "SHFL")
BY_TABLE = ("BRX", "JMX", "CALL", "RET")  # jumps whose targets stand elsewhere


class Instruction(NamedTuple):
    address: int
    opcode: str
    rest: str  # modifiers, then operands
    conditional: bool
    result: int  # a scoreboard
    operands: int  # a scoreboard
    awaits: int  # a mask of them


def instructions(sass: str) -> list[Instruction]:
    found = []
    for address, predicate, opcode, rest, high in INSTRUCTION.findall(sass):
        control = int(high, 16) >> 46
        scoreboards = control & 7, control >> 3 & 7, control >> 6 & 63
        found.append(Instruction(int(address, 16), opcode, rest, bool(predicate), *scoreboards))
    return found


class InFlight(NamedTuple):
    """Loads from shared memory that may be on their way: a warp's own, each with its scoreboard, and those that other
    warps of its partition had not waited for at the last barrier."""

    own: frozenset[tuple[int, int]] = frozenset()
    of_others: frozenset[int] = frozenset()


def overtaken_loads(code: Sequence[Instruction]) -> dict[int, list[int]]:
    """By address of an arrival those of loads that may be on their way then, along any path that leads there."""
    following = _successors(code)
    known: dict[int, InFlight] = {}
    found: dict[int, list[int]] = {}
    # every place begins with none under way: a jump by a table is held to the rule of arrivals
    paths = [(place, InFlight()) for place in range(len(code))]
    while paths:
        place, before = paths.pop()
        if (held := known.get(place)) is not None:
            before = InFlight(before.own | held.own, before.of_others | held.of_others)
            if before == held:
                continue
        known[place] = before
        at, (own, of_others) = code[place], before
        own = frozenset((load, board) for load, board in own if not at.awaits >> board & 1)
        if at.opcode in IN_ORDER:
            own |= {(at.address, NO_SCOREBOARD)} if at.opcode != "SHFL" else set()  # which reads no memory
            if at.result != NO_SCOREBOARD and not at.conditional:
                own = frozenset((load, at.result if board == NO_SCOREBOARD else board) for load, board in own)
        elif at.opcode == "MEMBAR" and not at.conditional:
            own = frozenset((load, at.operands) for load, _ in own)
        elif at.opcode == "BAR" and at.rest.startswith(".SYNC"):
            of_others = frozenset(load for load, _ in own)
        elif _frees(at) and (loads := of_others.union(load for load, _ in own)):
            found[at.address] = sorted(loads)
        paths += [(next_one, InFlight(own, of_others)) for next_one in following[place]]
    return dict(sorted(found.items()))


def _frees(at: Instruction) -> bool:
    """An arrival that announces bytes (TRANS64 and no more) comes from the copy engine's own warp."""
    return at.opcode in BY_TABLE or (
        at.opcode == "SYNCS" and at.rest.startswith(".ARRIVE") and not at.rest.startswith(".ARRIVE.TRANS64 ")
    )


def _successors(code: Sequence[Instruction]) -> list[list[int]]:
    """By place those where the next instruction may stand, but for jumps by a table."""
    places = {at.address: place for place, at in enumerate(code)}
    assert len(places) == len(code), "one function is followed"
    joined: Mapping[str, list[int]] = defaultdict(list)  # where warps whose lanes went apart meet
    for at in code:
        if at.opcode == "BSSY":
            register, target = at.rest.replace(",", "").split()
            joined[register].append(places[int(target, 16)])
    following: list[list[int]] = []
    for place, at in enumerate(code):
        assert at.opcode not in ("JMP", "BREAK"), f"{at.opcode} is not followed"
        found, goes_on = [], at.conditional or at.opcode not in ("BRA", "BSYNC", "EXIT", *BY_TABLE)
        if at.opcode == "BRA":
            *conditions, target = at.rest.split()
            found, goes_on = [places[int(target, 16)]], goes_on or bool(conditions)
        elif at.opcode == "BSYNC":
            found = list(joined[at.rest.strip()])
        following.append([*found, place + 1] if goes_on and place + 1 < len(code) else found)
    return following
