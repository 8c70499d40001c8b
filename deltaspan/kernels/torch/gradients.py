"""The gradients of every chunk from the state at its start and the adjoint at its end.

With X = T^T dU and W = V - a (K S), and all decay ratios taken once:

    dv = dW = beta X        dbeta = <X, W - tril(E o K K^T, -1) U>
    dP = scale E o (dO U^T)        Y = -E o tril(dW U^T, -1)
    x1 = scale a (dO S^T)        x2 = a (dW S^T)        x3 = r (U D^T)        kappa = <x3, k>
    dq = x1 + dP K        dk = x3 - x2 + dP^T Q + Y K + Y^T K
    M = tril(dP o P + Y o K K^T, -1)
    dg_j = sum_(i >= j) (<x1_i, q_i> - <x2_i, k_i>) + sum_(i < j) kappa_i + sum_(l < j <= i) M_il + gamma <D, S>

dbeta is an inner product with the token's own prediction error, so that nothing is divided by beta.

The decay g_j acts on what passes token j: from the chunk's start to a later token, from an earlier token to the chunk's
end, from an earlier to a later one, and from start to end. Summed so, and not as a running sum of dG (row sums minus
column sums of M, kappa taken off its row and added to the last), nothing large cancels where decay is strong.
"""

import torch
from torch import Tensor

from deltaspan.kernels.torch.adjoint import Adjoint, Costates
from deltaspan.kernels.torch.chunks import full_precision, to_tokens
from deltaspan.kernels.torch.inputs import raw_gradients
from deltaspan.kernels.torch.prep import LOWEST_DECAY
from deltaspan.kernels.torch.walk import States


@full_precision()
def gradients(adjoint: Adjoint, states: States, costates: Costates) -> tuple[Tensor | None, ...]:
    """dq, dk [T, H, K] and dv [T, HV, V] in the operands' type, dg and dbeta [T, HV] in that of the states, dA_log and
    ddt_bias [HV] like them or None."""
    t, (S, U), (D, dU) = adjoint.tape, states, costates
    X = t.solve.mT @ dU
    dW = t.beta * X
    error = t.v - t.a * (t.k @ S) - (t.decay * t.kk).tril(-1) @ U
    dbeta = (X * error).sum(-1)

    dP = t.scale * t.decay * (adjoint.do @ U.mT)
    Y = -(t.decay * (dW @ U.mT)).tril(-1)
    x1 = t.scale * t.a * (adjoint.do @ S.mT)
    x2 = t.a * (dW @ S.mT)
    x3 = t.r * (U @ D.mT)
    dq = x1 + dP @ t.k
    dk = x3 - x2 + dP.mT @ t.q + Y @ t.k + Y.mT @ t.k

    M = (dP * t.qk + Y * t.kk).tril(-1)
    kappa = (x3 * t.k).sum(-1)
    read = (x1 * t.q).sum(-1) - (x2 * t.k).sum(-1)
    dg = (
        read.flip(-1).cumsum(-1).flip(-1)
        + _sums_before(kappa)
        + _sums_before(M).tril().sum(-2)
        + (t.gamma * (D * S).sum((-2, -1), keepdim=True))[..., 0]
    )

    q, k, v, *_ = t.operands
    group = v.shape[1] // k.shape[1]
    dq, dk = (x.unflatten(1, (-1, group)).sum(2) for x in (dq, dk))
    dq, dk, dg, dbeta = (to_tokens(x, v, t.grid, x.dtype) for x in (dq, dk, dg, dbeta))
    dg = torch.where(t.g < LOWEST_DECAY, 0, dg)
    dq, dk, dg, dbeta, dA_log, ddt_bias = raw_gradients(t.operands, t.raw, dq, dk, dg, dbeta, t.grid.tokens)
    return dq.to(q.dtype), dk.to(k.dtype), to_tokens(dW, v, t.grid, v.dtype), dg, dbeta, dA_log, ddt_bias


def _sums_before(x: Tensor) -> Tensor:
    """Along the last axis, for each element the sum of those before it."""
    return torch.nn.functional.pad(x.cumsum(-1), (1, 0))[..., :-1]
