"""The options of one call, checked before anything is launched."""

from dataclasses import dataclass, fields
from functools import lru_cache
from math import isfinite
from numbers import Real
from typing import Any

from torch import Tensor

from deltaspan.exchange import EXCHANGES
from deltaspan.layout import Partition
from deltaspan.layout.pack import as_int
from deltaspan.plan import CHUNK, MOST_SEGMENTS, Cut, count_of

CHOICES: dict[str, tuple[Any, ...]] = {
    "save_mode": ("light", "full"),
    "boundary_mode": ("saved", "replay"),
    "exchange": tuple(EXCHANGES),
    "reuse_recompute_tapes": ("auto", True, False),
    "recompute_output": ("auto", "always"),
}
RAW = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")


@dataclass(frozen=True)
class Options:
    """What shapes the result of a call, or what is kept of it."""

    scale: float | None = None
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    unit_keys: bool = True
    output_final_state: bool = False
    save_mode: str = "light"
    boundary_mode: str = "saved"
    save_transfer: bool = True
    exchange: str = "all_to_all"
    backend: str = "auto"
    segments: Cut | None = None
    reuse_recompute_tapes: str | bool = "auto"
    recompute_output: str = "auto"

    @classmethod
    def of(cls, **given: Any) -> "Options":
        """The options of a call, from its keywords.

        Raises:
            TypeError: an unknown keyword, a flag that is no bool, a scale that is no number.
            ValueError: a value that is none of those accepted, or one that another option excludes.
        """
        try:
            return _known(**given)
        except TypeError:  # of a value that cannot be hashed, or of one that is refused: once more, and told once
            pass
        return _made(**given)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):
                raise TypeError(f"{field.name} must be a bool, got {value!r}")
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.segments is not None:
            object.__setattr__(self, "segments", _cut(self.segments))
        if self.scale is not None:
            if isinstance(self.scale, bool) or not isinstance(self.scale, Real):
                raise TypeError(f"scale must be a float or None, got {self.scale!r}")
            if not isfinite(self.scale):
                raise ValueError(f"scale must be finite, got {self.scale!r}")
            object.__setattr__(self, "scale", float(self.scale))
        if self.allow_neg_eigval and not self.use_beta_sigmoid_in_kernel:
            raise ValueError(
                "allow_neg_eigval=True doubles the sigmoid of use_beta_sigmoid_in_kernel=True, which is False: give a "
                "beta in [0, 2] instead"
            )

    @property
    def keeps(self) -> bool:
        """Whether the forward keeps anything for the backward."""
        return self.boundary_mode == "saved"


MOST_SHARES = 1 << 20  # of all segments of a fragment: times its chunks they have to fit into 64 bits
KEYWORDS = {*(field.name for field in fields(Options)), "workspace"}


def _made(**given: Any) -> Options:
    if unknown := given.keys() - KEYWORDS:
        raise TypeError(f"unknown option {min(unknown)!r}")
    if (workspace := given.pop("workspace", None)) is not None:
        raise ValueError(f"workspace={workspace!r} is not served by this release, which serves None")
    return Options(**given)


_known = lru_cache(maxsize=256, typed=True)(_made)  # a model's layers call with the same few sets of options


def check_gate(options: Options, A_log: Tensor | None, dt_bias: Tensor | None) -> None:
    """Raises ValueError unless A_log and dt_bias are given where, and only where, g is raw."""
    if options.use_gate_in_kernel and A_log is None:
        raise ValueError("A_log must be given with use_gate_in_kernel=True, got None")
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
        if value is not None and not options.use_gate_in_kernel:
            raise ValueError(f"{name} belongs to use_gate_in_kernel=True, which is False: g is ready without it")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`, and of its type: 1 is not True."""
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}")


def check_segments(segments: Cut | None, part: Partition) -> None:
    """Raises ValueError if `segments` asks for more than the chunks of the longest fragment of any rank, or than 64."""
    if segments is None or segments == 1:
        return
    chunks = -(-part.longest // CHUNK)
    most = max(1, min(MOST_SEGMENTS, chunks))
    if count_of(segments) > most:
        raise ValueError(f"segments must be at most {most} (chunks of the longest fragment: {chunks}), got {segments}")


def _cut(segments: object) -> Cut:
    """As given: a count, or the relative lengths of segments."""
    if getattr(segments, "ndim", 0):
        raise TypeError(f"segments must be an integer or a tuple of such, got {type(segments).__name__}")
    if not isinstance(segments, list | tuple):
        return as_int("segments", segments, minimum=1)
    if not segments:
        raise ValueError("segments must be a count, or relative lengths such as (2, 1, 2); got none")
    shares = tuple(as_int(f"segments[{i}]", share, minimum=1) for i, share in enumerate(segments))
    if sum(shares) > MOST_SHARES:
        raise ValueError(f"segments must add up to at most {MOST_SHARES}, got {shares}: give a shorter ratio")
    return shares
