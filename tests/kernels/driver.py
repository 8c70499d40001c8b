"""A driver that has Triton compile for sm_90a and launch nothing: what a launcher is given is noted instead."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver

TUPLED = len(signature(driver.make_tensordesc_arg).parameters) > 2  # after Triton 3.6 arguments come as one


class Driver:
    DEVICE = 99  # Triton keeps what it has compiled by device, with its launchers: not with those of a real one

    def __init__(self) -> None:
        self.launches: list[tuple] = []  # by launch: grid, hooks, and arguments as the device takes them
        self.beside: list[bool] = []  # by launch: whether it may begin before the one before has ended
        self.encoded: list[tuple] = []  # by descriptor that was made for the device: what it was made of
        noted = self

        class Launcher:
            """As the driver's own, without what calls CUDA."""

            def __init__(self, source: Any, metadata: Any) -> None:
                how = getattr(metadata, "tensordesc_meta", None)
                self.launch = driver.wrap_handle_tensordesc(noted.launched, dict(source.signature), how)
                self.launch_pdl = metadata.launch_pdl

            def __call__(self, *given: Any) -> None:
                before, rest, arguments = given[:5], given[5:9], given[9:]
                if TUPLED:
                    self.launch(*before, False, self.launch_pdl, *rest, None, None, None, None, arguments)
                else:
                    self.launch(*before, False, self.launch_pdl, None, None, *rest, *arguments)

        self.launcher_cls, self.utils = Launcher, self

    def launched(self, *given: Any) -> None:
        hooks, arguments = (given[9:11], given[-1]) if TUPLED else (given[11:13], given[13:])
        self.launches.append((given[:3], hooks, tuple(arguments)))
        self.beside.append(given[6])

    def fill_tma_descriptor(self, *given: Any) -> tuple:
        self.encoded.append(given)
        return given[0], str(given[1:])

    fill_tma_descriptor_tiled = fill_tma_descriptor  # its name after Triton 3.6

    def load_binary(self, *given: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 64, 0, 1024

    def unload_module(self, module: int) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_device(self) -> int:
        return self.DEVICE

    def get_current_stream(self, device: int | None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


_driver = Driver()  # one for all, since launchers note what they are given with the one that made them


@contextmanager
def installed() -> Iterator[Driver]:
    """In the place of the active driver."""
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_driver)
    for noted in (_driver.launches, _driver.beside, _driver.encoded):
        noted.clear()
    try:
        yield _driver
    finally:
        triton.runtime.driver._active = before
