"""What one chunk does without knowing the state that enters it.

With G the running sum of g within the chunk, a = e^G, r = e^(G_C - G), gamma = e^(G_C), E_ij = e^(G_i - G_j) for i >=
j:

    T = (I + tril(beta E o K K^T, -1))^-1        U = T (beta (V - a K S)) = u - w S
    u = T (beta V)        w = T (beta a K)       S <- gamma S + (r K)^T U

Under `unit_keys` T is E o N with the decay-free inverse N = (I + tril(beta K K^T, -1))^-1, the same matrix: entries of
N stay bounded for |k| <= 1 and beta <= 2. (Yang et al. 2024, arXiv:2412.06464, in the form of the gated delta rule's WY
representation.)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltaspan.kernels.stages import READY, Grid, Raw, Runs
from deltaspan.kernels.torch.chunks import full_precision, to_chunks
from deltaspan.kernels.torch.inputs import ready

LOWEST_DECAY = -1000.0  # exp of it is zero in FP64 too; finite, so that differences of running sums are
LONGEST_KEY = 1.03  # |k|^2 of a unit key rounded to bf16 or fp16 stays below 1.01


class Tape(NamedTuple):
    """The chunks of one rank, [NC, HV, 64, ...] unless said otherwise, in the type of the states."""

    operands: tuple[Tensor, ...]  # q, k, v, g, beta as given
    raw: Raw  # how they are given
    g: Tensor  # [T, HV], ready
    grid: Grid
    scale: float
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor  # [NC, HV, 64, 1]
    a: Tensor  # [NC, HV, 64, 1]
    broken: Tensor  # [NC, HV, 64, 1] bool, from the first key on that breaks the promise of unit keys
    r: Tensor  # [NC, HV, 64, 1]
    gamma: Tensor  # [NC, HV, 1, 1]
    decay: Tensor  # E [NC, HV, 64, 64]
    kk: Tensor  # K K^T [NC, HV, 64, 64]
    qk: Tensor  # tril(Q K^T) [NC, HV, 64, 64]
    solve: Tensor  # T [NC, HV, 64, 64]
    read: Tensor  # scale a Q
    u: Tensor
    w: Tensor
    rk: Tensor  # r K


@full_precision()
def prep(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, grid: Grid, *, scale: float,
    unit_keys: bool, raw: Raw = READY, only: tuple[Runs, Runs] | None = None,
) -> Tape:  # fmt: skip
    """Prepares every chunk; q, k [T, H, K], v [T, HV, V], g and beta [T, HV], ready or raw."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = v.shape[1] // k.shape[1]
    operands = q, k, v, g, beta
    q, k, g, beta = ready(q, k, g, beta, raw, dtype)
    qc, kc = (to_chunks(x, grid, dtype) for x in (q, k))
    kk, qk = kc @ kc.mT, (qc @ kc.mT).tril()
    broken = (kk.diagonal(dim1=-2, dim2=-1) > LONGEST_KEY) & unit_keys
    qc, kc, kk, qk, broken = (x.repeat_interleave(group, dim=1) for x in (qc, kc, kk, qk, broken))
    vc, bc = to_chunks(v, grid, dtype), to_chunks(beta, grid, dtype)[..., None]

    # The running sum reaches 64 x 1000, where FP32 steps by 0.004: it is taken in FP64, its differences are rounded.
    G = to_chunks(g, grid, torch.float64).clamp(min=LOWEST_DECAY).cumsum(-1)[..., None]
    lower = torch.ones(G.shape[-2], G.shape[-2], dtype=torch.bool, device=G.device).tril()
    decay = torch.where(lower, G - G.mT, -torch.inf).exp().to(dtype)
    a, r, gamma = (x.exp().to(dtype) for x in (G, G[..., -1:, :] - G, G[..., -1:, :]))

    strict = (bc * kk).tril(-1)
    identity = torch.eye(G.shape[-2], dtype=dtype, device=G.device).expand_as(strict)
    system = identity + (strict if unit_keys else strict * decay)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    solve = inverse * decay if unit_keys else inverse

    # A broken promise is made loud from its row on: in what reads the state there and in the state that leaves the
    # chunk, but not in T, where a product with its zeros would carry NaN back to the rows before.
    broken = broken.cumsum(-1)[..., None] > 0
    read = torch.where(broken, torch.nan, scale * a * qc)
    gamma = torch.where(broken[..., -1:, :], torch.nan, gamma)

    return Tape(
        operands=operands,
        raw=raw,
        g=g,
        grid=grid,
        scale=scale,
        q=qc,
        k=kc,
        v=vc,
        beta=bc,
        a=a,
        broken=broken,
        r=r,
        gamma=gamma,
        decay=decay,
        kk=kk,
        qk=qk,
        solve=solve,
        read=read,
        u=solve @ (bc * vc),
        w=solve @ (bc * a * kc),
        rk=r * kc,
    )
