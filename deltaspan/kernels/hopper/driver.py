"""What CUDA's driver wants of a thread before it encodes a descriptor: a current context.

A thread of torch's backward has none until the runtime launches or allocates something there, and torch's allocator
gives out what it has without asking the runtime.
"""

import ctypes
import threading

import torch


class _Bound(threading.local):
    yes = False


_bound = _Bound()


def bind_context() -> None:
    """Makes the current device's primary context this thread's, if it has none."""
    if _bound.yes or not torch.cuda.is_initialized():
        return
    cuda, context, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
    _done(cuda.cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        _done(cuda.cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()))
        _done(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _done(cuda.cuCtxSetCurrent(context))
    _bound.yes = True


def _done(result: int) -> None:
    if result:
        raise RuntimeError(f"CUDA's driver gives a thread no context: error {result}")
