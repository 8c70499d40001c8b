"""Operands as they come from a model's projections, made ready for the recurrence; and the gradients back to them.

    l2norm      q, k <- x / sqrt(|x|^2 + 1e-6), a row of zeros staying one
    gate        g <- -exp(A_log) softplus(g + dt_bias)
    sigmoid     beta <- sigmoid(beta), or twice that (negative eigenvalues)

The conventions of flash-linear-attention. All arithmetic is in the type of the states, and nothing is rounded between.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from deltaspan.kernels.stages import Raw
from deltaspan.kernels.torch.chunks import whole_chunks

EPSILON = 1e-6  # flash-linear-attention's
NEARLY_EXP = -30.0  # below it log softplus(x) is x up to e^x / 2, which FP64 does not show


def ready(q: Tensor, k: Tensor, g: Tensor, beta: Tensor, raw: Raw, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, g and beta as the recurrence takes them, in `dtype` where they are changed."""
    if raw.l2norm:
        q, k = (_rows(x, dtype) * _inverse_length(_rows(x, dtype)) for x in (q, k))
    if raw.A_log is not None:
        g = _gate(_biased(g, raw, dtype), raw.A_log.to(dtype))[: len(g)]
    if raw.sigmoid:
        beta = raw.largest_beta * whole_chunks(beta.to(dtype)).sigmoid()[: len(beta)]
    return q, k, g, beta


def raw_gradients(
    operands: tuple[Tensor, ...], raw: Raw, dq: Tensor, dk: Tensor, dg: Tensor, dbeta: Tensor, tokens: int
) -> tuple[Tensor | None, ...]:
    """From the gradients of ready operands to those of the given ones, and of A_log and dt_bias [HV].

    tokens: those that a fragment holds; what stands behind them in a padded buffer is not read.
    """
    q, k, _, g, beta = operands
    dA_log = ddt_bias = None
    if raw.l2norm:
        dq[:tokens], dk[:tokens] = (_l2norm_gradient(x[:tokens], dx[:tokens]) for x, dx in ((q, dq), (k, dk)))
    if raw.A_log is not None:
        dg[:tokens], dA_log, ddt_bias = _gate_gradients(g[:tokens], dg[:tokens], raw)
    if raw.sigmoid:
        s = whole_chunks(beta[:tokens].to(dbeta.dtype)).sigmoid()[:tokens]
        dbeta[:tokens] *= raw.largest_beta * s * (1 - s)
    return dq, dk, dg, dbeta, dA_log, ddt_bias


def _l2norm_gradient(x: Tensor, dready: Tensor) -> Tensor:
    x = _rows(x, dready.dtype)
    r = _inverse_length(x)
    y = x * r
    return r * (dready - y * (dready * y).sum(-1, keepdim=True))


def _gate_gradients(g: Tensor, dready: Tensor, raw: Raw) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of g [T, HV], A_log and dt_bias. Where the ready g is below -1000 its gradient is zero, and so are these."""
    x, A_log = _biased(g, raw, dready.dtype), raw.A_log.to(dready.dtype)
    slope, gate = (factor[: len(g)] for factor in ((A_log + logsigmoid(x)).exp(), _gate(x, A_log)))
    dg, dlog = (torch.where(dready == 0, 0, dready * factor) for factor in (-slope, gate))
    return dg, dlog.sum(0), None if raw.dt_bias is None else dg.sum(0)


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [T, H, K] in `dtype` and in its own order: sums over channels follow the order of memory."""
    return x.to(dtype).contiguous()


def _inverse_length(x: Tensor) -> Tensor:
    return (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


def _biased(g: Tensor, raw: Raw, dtype: torch.dtype) -> Tensor:
    """g + dt_bias over whole chunks, [64 n, HV]."""
    g = whole_chunks(g.to(dtype))
    return g if raw.dt_bias is None else g + raw.dt_bias.to(dtype)


def _gate(x: Tensor, A_log: Tensor) -> Tensor:
    """-exp(A_log) softplus(x) by one exponential of a sum, so that neither factor overflows or vanishes by itself."""
    softplus = torch.logaddexp(x.clamp(min=NEARLY_EXP), x.new_zeros(()))
    log_softplus = torch.where(x < NEARLY_EXP, x, softplus.log())
    return -(A_log + log_softplus).exp()
