"""The thin SVD of a matrix, dense or in factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from mergestream.algebra.lowrank import Basis, LowRank, Value
from mergestream.algebra.pieces import is_finite
from mergestream.algebra.products import gram, multiply
from mergestream.algebra.symmetric import leading_eigenvectors
from mergestream.sizes import CACHE_LINE

# A singular value counts when it exceeds this share of the largest one. Rounding a state to float32 moves its
# singular values by about 1e-8·σ₁, and a Gram matrix in float64 resolves as much: at 1e-5·σ₁ a pair of singular
# vectors is still a property of the matrix, to three digits. In float64 nothing is squared.
RANK_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

# Below this share of σ₁, S·v is computed in float64: in float32 it errs by 1e-7·σ₁, which is too much of σᵢ.
SMALL_SINGULAR_VALUE = 3e-4

# Squares of entries between 2^-30 and 2^30 can be summed in float32, and their inverses are numbers too.
_SAFE_EXPONENT = 30


@dataclass(frozen=True)
class ThinSVD:
    """S ≈ u · diag(s) · vᵀ, k = the numerical rank of S: u is m×k, s is k (float64, descending), v is n×k.

    Where only the leading vectors were asked for, u and v have fewer columns."""

    u: Tensor
    s: Tensor
    v: Tensor

    @property
    def rank(self) -> int:
        return self.s.numel()

    def transposed(self) -> ThinSVD:
        return ThinSVD(self.v, self.s, self.u)

    def times(self, factor: float) -> ThinSVD:
        return self if factor == 1 else ThinSVD(self.u, self.s * factor, self.v)


@dataclass(frozen=True)
class FactoredSVD:
    """The thin SVD of S = Lᵀ C R, with singular vectors as coordinates: those of the core C."""

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


Leading = Callable[[Tensor], int] | int
"""How many pairs of singular vectors are needed: a number, or a function of the singular values"""


@overload
def thin_svd(matrix: Tensor, leading: Leading | None = ...) -> ThinSVD: ...
@overload
def thin_svd(matrix: LowRank, leading: Leading | None = ...) -> FactoredSVD: ...
def thin_svd(matrix: Value, leading: Leading | None = None) -> ThinSVD | FactoredSVD:
    """The singular triplets of a float32 or float64 matrix whose singular value is above rounding noise."""
    if isinstance(matrix, Tensor) and matrix.data_ptr() % CACHE_LINE:
        matrix = matrix.clone()  # BLAS rounds small products by where they lie; a store may keep this one anywhere
    values, exponent = moderate(matrix.core if isinstance(matrix, LowRank) else matrix)
    svd = exact_svd(values, leading, matrix.dtype).times(2.0**exponent)
    return FactoredSVD(matrix.left, svd, matrix.right) if isinstance(matrix, LowRank) else svd


def moderate(matrix: Tensor) -> tuple[Tensor, int]:
    """The matrix divided by a power of two, and the exponent; 0 unless entries are too large or too small to square."""
    if not is_finite(matrix):
        raise OverflowError("a matrix holds NaN or Inf")
    largest = max(abs(float(extreme)) for extreme in matrix.aminmax()) if matrix.numel() else 0.0
    exponent = math.frexp(largest)[1]
    if abs(exponent) <= _SAFE_EXPONENT:
        return matrix, 0
    most = math.frexp(torch.finfo(matrix.dtype).max)[1] - 2  # the power itself must be a number of this type
    exponent = max(-most, min(exponent, most))
    return matrix * 2.0**-exponent, exponent


def exact_svd(matrix: Tensor, leading: Leading | None, dtype: torch.dtype | None = None) -> ThinSVD:
    """The thin SVD of a moderate matrix whose entries are as precise as ``dtype`` (by default its own).

    For float32: SᵀS = V Σ² Vᵀ in float64 (SSᵀ for a wide S), then U = S V Σ⁻¹. The Gram matrix squares the condition,
    hence float64; V and U are good enough in the matrix's own dtype. Where uᵢ loses orthogonality because σᵢ is small,
    ⟨P(Δ), S⟩ = 0 still holds: with uᵢ = S vᵢ / σᵢ the removed diagonal is Σ dᵢ uᵢᵀ S vᵢ = Σ (S vᵢ)ᵀ Δ vᵢ = ⟨Δ, S⟩ for
    any orthonormal V.
    """
    tolerance = RANK_TOLERANCE[dtype or matrix.dtype]

    def wanted(s: Tensor) -> int:
        return len(s) if leading is None else leading(s) if callable(leading) else min(leading, len(s))

    if (dtype or matrix.dtype) == torch.float64:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        s = s[: numerical_rank(s, tolerance)]
        return ThinSVD(u[:, : wanted(s)], s, vh[: wanted(s)].T)
    if matrix.shape[0] < matrix.shape[1]:
        return exact_svd(matrix.T, leading, dtype).transposed()
    few = None if leading is None else lambda squares: wanted(squares.sqrt())
    squares, v = leading_eigenvectors(gram(matrix), few, matrix.dtype, tolerance**2)
    s, count = squares.sqrt(), v.shape[1]
    u = multiply(matrix, (v / s[:count]).to(matrix.dtype))
    large = numerical_rank(s[:count], SMALL_SINGULAR_VALUE)
    if large < count:
        u[:, large:] = matrix.double() @ (v[:, large:] / s[large:count])
    return ThinSVD(u, s, v)


def numerical_rank(s: Tensor, tolerance: float) -> int:
    return int((s > tolerance * s[:1]).sum())
