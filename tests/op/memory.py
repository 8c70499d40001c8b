"""Calls whose memory is foretold, and what they request."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import deltaspan as ds
from deltaspan.op.workspace import Watch
from tests.op.support import leaf

LENGTHS = [1300, 0, 70, 2, 900]
HEADS = {"H": 2, "HV": 4}
NORM, GATE, SIGMOID = "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"
REPLAY, RESEND, FULL = {"boundary_mode": "replay"}, {"save_transfer": False}, {"save_mode": "full"}
STATES = {"initial_state": True, "output_final_state": True}

# What is asked for beside the heads: pairs of what may change the number.
CALLS: list[dict[str, Any]] = [
    {"direction": "forward"},
    {"direction": "forward", "segments": 3, **STATES},
    {"direction": "forward", "segments": 2, NORM: True, "exchange": "ring"},
    {"direction": "forward", "segments": 2, "exchange": "all_gather", GATE: True, SIGMOID: True},
    {},
    {"segments": 1, NORM: True, **STATES},
    {"segments": 3, **FULL, NORM: True, "exchange": "ring"},
    {"segments": 2, **FULL, GATE: True, "output_final_state": True, "exchange": "all_gather"},
    {"segments": 3, **REPLAY, SIGMOID: True},
    {"segments": 1, **REPLAY, "exchange": "ring", "initial_state": True},
    {"segments": 2, **RESEND, GATE: True, NORM: True},
    {"segments": 3, **RESEND, "exchange": "all_gather", **STATES},
    {"checkpoint": True},
    {"checkpoint": True, "segments": 1, "exchange": "all_gather"},
    {"checkpoint": True, "segments": 3, "exchange": "ring", **STATES},
    {"checkpoint": True, "segments": 2, "exchange": "all_gather", NORM: True, SIGMOID: True},
    {"checkpoint": True, "segments": 3, **FULL, GATE: True, "initial_state": True},
    {"checkpoint": True, "segments": 2, **REPLAY, NORM: True, "output_final_state": True},
    {"checkpoint": True, "segments": 1, **RESEND, SIGMOID: True, "exchange": "ring"},
]


def calling(ctx: ds.Context, rng: torch.Generator, call: dict[str, Any]) -> Callable[[], object]:
    """The call that is asked about, by the public names, on operands that are there before."""
    H, HV, N, options = *HEADS.values(), ctx.part.num_documents, {"backend": "hopper", **call}
    direction, wrapped = options.pop("direction", "step"), options.pop("checkpoint", False)
    given = options.pop("initial_state", False)

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.rand(*shape, generator=rng) / 12).to(ctx.device, dtype)

    def shards(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        return ctx._each(lambda view: leaf(drawn(1, view.tokens, *shape, dtype=dtype)))

    fp32 = {"dtype": torch.float32}
    types = [torch.bfloat16 if options.get(name) else torch.float32 for name in (GATE, SIGMOID)]
    x = [*(shards(heads, 128) for heads in (H, H, HV)), *(shards(HV, dtype=dtype) for dtype in types)]
    named = {name: leaf(drawn(HV, **fp32)) for name in ("A_log", "dt_bias") if options.get(GATE)}
    named |= {"initial_state": leaf(drawn(N, HV, 128, 128, **fp32))} if given else {}
    do = [*flat(shards(HV, 128)), *flat(ctx._each(lambda view: drawn(N, HV, 128, 128, **fp32)))]
    ranks = len(flat(x[0]))
    do = do if options.get("output_final_state") else do[:ranks]

    def region(*x: Any) -> tuple[Tensor, ...]:
        shards = x if ctx._simulated is False else [list(x[i * ranks : (i + 1) * ranks]) for i in range(5)]
        o, final = ds.chunk_gated_delta_rule(*shards, ctx, **named, **options)
        return *flat(o), *(flat(final) if final is not None else ())

    operands = [t for shard in x for t in flat(shard)]

    def run() -> object:
        if direction == "forward":
            with torch.no_grad():
                return region(*operands)
        kept = {"use_reentrant": False, "preserve_rng_state": False}
        results = checkpoint(region, *operands, **kept) if wrapped else region(*operands)
        return results, torch.autograd.grad(results, [*operands, *named.values()], do)

    return run


def flat(x: Any) -> list[Tensor]:
    return x if isinstance(x, list) else [x]


def requested(call: Callable[[], object], device: str) -> int:
    """Bytes that a call requests at its peak above what is there: of CUDA's allocator, or of torch on the CPU."""
    if device == "cpu":
        with Watch() as watch:
            call()
        return watch.peak
    gc.collect()  # or what it frees while the call runs would be room that the call does not request
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
