"""OPCM's projections (design section 2; section 3 of the paper).

With S = U Σ Vᵀ of numerical rank k, q protected directions and dᵢ = uᵢᵀ Δ vᵢ:

    reference:  P(Δ) = Δ − U_q (U_qᵀ Δ V_q) V_qᵀ − Σ_{q<i≤k} dᵢ uᵢ vᵢᵀ
    paper:      P(Δ) = (I − U_q U_qᵀ) Δ (I − V_q V_qᵀ) − Σ_{q<i≤k} dᵢ uᵢ vᵢᵀ
    block:      P(Δ) = Δ − U_q (U_qᵀ Δ V_q) V_qᵀ

Where S and Δ are of low rank (design section 3), all of it happens in coordinates: in orthonormal bases that
span both, S, Δ and P(Δ) are small matrices, and the formulas are the same.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mergestream.algebra.lowrank import LowRank, Value, dense
from mergestream.algebra.products import multiply
from mergestream.algebra.svd import FactoredSVD, ThinSVD

Projection = Literal["reference", "paper", "block"]


def protected_directions(s: Tensor, alpha: float) -> int:
    """q = r_α − 1, where r_α is the smallest r with σ₁ + … + σ_r ≥ α·Σσ."""
    if s.numel() == 0:
        return 0
    sums = s.cumsum(0)
    return int(torch.searchsorted(sums, alpha * sums[-1]))


def project(delta: Value, svd: ThinSVD | FactoredSVD, q: int, projection: Projection) -> Value:
    """P(Δ) for the state that ``svd`` decomposes, with ``q`` protected directions; in Δ's dtype.

    It is of low rank where both the state and Δ are, in bases that start with those of the state.
    """
    if isinstance(svd, ThinSVD) or isinstance(delta, Tensor):
        return project_dense(dense(delta), svd if isinstance(svd, ThinSVD) else svd.dense(), q, projection)
    delta = delta.rebased(svd.left, svd.right)
    u = pad(svd.coordinates.u, (0, 0, 0, delta.left.rank - svd.left.rank))
    v = pad(svd.coordinates.v, (0, 0, 0, delta.right.rank - svd.right.rank))
    core = project_dense(delta.core, ThinSVD(u, svd.s, v), q, projection)
    return LowRank(delta.shape, delta.left, core, delta.right)


def project_dense(delta: Tensor, svd: ThinSVD, q: int, projection: Projection) -> Tensor:
    """P(Δ) of a dense Δ and a dense state."""
    if delta.shape[0] < delta.shape[1]:  # so that the rows below are the shorter ones
        return project_dense(delta.T, svd.transposed(), q, projection).T
    u, v = svd.u, svd.v
    if projection == "block":
        u, v = u[:, :q], v[:, :q]
    rows = multiply(u.T, delta)  # first Δ, then what is removed from it, in the basis u
    core = rows[:q] @ v[:, :q]
    diagonal = torch.linalg.vecdot(rows[q:], v[:, q:].T)
    torch.mul(diagonal[:, None], v[:, q:].T, out=rows[q:])
    if projection == "paper":
        delta = delta - (delta @ v[:, :q] - u[:, :q] @ core) @ v[:, :q].T
    else:
        torch.mm(core, v[:, :q].T, out=rows[:q])
    return delta - multiply(u, rows)
