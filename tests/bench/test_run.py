"""A record from request to row: its keys, who is timed and who is not, and when a row counts as steady."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltaspan.bench import run as bench_run
from deltaspan.bench.check import Truth
from deltaspan.bench.operands import draw
from deltaspan.bench.peers import PEERS, Fla, FlashInfer, FlashQla, first_line
from deltaspan.bench.report import line, table
from deltaspan.bench.run import Request, prepare
from deltaspan.bench.timing import Stopwatch, interleave
from deltaspan.reference import chunked_gated_delta_rule
from tests.bench.peers import ForwardOnly, Hasty, Missing, Raising, Right, Wrong

TOY = {"shards": ["2x40"], "heads": (1, 2), "device": "cpu"}
PROMISED = ["pack", "cp", "layout", "slowest_rank", "forward_ms", "step_ms", "wire_ms", "peak_mib", "peers"]


class EvenClock(Stopwatch):
    """Every mark is one millisecond after the last."""

    now = 0.0

    def mark(self) -> float:
        EvenClock.now += 1e-3
        return EvenClock.now


@pytest.fixture
def even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "Stopwatch", EvenClock)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for peer in (Right, Wrong, Hasty, ForwardOnly, Raising, Missing):
        monkeypatch.setitem(PEERS, peer.name, peer)


def last(**request: Any) -> dict[str, Any]:
    *_, record = prepare(Request(**TOY | request)).run()
    return json.loads(json.dumps(record, allow_nan=False))


def test_a_record_has_what_is_promised(known: None) -> None:
    record = last(peers=["right"], decay="slow", seed=5)
    assert list(record)[:4] == ["machine", "versions", "commit", "decay"] and record["decay"] == "slow"
    assert record["versions"]["torch"] == torch.__version__ and record["versions"]["right"] == "1.2.3"
    (row,) = record["rows"]
    assert row.keys() >= {*PROMISED, "errors", "control", "spread", "tokens", "segments", "steady"}
    assert (row["layout"], row["wire_ms"], row["peak_mib"], row["tokens"], row["cp"]) == ("local", None, None, 80, 1)
    for side in (row, row["peers"]["right"]):
        for what in ("forward", "step"):
            spread = side["spread"][what]
            assert 0 < spread["min"] <= spread["quartile_1"] <= side[f"{what}_ms"] <= spread["quartile_3"]
    assert row["errors"].keys() == {"o", "dq", "dk", "dv", "dg", "dbeta", "forward"}
    assert row["ok"]


def test_forwards_alone(known: None) -> None:
    full = last(heads=(2, 4))
    assert full["phases"] == ["forward", "step"]
    record = last(peers=["right", "hasty"], heads=(2, 4), phases=["forward"])
    (row,) = record["rows"]
    assert record["phases"] == ["forward"] and row["errors"].keys() == {"forward"} and row["forward_ms"] > 0
    assert row["step_ms"] is None and row["control"].keys() == {"forward"} and row["peers"]["right"]["off"] is None
    assert "(forward)" in row["peers"]["hasty"]["off"]
    shown, told = table(record), line(row, record["phases"])
    assert "forward MiB" in shown and f"| {row['forward_ms']:,.3f} |" in shown
    assert "more in ms, forward, sides" in shown and "step" not in shown
    assert told.startswith(f"2x40: forward deltaspan {row['forward_ms']:,.3f}, right ") and " / " not in told
    del full["phases"]  # a record from before it was written down
    assert "forward / checkpointed step" in table(full) and "step MiB" in table(full)
    assert row["errors"]["forward"] == pytest.approx(full["rows"][0]["errors"]["forward"], rel=1e-6)


def test_a_peer_without_a_backward_has_its_forward_timed(known: None) -> None:
    record = last(peers=["forward_only", "right"], heads=(2, 4))
    (row,) = record["rows"]
    side = row["peers"]["forward_only"]
    assert record["phases"] == ["forward", "step"] and row["ok"] and side["errors"].keys() == {"forward"}
    assert side["forward_ms"] > 0 and side["step_ms"] is None and side["spread"].keys() == {"forward"}
    assert row["peers"]["right"]["step_ms"] > 0 and row["control"].keys() == {"forward", "step"}
    assert f"forward_only {side['forward_ms']:,.3f} / -," in line(row) and "forward_only" in table(record)


def test_pack_rows_are_of_one_rank_and_of_all(even_clock: None) -> None:
    record = last(shards=[], packs={"X": [150, 40]}, cp=[2], layouts=["zigzag"])
    alone, together = record["rows"]
    assert record["asked"] == 2
    assert (alone["layout"], alone["cut_by"], together["layout"]) == ("local", "zigzag", "zigzag")
    assert (alone["forward_ms"], together["forward_ms"]) == (
        1,
        3,
    )  # on this clock: a call, and what lies around two exchanges
    assert together["slowest_rank"] in (0, 1) and len(together["segments"]) == 2
    assert together["tokens"] == 190 and together["ok"] and together["peers"] == {}


def test_a_side_that_is_wrong_is_not_timed(known: None) -> None:
    (row,) = last(peers=["right", "wrong", "hasty", "raising"], heads=(2, 4))["rows"]
    off = {name: side["off"] for name, side in row["peers"].items()}
    # 2 % of one of two heads, pooled: 1.4e-2 or so
    assert off["right"] is None and "(dk), allowed 1e-02" in off["wrong"] and "(forward)" in off["hasty"]
    assert off["raising"] == "RuntimeError: no such shape"
    for name in ("wrong", "hasty", "raising"):
        side = row["peers"][name]
        assert side["forward_ms"] is side["step_ms"] is None and side["spread"] == {}
    assert row["off"] is None and row["step_ms"] > 0 and row["peers"]["right"]["step_ms"] > 0
    assert not row["ok"]
    assert "wrong not timed: off by" in line(row)


def test_our_own_side_is_judged_like_any_other(known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_run.Deltaspan.step
    monkeypatch.setattr(
        bench_run.Deltaspan, "step", lambda side, x: (found := right(side, x))._replace(dbeta=-found.dbeta)
    )
    record = last(peers=["right"])  # which is made of it, and so just as wrong
    (row,) = record["rows"]
    assert "(dbeta)" in row["off"] and "(dbeta)" in row["peers"]["right"]["off"]
    assert row["step_ms"] is None and row["control"] == {} and not row["steady"] and not row["ok"]
    assert "deltaspan not timed" in table(record)


def test_a_row_is_steady_if_ours_takes_as_long_twice(even_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = last()["rows"]
    assert row["steady"] and row["control"] == {"forward": 1, "step": 1}
    assert "unsteady" not in line(row)

    def uneven(sides: dict, stopwatch: Stopwatch, samples: int) -> dict:
        control = sides["control"]
        return interleave(sides | {"control": lambda: [*control(), *control()]}, stopwatch, samples)

    monkeypatch.setattr(bench_run, "interleave", uneven)
    (row,) = last()["rows"]
    assert not row["steady"] and row["control"] == {"forward": 2, "step": 2} and row["ok"]
    assert "unsteady: control 2.000 / 2.000" in line(row)


def test_the_control_has_its_turn_opposite_of_ours(known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    circles = []

    def watched(sides: dict, stopwatch: Stopwatch, samples: int) -> dict:
        circles.append(list(sides))
        return interleave(sides, stopwatch, samples)

    monkeypatch.setattr(bench_run, "interleave", watched)
    monkeypatch.setitem(PEERS, "also_right", type("AlsoRight", (Right,), {"name": "also_right"}))
    last(peers=["right", "also_right"], shards=["1x9"], heads=(2, 2))
    assert circles == [["deltaspan", "right", "control", "also_right"]] * 2
    last(shards=["1x9"])
    assert circles[2:] == [["deltaspan", "control"]] * 2


def test_a_cut_run_leaves_the_rows_that_were_done() -> None:
    told: list[str] = []
    rows = prepare(Request(**TOY | {"shards": ["1x3", "1x5"]})).run(told.append)
    record = next(rows)
    assert len(record["rows"]) == 1 and record["asked"] == 2
    assert told == ["[1/2] 1x3: 3 tokens"]
    assert "1 of 2 rows" in table(record)


def test_documents_of_one_token_are_served() -> None:
    (row,) = last(shards=["3x1"])["rows"]  # nothing is read of an old state: dg is zero
    assert row["ok"]


@pytest.mark.parametrize("peer", [Fla, FlashQla, FlashInfer])
def test_real_peers_say_why_they_cannot_run(peer: type, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA device" in peer.refusal("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(peer, "home", "deltaspan.no_such_module")
    assert peer.refusal("cuda") == (
        "importing deltaspan.no_such_module fails: ModuleNotFoundError: No module named 'deltaspan.no_such_module'"
    )


def test_a_device_too_old_for_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert FlashQla.refusal("cuda") == "it trains on compute capabilities 9.0, 10.0, 10.3, and this device has 8.6"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert FlashInfer.refusal("cuda").startswith("it runs on compute capabilities 8.0, ")


def test_flashinfer_is_called_by_its_own_conventions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens first, an unbatched pack; the log decay said to be one; the longest document."""
    said = []

    def rule(q, k, v, g, beta, *, cu_seqlens, **options):
        said.append((cu_seqlens.tolist(), options))
        return chunked_gated_delta_rule(*(t.double() for t in (q, k, v, g, beta)), cu_seqlens.tolist())[0].to(v.dtype)

    module = SimpleNamespace(chunk_gated_delta_rule=rule)
    monkeypatch.setitem(sys.modules, FlashInfer.home, module)
    x, peer = draw(170, (1, 2), "moderate", device="cpu", seed=3), FlashInfer([40, 130], "cpu")
    o = peer.forward(x)
    assert o.shape == x.v.shape and Truth.of(x, [0, 40, 170], gradients=False).error("o", o) < 2**-8  # one rounding
    assert said == [([0, 40, 170], {"max_seqlen": 130, "gate_domain": "log"})]
    with pytest.raises(NotImplementedError, match="no backward"):
        peer.step(x)


def test_a_peer_that_was_asked_for_and_is_missing_is_an_error(known: None) -> None:
    with pytest.raises(ValueError, match="peers must be able to run here, and missing is not: it was never written"):
        prepare(Request(**TOY, peers=["right", "missing"]))


def test_an_exception_in_one_line() -> None:
    assert first_line(ValueError("a\nb")) == "ValueError: a"
    assert first_line(KeyError()) == "KeyError"


@pytest.mark.gpu
def test_on_a_gpu_memory_and_the_driver_are_recorded() -> None:
    record = last(device="cuda", shards=["2x300"], packs={"X": [500]}, cp=[2], layouts=["zigzag"])
    assert record["machine"]["gpu"] and record["machine"]["driver"]
    local, _, together = record["rows"]
    assert local["ok"] and together["ok"]
    results_mib = 600 * 128 * 2 * (2 * 1 + 2 * 2) / 2**20  # o, dq, dk and dv alone
    assert local["peak_mib"] > results_mib and local["peak_mib"] > local["forward_peak_mib"] > 0
    assert together["peak_mib"] is None and together["step_ms"] > together["forward_ms"] > 0
