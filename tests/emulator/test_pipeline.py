"""Holds the emulator to what it is for: the pipeline runs right under every seed, and no planted fault goes unseen."""

import re

import pytest
import torch
from torch import Generator, Tensor

from tests.emulator import Deadlock, DeviceFault, TensorDescriptor, launch, load, path_of
from tests.helpers import same_bits

MODULE = "tests.emulator.pipeline"
SOURCE = path_of(MODULE).read_text(encoding="utf-8")
FIRST_SLOT = 300_000  # times the size of a state, beyond 2^31
SEGMENTS = [(0, 200), (209, 210), (216, 280), (281, 409), (420, 484)]  # rows between them are nobody's
TOKENS = 490
SEEDS = range(3)


def inputs(rng: Generator) -> tuple[Tensor, Tensor]:
    """k of unit rows and v, bf16; NaN in rows of nobody."""
    k = torch.nn.functional.normalize(torch.randn(TOKENS, 128, generator=rng), dim=-1)
    v = torch.randn(TOKENS, 64, generator=rng)
    outside = torch.ones(TOKENS, dtype=torch.bool)
    for first, last in SEGMENTS:
        outside[first:last] = False
    k[outside], v[outside] = float("nan"), float("nan")
    return k.bfloat16(), v.bfloat16()


