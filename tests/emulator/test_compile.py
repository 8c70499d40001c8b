"""Holds that what the emulator runs is Gluon: pipeline.py compiles for sm_90a with the Triton that is here."""

import pytest

pytestmark = pytest.mark.triton


def test_the_pipeline_compiles() -> None:
    pytest.importorskip("triton")
    from deltaspan.kernels.hopper.ahead import compile_ahead
    from tests.emulator import pipeline

    arguments = {
        "k": "tiles<bf16[64, 128]>", "v": "tiles<bf16[64, 64]>", "o": "tiles<bf16[64, 64]>", "o_rows": "*bf16",
        "states": "*fp32", "segments": "*i32", "n": "i32", "first_slot": "i32",
    }  # fmt: skip
    made = compile_ahead(pipeline.walk, arguments, {}, num_warps=4)
    assert made.spills == 0
    products, loads, stores = made.instructions["HGMMA"], made.instructions["UTMALDG"], made.instructions["UTMASTG"]
    assert products >= 2 and loads >= 2 and stores >= 1
