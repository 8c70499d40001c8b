"""An emulator of the part of Gluon that the Hopper tier's kernels use: pure torch, no Triton, no GPU.

It runs a kernel's own source. It proves indices, dataflow, roundings and the protocol of barriers, not timing.

    prep = load("deltaspan.kernels.hopper.prep")                            its own functions launch kernels, too
    launch(prep.prep_kernel, (8,), k, g, ..., seed=3, H=2, GROUP=3)
    TensorDescriptor.from_tensor(x, [64, 128])                              for kernels that take descriptors

What it holds a kernel to
    partitions    one thread each, only one at a time, taking turns at random by the seed; a deadlock is reported with
                  who waits for which barrier and phase
    mbarriers     phases, arrival counts, byte counts
    order         every access to shared memory is checked against what the accessing side can know (clocks.py), so a
                  missing wait, arrive, store_wait, warpgroup_mma_wait or fence_async_shared is found in any run that
                  gets there, whatever its timing
    TMA           lands late and in any order; zeros beyond the tensor, stores clipped, alignment, whole boxes in bytes
    copies        by pointer, in groups: land late; nobody reads before a wait, nor ends without one
    products      operand types; sums that are cut off as the tensor cores do (mma.py); an asynchronous result cannot be
                  read before its wait
    memory        poisoned until written, within bounds; shared memory keeps its type and has 227 KB
    numbers       Triton's promotion; bf16, fp16, fp32 rounded where the device rounds; int32 that overflows raises

What it does not see
    races between the warps or threads of one partition (a missing thread barrier); loads that are still on their way at
    an arrival, which machine code alone tells (kernels/hopper/sass.py); and all that layouts decide: bank
    conflicts, conversions, spills, shapes that no layout fits; the order of programs and of global memory within a
    program; the order of fp32 sums on the CUDA cores and within 32 bytes of a product, contraction to FMA, the last
    bits of ex2.approx; registers, speed. Whether Triton compiles the kernel at all is a test of its own.
"""

from tests.emulator.launch import Kernel, launch, seeded
from tests.emulator.load import load, path_of
from tests.emulator.schedule import Deadlock, DeviceFault
from tests.emulator.tma import TensorDescriptor

__all__ = ["Deadlock", "DeviceFault", "Kernel", "TensorDescriptor", "launch", "load", "path_of", "seeded"]
