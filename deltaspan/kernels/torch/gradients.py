"""The gradients of every chunk from the state at its start and the adjoint at its end.

With X = T^T dU and W = V - a (K S), and all decay ratios taken once:

    dv = dW = beta X        dbeta = <X, W - tril(E o K K^T, -1) U>, the token's own prediction error: no division by
    beta dP = scale E o (dO U^T)        Y = -E o tril(dW U^T, -1)
    x1 = scale a (dO S^T)        x2 = a (dW S^T)        x3 = r (U D^T)        kappa = <x3, k>
    dq = x1 + dP K        dk = x3 - x2 + dP^T Q + Y K + Y^T K
    M = tril(dP o P + Y o K K^T, -1)
    dG = rowsum M - colsum M + <x1, q> - <x2, k> - kappa,  and at the last row + sum kappa + gamma <D, S>
    dg = reverse running sum of dG
"""

import torch
from torch import Tensor

from deltaspan.kernels.torch.adjoint import Adjoint, Costates
from deltaspan.kernels.torch.chunks import full_precision, to_tokens
from deltaspan.kernels.torch.prep import LOWEST_DECAY
from deltaspan.kernels.torch.walk import States


@full_precision()
def gradients(adjoint: Adjoint, states: States, costates: Costates) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk [T, H, K] and dv [T, HV, V] in the operands' type, dg and dbeta [T, HV] in that of the states."""
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
    dG = M.sum(-1) - M.sum(-2) + (x1 * t.q).sum(-1) - (x2 * t.k).sum(-1) - kappa
    dG[..., -1] += kappa.sum(-1) + t.gamma[..., 0, 0] * (D * S).sum((-2, -1))
    dg = dG.flip(-1).cumsum(-1).flip(-1)

    q, k, v, g, beta = t.operands
    group = v.shape[1] // k.shape[1]
    dq, dk = (x.unflatten(1, (-1, group)).sum(2) for x in (dq, dk))
    dg, dbeta = (to_tokens(x, like, t.grid, x.dtype) for x, like in ((dg, g), (dbeta, beta)))
    return (
        to_tokens(dq, q, t.grid, q.dtype),
        to_tokens(dk, k, t.grid, k.dtype),
        to_tokens(dW, v, t.grid, v.dtype),
        torch.where(g < LOWEST_DECAY, 0, dg),
        dbeta,
    )
