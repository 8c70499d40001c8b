"""Bytes that a call requests of the allocator at its peak: counted in a rehearsal.

A rank's own call, on tensors that have shapes and no memory, asks torch for exactly what the real one asks for; kernels
are left out. So no second account of what each stage allocates has to be kept true.
"""

from collections import Counter
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint as checkpointed

from deltaspan.exchange import Rehearsal, SimulatedGroup
from deltaspan.kernels import select
from deltaspan.op.context import Context
from deltaspan.op.function import called
from deltaspan.op.operands import Operands
from deltaspan.op.options import Options, check_choice, check_segments
from deltaspan.op.sizes import check_layer
from deltaspan.op.view import RankView, group_view, rank_view
from deltaspan.plan import Cut

META = torch.device("meta")


@torch.inference_mode(False)  # under which a forward keeps nothing
def workspace_bytes(
    ctx: Context,
    *,
    H: int,
    HV: int,
    K: int = 128,
    V: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    direction: str = "step",
    checkpoint: bool = False,
    initial_state: bool = False,
    output_final_state: bool = False,
    exchange: str = "all_to_all",
    segments: Cut | None = None,
    save_mode: str = "light",
    boundary_mode: str = "saved",
    save_transfer: bool = True,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    backend: str = "auto",
) -> int | list[int]:
    """Bytes that this rank's call holds of torch's allocator at its peak, beyond its operands: as requested, before
    anything is rounded, results included. For calls that the Hopper tier serves. Nothing is launched or allocated.

    direction: "forward", of a call where no gradients are recorded; or "step", of `chunk_gated_delta_rule` and the
        gradients of all its operands, to which those of its results are operands, too.
    checkpoint: whether the step's forward is the whole region of a non-reentrant checkpoint.
    initial_state: whether one is given.
    output_final_state to backend: as given to the call. exchange counts as over the context's own backend.

    Operands are dense; g and beta fp32, or where they are raw in the operands' type, with a dt_bias. What is made once
    and stays is not in it: a context's tables, a tile of 64 KiB a device. Nor are buffers that NCCL has of its own; and
    what a group exchanges over it torch may hold for longer, or let go of sooner, than a program does.
    With a SimulatedGroup a list, one entry a rank, each as if the ranks were a group's over NCCL.

    Raises:
        TypeError, ValueError: heads or options that no call accepts, or a call that the torch tier serves.
    """
    check_layer(ctx, H, HV, K, V, dtype)
    check_choice("direction", direction, ("forward", "step"))
    if direction == "forward" and checkpoint:
        raise ValueError("checkpoint=True belongs to direction='step': a forward alone is not run again")
    options = Options(
        output_final_state=output_final_state, exchange=exchange, segments=segments, save_mode=save_mode,
        boundary_mode=boundary_mode, save_transfer=save_transfer, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, backend=backend,
    )  # fmt: skip
    check_segments(segments, ctx.part)
    tier = select.stages(backend, ctx.device, dtype=dtype, K=K, V=V, group=HV // H)
    if not hasattr(tier, "rehearsal"):
        raise ValueError(
            f"backend={backend!r} takes the torch tier here, whose memory is torch's own affair: measure a call by "
            "torch.cuda.max_memory_allocated, or ask on a device of compute capability 9.0 for bf16 and K = V = 128"
        )

    def of_rank(view: RankView) -> int:
        there = _without_memory(ctx, view)
        given = Options(**{**vars(options), "segments": ctx._segments(view.rank, HV, segments)})
        x = _operands(view.tokens, ctx.part.num_documents, H, HV, K, V, dtype, options, initial_state)
        of_results = [torch.empty_like(x.v)]
        if output_final_state:
            of_results.append(torch.empty(x.state_shape(ctx.part.num_documents), dtype=x.state_type, device=META))
        grads = of_results if direction == "step" else None
        with tier.rehearsal(ctx.device), Watch() as watch:
            _run(there, tier, given, x, grads, checkpoint)
        return watch.peak

    return ctx._each(of_rank)


def _run(ctx: Context, tier: Any, options: Options, x: Operands, grads: list[Tensor] | None, checkpoint: bool) -> None:
    """A forward, or with gradients of its results a step."""

    def region(*given: Tensor | None) -> list[Tensor]:
        o, final = called(ctx, tier, options, None, [Operands(*given)])
        return [t for t in (*o, *final) if t is not None]

    if grads is None:
        with torch.no_grad():
            region(*x)
        return
    wanted = [t.requires_grad_() for t in x if t is not None]
    with torch.enable_grad():
        again = {"use_reentrant": False, "preserve_rng_state": False}
        results = checkpointed(region, *x, **again) if checkpoint else region(*x)
    torch.autograd.grad(results, wanted, grads)


def _without_memory(ctx: Context, view: RankView) -> Context:
    """The context as one rank has it, on the meta device."""
    link, whole = ctx._transport, group_view(ctx.part, META)
    if ctx.part.world_size > 1 or not isinstance(link, SimulatedGroup):
        link = Rehearsal(view.rank, ctx.part.world_size, beside=link.beside)
    return Context(
        part=ctx.part,
        device=META,
        conv_kernel_size=ctx.conv_kernel_size,
        p_rule=ctx.p_rule,
        sm_count=ctx.sm_count,
        _transport=link,
        _views=(rank_view(ctx.part, view.rank, whole, ctx.conv_kernel_size, META),),
        _group=whole,
        _simulated=False,
    )


def _operands(
    T: int, documents: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype, options: Options, initial_state: bool
) -> Operands:
    def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    q, k, v = (of(T, heads, width, dtype=dtype) for heads, width in ((H, K), (H, K), (HV, V)))
    raw = options.use_gate_in_kernel, options.use_beta_sigmoid_in_kernel
    g, beta = (of(T, HV, dtype=dtype if is_raw else torch.float32) for is_raw in raw)
    initial = of(documents, HV, K, V) if initial_state else None
    A_log, dt_bias = (of(HV) if options.use_gate_in_kernel else None for _ in range(2))
    return Operands(q, k, v, g, beta, initial, A_log, dt_bias)


class Watch(TorchDispatchMode):
    """Sees all memory that is asked for within, by weak references, and when nobody holds it any more."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0  # counts looks at what there is: one before each operator that may ask for more
        self.asked: dict[StorageWeakRef, tuple[int, int]] = {}  # what is there: bytes, and when they came
        self.changes: Counter[int] = Counter()  # bytes more or less, by time, of what has come and gone

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        results = operator(*args, **(kwargs or {}))
        if not operator.is_view:
            self._end()
            given = _storages((args, kwargs))
            made = {storage: size for storage, size in _storages(results).items() if storage not in given}
            self.asked |= {storage: (size, self.now) for storage, size in made.items()}
        return results

    @property
    def peak(self) -> int:
        """The most bytes that were there at once, without what still is: that is made once and stays."""
        self._end()
        return max(accumulate(self.changes[at] for at in range(self.now + 1)))

    def alive(self) -> int:
        """Bytes that are still there."""
        self._end()
        return sum(size for size, _ in self.asked.values())

    def _end(self) -> None:
        self.now += 1
        for storage in [storage for storage in self.asked if storage.expired()]:
            size, came = self.asked.pop(storage)
            self.changes[came] += size
            self.changes[self.now] -= size


def _storages(x: Any) -> dict[StorageWeakRef, int]:
    found = (leaf.untyped_storage() for leaf in tree_leaves(x) if isinstance(leaf, Tensor))
    return {StorageWeakRef(storage): storage.nbytes() for storage in found}
