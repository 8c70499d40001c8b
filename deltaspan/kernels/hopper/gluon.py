"""All that the kernels of this tier take from Triton. What depends on its version stands here and nowhere else.

Written for Gluon as Triton 3.6 to 3.9 have it, an interface that Triton calls experimental.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # of the threads of a partition; renamed after Triton 3.6


COMPILED_WITH = {"enable_fp_fusion": True}  # said in every launch, since Triton 3.10 changes what is assumed


@gluon.jit
def exp2(x):
    """2^x in fp32, where the library's own leaves a branch for every element."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], gl.float32, is_pure=True, pack=1)


__all__ = [
    "COMPILED_WITH",
    "barrier",
    "exp2",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "mma_v2",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
