"""Matrix products: what operands they take, and asynchronous ones, done once they are waited for.

fp32 operands lose what TF32 has no bits for, as the tensor cores cut it off. Sums are those of Hopper's tensor cores:
32 bytes of a row at a time are summed with the accumulator, and the sum is cut off to fp32, toward zero. So many small
additions to one accumulator shrink it by as much as they are many, where a sum that is rounded wanders.

Of one step the model that was found to the bit on an H100 (Xie et al., MMA-Sim, arXiv 2511.10909; Khattak and Mikaitis,
arXiv 2512.07004, have the same) cuts every product, and the accumulator, at 2^-25 of the largest of them, adds these
exactly and cuts the sum. Cutting each product apart would cost as much as all else. Products have both signs, so here
their exact sum is rounded to 25 bits and then cut: on 1,024 chunks of maps that shrinks by 1.97e-4 where the whole
model does by 2.05e-4, and an H200 did by 2.03e-4.
Where all products are far below the accumulator's last place a device loses them, while here the accumulator loses a
place: as much, but of the other sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.emulator.schedule import DeviceFault, Partition, here
from tests.emulator.shared import SharedMemory
from tests.emulator.values import Value, constant

OPERANDS = (torch.bfloat16, torch.float16, torch.float32)
STEP = 32  # bytes of a row that are summed at once
TF32_CUT = -(2**13)  # clears the low 13 bits of fp32
FP32_CUT = -(2**29)  # those of fp64 that fp32 does not have
HALF = 2**26  # of the last of 25 bits, in fp64


class Pending(Value):
    """The accumulator of an asynchronous product: another product may add to it, but nobody may read it yet."""

    def __init__(self, result: Value, issuer: Partition, number: int) -> None:
        self.result, self.issuer, self.number = result, issuer, number
        self.dtype = result.dtype

    @property
    def held(self) -> Tensor:  # type: ignore[override]
        raise DeviceFault(f"warpgroup_mma number {self.number} of {self.issuer.name} is read before a wait for it")

    @property
    def shape(self) -> list[int]:
        return self.result.shape


class _Product:
    """One asynchronous product under way, and the register operand that it still reads."""

    def __init__(self, number: int, left: Value | None) -> None:
        self.number, self.left = number, left


def mma_v2(a: Value, b: Value, acc: Value, input_precision: str | None = None) -> Value:
    """acc + a b by a warp's synchronous mma, all in registers."""
    if input_precision not in (None, "tf32"):
        raise NotImplementedError(f"mma_v2 with input_precision {input_precision!r}")
    return Value(_product(a, b, acc), acc.dtype)


def warpgroup_mma(
    a: Value | SharedMemory,
    b: SharedMemory,
    acc: Value,
    *,
    use_acc: Value | bool = True,
    precision: str | None = None,
    max_num_imprecise_acc: int | None = None,
    is_async: bool = False,
) -> Value:
    """a b, plus acc if `use_acc`. The left operand may be in registers, the right one is in shared memory."""
    if not isinstance(b, SharedMemory):
        raise TypeError("warpgroup_mma: the right operand must be in shared memory")
    part = here()
    part.program.pause()
    if isinstance(acc, Pending) and acc.issuer is not part:
        raise DeviceFault(f"{part.name} adds to an accumulator of {acc.issuer.name}")
    if b.dtype == torch.float32 and any(m.data.stride(k) != 1 for m, k in ((a, 1), (b, 0)) if in_shared_memory(m)):
        raise TypeError("warpgroup_mma on fp32 reads operands in shared memory along the summed dimension only")
    part.products_issued += 1
    for memory in filter(in_shared_memory, (a, b)):
        memory.reads(part.products, part.products_issued, part.knowledge)
    before = acc.result if isinstance(acc, Pending) else acc
    result = _product(a, b, before, use_acc=bool(constant(use_acc)))
    part.products_in_flight.append(_Product(part.products_issued, a if isinstance(a, Value) else None))
    pending = Pending(Value(result, acc.dtype), part, part.products_issued)
    return pending if is_async else warpgroup_mma_wait(0, deps=[pending, a])[0]


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] | None = None) -> Any:
    """Until at most that many of the partition's products, the last ones, are under way.

    Returns deps, with accumulators that are complete now readable. A register operand must be among deps here or of a
    later wait: the compiler may otherwise put something else into its registers while the product reads them.
    """
    if not deps:
        raise ValueError("warpgroup_mma_wait: deps must be given")
    part = here()
    part.program.pause()
    flying = part.products_in_flight
    complete = flying[: max(0, len(flying) - num_outstanding)]
    part.products_in_flight = flying[len(complete) :]
    part.operands_to_keep += [product for product in complete if product.left is not None]
    part.operands_to_keep = [p for p in part.operands_to_keep if not any(dep is p.left for dep in deps)]
    done = part.products_issued - len(part.products_in_flight)
    part.knowledge.known[part.products] = done
    results = [dep.result if isinstance(dep, Pending) and dep.number <= done else dep for dep in deps]
    return results[0] if len(results) == 1 else tuple(results)


def in_shared_memory(operand: Any) -> bool:
    return isinstance(operand, SharedMemory)


def _product(a: Value | SharedMemory, b: Value | SharedMemory, acc: Value, use_acc: bool = True) -> Tensor:
    """a b, plus acc if `use_acc`, as the tensor cores sum it."""
    _check(a, b, acc)
    step = STEP // a.dtype.itemsize
    total = acc.held.double() if use_acc else torch.zeros_like(acc.held, dtype=torch.float64)
    total = total.contiguous()  # and nobody else's: it was fp32
    bits = total.view(torch.int64)
    for left, right in zip(_entering(a).double().split(step, 1), _entering(b).double().split(step), strict=True):
        total.addmm_(left, right)
        bits.add_(HALF).bitwise_and_(FP32_CUT)  # of the magnitude, since the sign is a bit by itself
    return total.float()


def _check(a: Value | SharedMemory, b: Value | SharedMemory, acc: Value) -> None:
    if a.dtype != b.dtype or a.dtype not in OPERANDS or acc.dtype != torch.float32:
        raise TypeError(f"a product of {a.dtype} and {b.dtype} into {acc.dtype}: two of one type into fp32 are wanted")
    if len(a.shape) != 2 or [a.shape[1], acc.shape] != [b.shape[0], [a.shape[0], b.shape[1]]]:
        raise TypeError(f"a product of {a.shape} and {b.shape} into {acc.shape}")


def _entering(operand: Value | SharedMemory) -> Tensor:
    """As the tensor cores see it."""
    held = operand.data if isinstance(operand, SharedMemory) else operand.held
    return (held.contiguous().view(torch.int32) & TF32_CUT).view(torch.float32) if held.dtype == torch.float32 else held
