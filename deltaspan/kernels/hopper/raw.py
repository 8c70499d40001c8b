"""Raw operands made ready within a kernel's registers, as `kernels/torch/inputs.py` makes them ready by whole tensors.

    gate            -exp(A_log) softplus(x),  softplus(x) = max(x, 0) + log1p(e^-|x|)
    sigmoid         largest / (1 + e^-x)
    inverse length  1 / sqrt(|x|^2 + 1e-6)

In fp32 by the device's approximate exponential, reciprocal and root, each right to 2 units in the last place. Its
logarithm is not: near 1 it is right to 2^-22 of 1, where g = -1e-5 needs as much of itself. So log1p is an odd series.
"""

from deltaspan.kernels.hopper.gluon import gl, gluon
from deltaspan.kernels.hopper.instructions import exp2, reciprocal

LOG2_E = gl.constexpr(1.4426950408889634)
EPSILON = gl.constexpr(1e-6)  # flash-linear-attention's


@gluon.jit
def gate(x, A_log):
    """Where x <= 0 by one exponential of a sum, so that neither factor overflows or vanishes by itself."""
    t = exp2(gl.abs(x) * -LOG2_E)
    inverse = reciprocal(t + 2.0)
    s = t * inverse  # log1p(t) = 2 artanh(s), s <= 1/3
    z = s * s
    # artanh(s) / s to 2^-29: the last term stands for all that follow 1/11
    series = (((((0.0852 * z + 1 / 11) * z + 1 / 9) * z + 1 / 7) * z + 1 / 5) * z + 1 / 3) * z + 1.0
    share = 2.0 * inverse * series  # log1p(t) / t
    outside = A_log + gl.where(x < 0.0, x, 0.0)
    return -exp2(outside * LOG2_E) * gl.where(x > 0.0, x + t * share, share)


@gluon.jit
def sigmoid(x, largest: gl.constexpr):
    return largest * reciprocal(1.0 + exp2(x * -LOG2_E))


@gluon.jit
def inverse_length(squares):
    """Of a row whose squares sum to this."""
    return gl.rsqrt(squares + EPSILON)
