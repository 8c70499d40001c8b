"""The options of one call, checked before anything is launched."""

from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from torch import Tensor

from deltaspan.exchange import EXCHANGES
from deltaspan.layout import Partition
from deltaspan.layout.pack import as_int
from deltaspan.plan import CHUNK, MOST_SEGMENTS

# What this release serves of the options whose other values are still to come; anything else is refused, never ignored.
SERVED: dict[str, tuple[Any, ...]] = {
    "use_qk_l2norm_in_kernel": (False,),
    "use_gate_in_kernel": (False,),
    "A_log": (None,),
    "dt_bias": (None,),
    "use_beta_sigmoid_in_kernel": (False,),
    "allow_neg_eigval": (False,),
    "save_mode": ("light",),
    "boundary_mode": ("saved",),
    "save_transfer": (True,),
    "reuse_recompute_tapes": ("auto", False),
    "recompute_output": ("auto", "always"),
    "recompute_handle": (None,),
    "workspace": (None,),
}


@dataclass(frozen=True)
class Options:
    """What shapes the result of a call, or what is kept of it."""

    scale: float | None = None
    unit_keys: bool = True
    output_final_state: bool = False
    exchange: str = "all_to_all"
    segments: int | None = None
    backend: str = "auto"

    @classmethod
    def of(cls, **given: Any) -> "Options":
        """The options of a call, from its keywords.

        Raises:
            TypeError: an unknown keyword, a flag that is no bool, a scale that is no number.
            ValueError: a value that this release does not serve.
        """
        own = {field.name: given.pop(field.name) for field in fields(cls) if field.name in given}
        for name, value in given.items():
            if name not in SERVED:
                raise TypeError(f"unknown option {name!r}")
            if isinstance(value, Tensor) or not any(type(value) is type(x) and value == x for x in SERVED[name]):
                shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                served = " and ".join(map(repr, SERVED[name]))
                raise ValueError(f"{name}={shown} is not served by this release, which serves {served}")
        return cls(**own)

    def __post_init__(self) -> None:
        for name in ("unit_keys", "output_final_state"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        check_exchange(self.exchange)
        if self.segments is not None:
            as_int("segments", self.segments, minimum=1)
        if self.scale is not None and (isinstance(self.scale, bool) or not isinstance(self.scale, Real)):
            raise TypeError(f"scale must be a float or None, got {self.scale!r}")


def check_exchange(exchange: Any) -> None:
    """Raises ValueError unless `exchange` is the name of one."""
    if not isinstance(exchange, str) or exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {list(EXCHANGES)}, got {exchange!r}")


def check_segments(segments: int | None, part: Partition) -> None:
    """Raises ValueError if `segments` asks for more than the chunks of the longest fragment of any rank, or than 64."""
    chunks = -(-int(part.table.length.max(initial=0)) // CHUNK)
    most = max(1, min(MOST_SEGMENTS, chunks))
    if segments is not None and segments > most:
        raise ValueError(f"segments must be at most {most} (chunks of the longest fragment: {chunks}), got {segments}")
