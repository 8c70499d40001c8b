"""How far from the truth a result may be, and why.

u is the unit roundoff of the arithmetic: 2^-53 beside float64 operands, else 2^-24, since bf16 operands are raised to
FP32. The oracle takes the operands as they are, rounded once by whoever made them, so only two things remain:

The arithmetic. A result has gone through fewer than 2^17 roundings: 1,100 tokens, each in products of 64 rows. They add
like a random walk, to less than 2^8.5 u of its size; 2^8 u holds with room, since most of the walk decays. One place by
itself may be 16 times worse: the largest of 10^5 nearly normal draws lies at 4.5 sigma, and what it is measured against
may be a fourth of what surrounds it. In float64, 2^12 u is 5e-13: the project's 1e-10 leaves 200 times that.

The rounding of results in bf16, to 8 significant bits: at most 2^-8 of every element, hence of every RMS.

More ranks than one add no error but for what crosses seams, a product with M and a sum more at each. Through the 15
seams of a document on 8 zigzag ranks that walks to 15^(1/2) 2 u, or 8 u of RMS. The worst of all elements is where keys
are nearly collinear, and every order of additions draws its error anew: a fourth of its bound, 2^10 u, may be chance.
Beyond that 1.1 and 1.5 times the error of one rank are promised. (Both are small beside bf16's rounding.)
"""

from typing import NamedTuple

import torch

from deltaspan.verify.cases import DTYPES

ROUNDED = ("o", "dq", "dk", "dv", "y", "dx")
"""Results in the operands' type; all others have that of the states."""

FLOAT64_BOUND = 1e-10
ELEMENT_BOUND = 2e-2  # what the project promises of every element in any type; the bounds here are tighter
WALK = 2.0**8
ONE_PLACE = 16.0
BF16_ROUNDING = 2.0**-8


class Ratio(NamedTuple):
    times: float
    plus_roundings: float


RANKS_TO_ONE = {"tensor": Ratio(1.1, 8.0), "element": Ratio(1.5, 2.0**10)}


def arithmetic(dtype: str) -> torch.finfo:
    """Of sums and states."""
    return torch.finfo(torch.promote_types(DTYPES[dtype], torch.float32))


def roundoff(dtype: str) -> float:
    return arithmetic(dtype).eps / 2


def smallest(dtype: str) -> float:
    """What errors are measured against at least: so much that an underflow is within every bound."""
    return arithmetic(dtype).tiny / roundoff(dtype)


def bound(dtype: str, tensor: str, measure: str) -> float:
    if dtype == "float64":
        return FLOAT64_BOUND
    walked = WALK * roundoff(dtype) * (1 if measure == "tensor" else ONE_PLACE)
    rounded = BF16_ROUNDING if dtype == "bfloat16" and tensor in ROUNDED else 0.0
    return min(walked + rounded, ELEMENT_BOUND)