def emulated(source: str, k: Tensor, v: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    o = torch.full((TOKENS, 64), float("nan"), dtype=torch.bfloat16)
    states = torch.full((len(SEGMENTS), 64, 128), float("nan"))
    rows = torch.tensor([[*s, FIRST_SLOT + i] for i, s in enumerate(SEGMENTS)], dtype=torch.int32)
    described = TensorDescriptor.from_tensor
    tiles = described(k, [64, 128]), described(v, [64, 64]), described(o, [64, 64])
    launch(load(MODULE, source).walk, (2,), *tiles, o, states, rows, len(SEGMENTS), FIRST_SLOT, seed=seed)
    return o, states


def plain(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same in torch, with the roundings to bf16 that pipeline.py states and products of the same shapes. Sums in
    fp32 are rounded here; tensor cores cut them."""
    o = torch.full((TOKENS, 64), float("nan"), dtype=torch.bfloat16)
    states = torch.zeros(len(SEGMENTS), 64, 128)
    for S, (first, last) in zip(states, SEGMENTS, strict=True):
        for t in range(first, last, 64):
            n = min(64, last - t)
            keys, values = torch.zeros(64, 128), torch.zeros(64, 64)
            keys[:n], values[:n] = k[t : t + n].float(), v[t : t + n].float()
            U = S.bfloat16().float() @ keys.mT
            S.copy_(S * 0.5 + (values.mT - U).bfloat16().float() @ keys)
            o[t : t + n] = U.mT[:n].bfloat16()
    return o, states


def test_it_equals_plain_torch_and_itself_under_every_seed(rng: Generator) -> None:
    k, v = inputs(rng)
    o, states = plain(k, v)
    inside = ~o.isnan()
    assert float(o[:200].float().abs().max()) > 0.1, "a result of nothing but zeros would prove nothing"
    first = emulated(SOURCE, k, v, 0)
    assert same_bits(~first[0].isnan(), inside)
    # what is cut moves a number over a border of bf16 here and there: far less than all of them rounded once more, 2^-9
    assert relative(first[0][inside], o[inside]) < 2.0**-9 and relative(first[1], states) < 2.0**-9
    for seed in range(1, 8):
        assert all(map(same_bits, emulated(SOURCE, k, v, seed), first)), f"seed {seed}"


def relative(found: Tensor, true: Tensor) -> float:
    return ((found.double() - true.double()).norm() / true.double().norm()).item()


WAIT_EMPTY = "            mbarrier.wait(empty.index(s), phase ^ 1)\n"
WAIT_U = "            U, entry = warpgroup_mma_wait(0, deps=[U, entry])\n"
WAIT_S = "            S, rest = warpgroup_mma_wait(0, deps=[S, rest])\n"
FREE = "            mbarrier.arrive(empty.index(s), count=1)\n"
STAGE = "            staged.permute((1, 0)).store(U.to(gl.bfloat16))\n"
FENCE = "            fence_async_shared()\n            barrier()\n            if t + 64"
BYTES = "(64 * 128 + 64 * 64) * 2"

# What is planted: a text of pipeline.py, what stands in its place, and what comes of it: WRONG results, or a fault's
# message. The text of a deadlock names who waits.
WRONG = None
RACE = "nothing orders"
FAULTS = {
    "no wait on full": ("            mbarrier.wait(full.index(s), phase)\n", "", f"{RACE}|waits for"),
    "no wait on empty": (WAIT_EMPTY, "", f"{RACE}|lacks 0"),
    "no arrive": (FREE, "", r"produce waits for phase 0 of empty\[0\]"),
    "arrives twice": ("empty.index(s), count=1", "empty.index(s), count=2", "arrives 2 times at empty.*lacks 1"),
    "one arrival too many is awaited": ("empty.index(i), count=1", "empty.index(i), count=2", "lacks 1 of 2 arrivals"),
    "too few bytes": (BYTES, "64 * 128 * 2", "bytes land on full"),
    "too many bytes": (BYTES, f"{BYTES} + 16", "lacks 0 of 1 arrivals and 16 bytes"),
    "the consumer's phase": ("full.index(s), phase)", "full.index(s), phase ^ 1)", f"{RACE}|waits for"),
    "the producer's phase": ("empty.index(s), phase ^ 1", "empty.index(s), phase", "produce waits for phase 0"),
    "one stage off": ("k_ring.index(s))", "k_ring.index((s + 1) % STAGES))", RACE),
    "one stage too many": ("(s == STAGES, 0, s)\n\n\n", "(s > STAGES, 0, s)\n\n\n", "index 3 of"),
    "the next stage's barrier": ("full.index(s), v_", "full.index((s + 1) % 3), v_", f"bytes land on|{RACE}"),
    "no wait for U": (WAIT_U, "", "warpgroup_mma number 1 of consume is read before"),
    "no wait for S": (WAIT_S, "", "warpgroup_mma number 2 of consume is read before"),
    "waits for all but one": ("wait(0, deps=[U", "wait(1, deps=[U", "is read before"),
    "frees what a product reads": (f"{WAIT_S}            barrier()\n{FREE}", FREE + WAIT_S, "read by a warpgroup_mma"),
    "forgets a register operand": (WAIT_S, WAIT_S.replace(", rest", ""), "left operand in registers"),
    "no fence": (FENCE, FENCE.partition("\n")[2], "TMA store of consume reads staged.*no fence"),
    "the fence before the store": (
        f"{STAGE}            fence_async_shared()\n", f"            fence_async_shared()\n{STAGE}", "no fence"
    ),
    "no fence after clearing": (
        "                fence_async_shared()\n", "", "warpgroup_mma of consume reads k_ring.*no fence"
    ),
    "overwrites what a store reads": ("            store_wait(0)\n", "", "writes staged, read by a TMA store"),
    "ends before its stores": ("    store_wait(0)\n\n\n", "\n\n", "without store_wait"),
    "stores a tile past the end": ("if t + 64 <= last:", "if t < last:", WRONG),
    "stores rows past the end": (", mask=(t + out_token < last)[:, None]", "", WRONG),
    "takes in values past the end": ("gl.where((t + token < last)[None, :], value - U, 0.0)", "value - U", WRONG),
    "takes in keys past the end": ("if t + 64 > last:", "if t > last:", WRONG),
    "32 bits": ("slot.to(gl.int64) * STATE -", "slot * STATE -", "does not fit torch.int32"),
    "beyond the states": ("place + row", "place + STATE + row", "store to states at element 40960, beyond its 40960"),
    "rounds the state": ("S = S * 0.5\n", "S = S.to(gl.bfloat16).to(gl.float32) * 0.5\n", WRONG),
    "one tile too many": (f"last, 64):\n{WAIT_EMPTY}", f"last + 64, 64):\n{WAIT_EMPTY}", "nobody has waited"),
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, seed: int, rng: Generator) -> None:
    text, instead, message = FAULTS[fault]
    assert SOURCE.count(text) == 1, f"{SOURCE.count(text)} places for this fault"
    k, v = inputs(rng)
    source = SOURCE.replace(text, instead)
    if message is not WRONG:
        with pytest.raises(DeviceFault, match=message):
            emulated(source, k, v, seed)
        return
    assert not all(map(same_bits, emulated(source, k, v, seed), emulated(SOURCE, k, v, seed)))


def test_a_deadlock_says_who_waits_for_what(rng: Generator) -> None:
    source = SOURCE.replace("            mbarrier.arrive(empty.index(s), count=1)\n", "")
    with pytest.raises(Deadlock) as caught:
        emulated(source, *inputs(rng), seed=1)
    report = str(caught.value)
    assert re.search(r"produce waits for phase 0 of empty\[0\], which has completed 0 phases and lacks 1 of 1", report)
    assert re.search(r"consume waits for phase 1 of full\[0\], which has completed 1 phases", report)
