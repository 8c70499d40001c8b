"""deltaspan: exact context-parallel training of Gated DeltaNet (GDN) layers over packed documents.

Only names live here. Each is imported on first use, so that `import deltaspan` needs neither torch nor numpy.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "partition": "deltaspan.layout",
    "Partition": "deltaspan.layout",
    "Fragment": "deltaspan.layout",
    "plan_segments": "deltaspan.plan",
    "SimulatedGroup": "deltaspan.exchange",
    "Context": "deltaspan.op",
    "build_context": "deltaspan.op",
    "chunk_gated_delta_rule": "deltaspan.op",
    "forward": "deltaspan.op",
    "backward": "deltaspan.op",
    "causal_conv1d": "deltaspan.op",
    "RecomputeHandle": "deltaspan.op",
    "packed_qkv_views": "deltaspan.op",
    "comm_bytes": "deltaspan.op",
    "saved_bytes": "deltaspan.op",
    "workspace_bytes": "deltaspan.op",
    "chosen_backend": "deltaspan.kernels.select",
    "is_supported": "deltaspan.kernels.select",
}
_ROOMS = ("nn",)

__all__ = ["__version__", *_HOMES, *_ROOMS]


def __getattr__(name: str):
    if name in _ROOMS:
        return import_module(f"deltaspan.{name}")
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
    raise AttributeError(f"module 'deltaspan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
