"""What is read in machine code: loads from shared memory that an arrival overtakes, by the scoreboards of both."""

import pytest

from deltaspan.kernels.hopper.sass import instructions, overtaken_loads

ARRIVE = "@!P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x38b48], RZ"
BARRIER = "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80"
LOAD = "LDS.128 R36, [R10+0x18000]"
STORE = "STS.128 [R4], R36"


def sass(*code: tuple[str, int, int, int]) -> str:
    """Text, scoreboards of result and operands, and mask of the awaited ones, as `cuobjdump` writes them."""
    shown = ""
    for place, (text, result, operands, awaits) in enumerate(code):
        control = result << 46 | operands << 49 | awaits << 52
        shown += f"        /*{place * 16:04x}*/ {text:>60} ;   /* 0x{place:016x} */\n{' ' * 80}/* 0x{control:016x} */\n"
    return "\n\tcode for sm_90a\n\t\tFunction : some_kernel\n" + shown + "\t\t..........\n"


def does(text: str, result: int = 7, operands: int = 7, awaits: int = 0) -> tuple[str, int, int, int]:
    return text, result, operands, awaits


def overtaken(*code: tuple[str, int, int, int]) -> dict[int, list[int]]:
    return overtaken_loads(instructions(sass(*code)))


def test_instructions() -> None:
    found = instructions(sass(does(LOAD, result=3), does(ARRIVE, operands=1, awaits=0b101001)))
    assert [at[:4] for at in found] == [
        (0, "LDS", ".128 R36, [R10+0x18000] ", False),
        (16, "SYNCS", ".ARRIVE.TRANS64.A1T0 RZ, [UR6+0x38b48], RZ ", True),
    ]
    assert [at[4:] for at in found] == [(3, 7, 0), (7, 1, 0b101001)]


def test_a_load_that_nobody_waits_for() -> None:
    assert overtaken(does(LOAD, 0), does(BARRIER), does(ARRIVE)) == {32: [0]}
    assert overtaken(does(LOAD, 0), does(BARRIER, awaits=0b10), does(ARRIVE)) == {32: [0]}
    assert overtaken(does(LOAD, 0), does(BARRIER), does(ARRIVE), does(STORE, awaits=1)) == {32: [0]}
    assert overtaken(does(LOAD, 0)) == {}


@pytest.mark.parametrize(("awaits", "found"), [(0b01, {48: [16]}), (0b10, {48: [0]}), (0b11, {})])
def test_a_use_waits_for_its_load(awaits: int, found: dict[int, list[int]]) -> None:
    assert overtaken(does(LOAD, 0), does(LOAD, 1), does(STORE, awaits=awaits), does(ARRIVE)) == found


def test_a_warp_that_waits_behind_a_barrier_does_not_wait_for_others() -> None:
    late = does(LOAD, 0), does(BARRIER), does(STORE, awaits=1)
    assert overtaken(*late, does(ARRIVE)) == {48: [0]}
    assert overtaken(*late, does(BARRIER), does(ARRIVE)) == {}


def test_one_scoreboard_for_several_loads() -> None:
    both = does(LOAD), does(LOAD, 2)
    assert overtaken(*both, does(ARRIVE)) == {32: [0, 16]}
    assert overtaken(*both, does(STORE, awaits=0b100), does(ARRIVE)) == {}
    assert overtaken(does(LOAD, 2), does(LOAD), does(STORE, awaits=0b100), does(ARRIVE)) == {48: [16]}
    shuffle = "SHFL.BFLY PT, R3, R2, 0x1, 0x1f"
    assert overtaken(does(LOAD), does(shuffle, 2), does(STORE, awaits=0b100), does(ARRIVE)) == {}
    assert overtaken(does(LOAD), does(shuffle, 2), does(ARRIVE)) == {32: [0]}
    assert overtaken(does(LOAD, 1), does(shuffle, 2), does(STORE, awaits=0b100), does(ARRIVE)) == {48: [0]}


def test_a_fence_waits() -> None:
    fence = does("MEMBAR.ALL.CTA", operands=4), does("FENCE.VIEW.ASYNC.S", 4, awaits=0b10000)
    assert overtaken(does(LOAD, 0), *fence, does(BARRIER, awaits=0b10000), does(ARRIVE)) == {}
    assert overtaken(does(LOAD, 0), does(BARRIER), *fence, does(ARRIVE)) == {64: [0]}
    assert overtaken(does(LOAD, 0), fence[0], does(ARRIVE)) == {32: [0]}


def test_what_announces_bytes_frees_nothing() -> None:
    assert overtaken(does(LOAD, 0), does("@!P1 SYNCS.ARRIVE.TRANS64 RZ, [UR49+0x38b30], R3")) == {}


def test_every_path() -> None:
    around = does(ARRIVE), does(LOAD, 0), does("@P0 BRA 0x0")
    assert overtaken(*around) == {0: [16]}
    assert overtaken(*around[:2], does("@P0 BRA 0x50"), does(STORE, awaits=1), does("BRA 0x0"), does("EXIT")) == {}
    skipped = does(LOAD, 0), does("@!P0 BRA 0x30"), does(STORE, awaits=1), does(ARRIVE)
    assert overtaken(*skipped) == {48: [0]}
    assert overtaken(skipped[0], does("BRA 0x30"), *skipped[2:]) == {48: [0]}
    for maybe in ("BRA UP0, 0x30", "@P0 BRA 0x30", "@P0 EXIT"):
        assert overtaken(skipped[0], does(maybe), does(ARRIVE), does("EXIT")) == {32: [0]}
    either = does("@P0 BRA 0x30"), does(LOAD, 0), does("BRA 0x40"), does(LOAD, 1), does(ARRIVE)
    assert overtaken(*either) == {64: [16, 48]}
    assert overtaken(skipped[0], does("EXIT"), skipped[3]) == {}
    assert overtaken(does("BSSY B0, 0x40"), skipped[0], does("BSYNC B0"), skipped[2], skipped[3]) == {64: [16]}
    assert overtaken(skipped[0], does("BRX R2 -0x1e0")) == {16: [0]}
