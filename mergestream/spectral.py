"""The thin SVD of a state and OPCM's projections (design section 2; section 3 of the paper).

With S = U Σ Vᵀ of numerical rank k, q protected directions and dᵢ = uᵢᵀ Δ vᵢ:

    reference:  P(Δ) = Δ − U_q (U_qᵀ Δ V_q) V_qᵀ − Σ_{q<i≤k} dᵢ uᵢ vᵢᵀ
    paper:      P(Δ) = (I − U_q U_qᵀ) Δ (I − V_q V_qᵀ) − Σ_{q<i≤k} dᵢ uᵢ vᵢᵀ
    block:      P(Δ) = Δ − U_q (U_qᵀ Δ V_q) V_qᵀ

Where S and Δ are of low rank (design section 3), all of it happens in coordinates: in orthonormal bases that
span both, S, Δ and P(Δ) are small matrices, and the formulas are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from mergestream.lowrank import Basis, LowRank, Value, dense

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


@dataclass(frozen=True)
class FactoredSVD:
    """The same of S = Lᵀ C R, the singular vectors given by their coordinates: those of the core C."""

    left: Basis
    coordinates: ThinSVD
    right: Basis

    @property
    def s(self) -> Tensor:
        return self.coordinates.s

    @property
    def rank(self) -> int:
        return self.coordinates.rank

    def dense(self) -> ThinSVD:
        u, v = self.left.combine(self.coordinates.u.T).T, self.right.combine(self.coordinates.v.T).T
        return ThinSVD(u.to(self.left.dtype), self.s, v.to(self.right.dtype))


@overload
def thin_svd(matrix: Tensor) -> ThinSVD: ...
@overload
def thin_svd(matrix: LowRank) -> FactoredSVD: ...
def thin_svd(matrix: Value) -> ThinSVD | FactoredSVD:
    """The singular triplets of a float32 or float64 matrix whose singular value is above rounding noise."""
    tolerance = RANK_TOLERANCE[matrix.dtype]
    if isinstance(matrix, LowRank):
        decompose = _direct_svd if matrix.dtype == torch.float64 else _gram_svd
        return FactoredSVD(matrix.left, decompose(matrix.core, tolerance), matrix.right)
    if matrix.dtype == torch.float64:
        return _direct_svd(matrix, tolerance)
    svd = _gram_svd(matrix.double(), tolerance)
    return ThinSVD(svd.u.to(matrix.dtype), svd.s, svd.v.to(matrix.dtype))


def protected_directions(s: Tensor, alpha: float) -> int:
    """q = r_α − 1, where r_α is the smallest r with σ₁ + … + σ_r ≥ α·Σσ."""
    if s.numel() == 0:
        return 0
    sums = s.cumsum(0)
    return int(torch.searchsorted(sums, alpha * sums[-1]))


@overload
def project(delta: Tensor, svd: ThinSVD | FactoredSVD, q: int, projection: Projection) -> Tensor: ...
@overload
def project(delta: Value, svd: ThinSVD, q: int, projection: Projection) -> Tensor: ...
@overload
def project(delta: LowRank, svd: FactoredSVD, q: int, projection: Projection) -> LowRank: ...
def project(delta: Value, svd: ThinSVD | FactoredSVD, q: int, projection: Projection) -> Value:
    """P(Δ) for the state that ``svd`` decomposes, with ``q`` protected directions; in Δ's dtype.

    It is of low rank where both the state and Δ are, in bases that start with those of the state.
    """
    if isinstance(svd, FactoredSVD):
        if isinstance(delta, LowRank):
            return _project_factors(delta, svd, q, projection)
        svd = svd.dense()
    return _project_dense(dense(delta), svd, q, projection)


def _project_factors(delta: LowRank, svd: FactoredSVD, q: int, projection: Projection) -> LowRank:
    delta = delta.rebased(svd.left, svd.right)
    u = pad(svd.coordinates.u, (0, 0, 0, delta.left.rank - svd.left.rank))
    v = pad(svd.coordinates.v, (0, 0, 0, delta.right.rank - svd.right.rank))
    core = _project_dense(delta.core, ThinSVD(u, svd.s, v), q, projection)
    return LowRank(delta.shape, delta.left, core, delta.right)


def _project_dense(delta: Tensor, svd: ThinSVD, q: int, projection: Projection) -> Tensor:
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


def _direct_svd(matrix: Tensor, tolerance: float) -> ThinSVD:
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    rank = _numerical_rank(s, tolerance)
    return ThinSVD(u[:, :rank], s[:rank], vh[:rank].T)


def _gram_svd(matrix: Tensor, tolerance: float) -> ThinSVD:
    """By the Gram matrix of the smaller side: for a float64 matrix with entries no better than float32."""
    if matrix.shape[0] < matrix.shape[1]:
        transposed = _gram_svd(matrix.T, tolerance)
        return ThinSVD(transposed.v, transposed.s, transposed.u)
    eigenvalues, vectors = torch.linalg.eigh(matrix.T @ matrix)
    s = eigenvalues.flip(0).clamp_(min=0).sqrt_()
    rank = _numerical_rank(s, tolerance)
    s, v = s[:rank], vectors.flip(1)[:, :rank]
    return ThinSVD((matrix @ v) / s, s, v)


def _numerical_rank(s: Tensor, tolerance: float) -> int:
    return int((s > tolerance * s[:1]).sum())
