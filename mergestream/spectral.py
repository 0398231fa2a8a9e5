"""The thin SVD of a state and OPCM's projections (design section 2; section 3 of the paper).

With S = U Σ Vᵀ of numerical rank k, q protected directions and dᵢ = uᵢᵀ Δ vᵢ:

    reference:  P(Δ) = Δ − U_q (U_qᵀ Δ V_q) V_qᵀ − Σ_{q<i≤k} dᵢ uᵢ vᵢᵀ
    paper:      P(Δ) = (I − U_q U_qᵀ) Δ (I − V_q V_qᵀ) − Σ_{q<i≤k} dᵢ uᵢ vᵢᵀ
    block:      P(Δ) = Δ − U_q (U_qᵀ Δ V_q) V_qᵀ
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Projection = Literal["reference", "paper", "block"]

# A singular value counts when it exceeds this share of the largest one. Rounding a state to float32 moves
# singular values by about 1e-7·σ₁, and what the Gram matrix in float64 resolves ends at 1e-8·σ₁: 1e-6 is
# safely above both. In float64 nothing is squared, and rounding noise is near 1e-16·√n.
RANK_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@dataclass(frozen=True)
class ThinSVD:
    """S ≈ u · diag(s) · vᵀ, k = the numerical rank of S: u is m×k, s is k (float64, descending), v is n×k."""

    u: Tensor
    s: Tensor
    v: Tensor

    @property
    def rank(self) -> int:
        return self.s.numel()


def thin_svd(matrix: Tensor) -> ThinSVD:
    """The singular triplets of a float32 or float64 matrix whose singular value is above rounding noise."""
    tolerance = RANK_TOLERANCE[matrix.dtype]
    if matrix.dtype == torch.float64:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        rank = _numerical_rank(s, tolerance)
        return ThinSVD(u[:, :rank], s[:rank], vh[:rank].T)
    if matrix.shape[0] < matrix.shape[1]:
        transposed = thin_svd(matrix.T)
        return ThinSVD(transposed.v, transposed.s, transposed.u)
    wide = matrix.double()
    eigenvalues, vectors = torch.linalg.eigh(wide.T @ wide)
    s = eigenvalues.flip(0).clamp_(min=0).sqrt_()
    rank = _numerical_rank(s, tolerance)
    s, v = s[:rank], vectors.flip(1)[:, :rank]
    return ThinSVD(((wide @ v) / s).to(matrix.dtype), s, v.to(matrix.dtype))


def protected_directions(s: Tensor, alpha: float) -> int:
    """q = r_α − 1, where r_α is the smallest r with σ₁ + … + σ_r ≥ α·Σσ."""
    if s.numel() == 0:
        return 0
    sums = s.cumsum(0)
    return int(torch.searchsorted(sums, alpha * sums[-1]))


def project(delta: Tensor, svd: ThinSVD, q: int, projection: Projection) -> Tensor:
    """P(Δ) for the state that ``svd`` decomposes, with ``q`` protected directions; in Δ's dtype."""
    u, v = svd.u, svd.v
    if projection == "block":
        u, v = u[:, :q], v[:, :q]
    left = u.T @ delta
    core = left[:q] @ v[:, :q]
    diagonal = torch.linalg.vecdot(left[q:], v[:, q:].T)
    removed = torch.empty_like(left)  # in the basis u
    removed[q:] = diagonal[:, None] * v[:, q:].T
    if projection == "paper":
        removed[:q] = left[:q]
        delta = delta - (delta @ v[:, :q] - u[:, :q] @ core) @ v[:, :q].T
    else:
        removed[:q] = core @ v[:, :q].T
    return torch.addmm(delta, u, removed, alpha=-1)


def _numerical_rank(s: Tensor, tolerance: float) -> int:
    return int((s > tolerance * s[:1]).sum())
