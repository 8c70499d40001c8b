"""What is made of a rank's operands for the stages on sm_90, and what of it is kept for the backward."""

from typing import NamedTuple

from torch import Tensor

from deltaspan.kernels.hopper.gluon import Tilings
from deltaspan.kernels.hopper.operands import as_read
from deltaspan.kernels.hopper.prep import Prepared
from deltaspan.kernels.stages import Grid, Raw
from deltaspan.plan import CHUNK


class Tape(NamedTuple):
    """A rank's operands in bf16, q and k ready or raw, and what prep made of them."""

    q: Tensor  # [T, H, 128]
    k: Tensor
    v: Tensor  # [T, HV, 128]
    g: Tensor  # [T, HV] in fp32 or bf16, ready or raw, and beta
    beta: Tensor
    made: Prepared
    grid: Grid
    scale: float
    raw: Raw
    tilings: Tilings  # of these tensors and of do


class Entered(NamedTuple):
    """From what the backward walks: what it reads of the states is made there."""

    entry: Tensor  # [E, HV, 128, 128] fp32
    ahead: list[Tensor] | None = None  # S of the first slab's chunks [NC, heads, V, K] bf16, until it is read


class Adjoint(NamedTuple):
    """A tape of ready q, k and beta with the output's gradient."""

    tape: Tape
    do: Tensor  # [T, HV, 128] bf16
    given: tuple[Tensor, ...]  # q, k, v, g and beta as they were given
    raw: Raw  # and how


def kept_tensors(l2norm: bool) -> int:
    """How many `keep` returns."""
    return 4 + l2norm


def keep(tape: Tape, states: Entered) -> tuple[Tensor, ...]:
    """What prep made."""
    return tape.made[: kept_tensors(tape.raw.l2norm)]  # there are lengths of raw q and k alone


def restore(
    kept: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, grid: Grid,
    *, scale: float, raw: Raw,
) -> tuple[Tape, None]:  # fmt: skip
    """The tape of which `keep` has told, with the operands and tables of the forward. States are walked again."""
    operands, raw = as_read(q, k, v, g, beta, raw)
    return Tape(*operands, Prepared(*kept), grid, scale, raw, Tilings()), None


def kept_bytes(chunks: int, *, H: int, HV: int, K: int, V: int, state_size: int, l2norm: bool) -> int:
    """Bytes of what `keep` returns: A, G and reach of value heads; of key heads, which keys are broken, and lengths."""
    return chunks * (HV * (2 * CHUNK * CHUNK + 4 * CHUNK + 4) + H * (4 + 8 * CHUNK * l2norm))
