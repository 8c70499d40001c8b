"""Other implementations of the same operation that may be installed here: how they are called, or why they cannot be.

Each is called as its documentation says, with every option at its default. They need a CUDA device; none is needed to
use deltaspan.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from deltaspan.bench.operands import Operands, Results


class Peer:
    """A package's `chunk_gated_delta_rule` over one local shard."""

    name: ClassVar[str]
    home: ClassVar[str]  # the module of the operation
    capabilities: ClassVar[frozenset[tuple[int, int]] | None] = None  # of devices that it works on; None: any
    phases: ClassVar[tuple[str, ...]] = ("forward", "step")

    def __init__(self, lengths: Sequence[int], device: str) -> None:
        """lengths: of the shard's documents, in tokens, each at least 1."""
        self._rule = import_module(self.home).chunk_gated_delta_rule
        # [N + 1] int64, one tensor for all calls: peers cache what they derive of it by its identity
        self._cu_seqlens = torch.tensor([0, *accumulate(lengths)], device=device)

    @classmethod
    def refusal(cls, device: str) -> str | None:
        """Why it cannot run on this machine, or None. Imports it, which may take a while the first time."""
        if device != "cuda":
            return f"it needs a CUDA device, and the device is {device}"
        capability = torch.cuda.get_device_capability()
        if cls.capabilities is not None and capability not in cls.capabilities:
            known = ", ".join(f"{major}.{minor}" for major, minor in sorted(cls.capabilities))
            does = "trains" if "step" in cls.phases else "runs"
            return f"it {does} on compute capabilities {known}, and this device has {capability[0]}.{capability[1]}"
        try:
            import_module(cls.home)
        except Exception as error:  # whatever a package raises where it cannot work
            return f"importing {cls.home} fails: {first_line(error)}"
        return None

    @classmethod
    def version(cls) -> str:
        """The package's, once it is known that it can be imported."""
        return getattr(import_module(cls.name), "__version__", "unknown")

    def forward(self, x: Operands) -> Tensor:
        with torch.no_grad():
            return self._call(x[:5])

    def step(self, x: Operands) -> Results:
        self.forward(x)
        leaves = [t.detach().requires_grad_() for t in x[:5]]
        o = self._call(leaves)
        return Results(o.detach(), *torch.autograd.grad(o, leaves, x.do))

    def _call(self, operands: Sequence[Tensor]) -> Tensor:
        q, k, v, g, beta = operands
        return self._rule(q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=self._cu_seqlens)[0]


class Fla(Peer):
    """flash-linear-attention, by its own kernels: where FlashQLA is installed it would hand the call to that."""

    name, home = "fla", "fla.ops.gated_delta_rule"

    def _call(self, operands: Sequence[Tensor]) -> Tensor:
        os.environ["FLA_FLASH_QLA"] = "0"  # read at every call
        return super()._call(operands)


class FlashQla(Peer):
    """FlashQLA, with its split of long sequences on one device, which is its default."""

    name, home = "flash_qla", "flash_qla"
    capabilities = frozenset({(9, 0), (10, 0), (10, 3)})


class FlashInfer(Peer):
    """FlashInfer's prefill, with its split of long sequences on one device where it chooses that, which is its default.

    It has no backward on Hopper. The natural-log decay goes in as such, and the longest length as a number of the host:
    it does without, but then takes all tokens for it and launches blocks that find nothing to do.
    """

    name, home = "flashinfer", "flashinfer.gdn_prefill"
    capabilities = frozenset({(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)})
    phases = ("forward",)

    def __init__(self, lengths: Sequence[int], device: str) -> None:
        super().__init__(lengths, device)
        self._longest = max(lengths)

    def step(self, x: Operands) -> Results:
        raise NotImplementedError("FlashInfer's prefill has no backward")

    def _call(self, operands: Sequence[Tensor]) -> Tensor:
        q, k, v, g, beta = (t[0] for t in operands)  # it knows no batch axis
        o = self._rule(q, k, v, g, beta, cu_seqlens=self._cu_seqlens, max_seqlen=self._longest, gate_domain="log")
        return o[None]


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (Fla, FlashQla, FlashInfer)}


def peers_by_name(names: Sequence[str], device: str) -> list[type[Peer]]:
    """Those of `PEERS`.

    Raises:
        ValueError: an unknown name, or a peer that cannot run here, with the reason.
    """
    for name in names:
        if name not in PEERS:
            raise ValueError(f"peers must be some of {', '.join(PEERS)}, got {name!r}")
        if reason := PEERS[name].refusal(device):
            raise ValueError(f"peers must be able to run here, and {name} is not: {reason}")
    return [PEERS[name] for name in dict.fromkeys(names)]


def first_line(error: BaseException) -> str:
    """An exception in one line, for a record."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
