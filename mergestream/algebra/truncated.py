"""The leading singular triplets of a matrix: exact where that is cheap, from a random start where it is not.

The random way is the subspace iteration of Halko, Martinsson and Tropp, "Finding structure with randomness" (SIAM
Review 53, 2011): multiply a Gaussian block of somewhat more columns than are wanted by SᵀS until it leans on the
leading singular vectors, and decompose S within its span. Of polynomials in SᵀS those of Chebyshev get there soonest,
by the same argument as for block Krylov spaces in Musco and Musco, "Randomized block Krylov methods" (NIPS 2015). A
block Krylov space of n/8 directions would soon be as large as the matrix. So the block is filtered instead: after
every second product by T₂, which keeps small what lies below the block and lets grow what lies above (Zhou and
"Chebyshev-filtered subspace iteration", 2006). That needs half as many products as powers do (docs/notes/performance.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from mergestream.algebra.svd import ThinSVD, gram, thin_svd
from mergestream.sizes import CACHE_LINE

Method = Literal["auto", "exact", "randomised"]

# Share of the energy Σσ² of the exact triplets that the randomised ones are allowed to miss, by estimate. The estimate
# was up to three times too low at the second look at a spectrum, but what follows it gains more than that.
MISSED_ENERGY = 5e-4

# The block is wider than the rank by a quarter: half as much takes two more products on most spectra.
_OVERSAMPLING = 4
_LEAST_OVERSAMPLING = 8
_MOST_FILTERS = 10  # Gaussian matrices, for which it takes longest, need 3 (square) to 7 (16 times as long as wide)
_USUAL_PRODUCTS = 5  # with SᵀS, on task vectors: one to start with, and two filters

# Squares of entries between 2^-30 and 2^30 can be summed in float32.
_SAFE_EXPONENT = 30


def truncated_svd(matrix: Tensor, rank: int, method: Method = "auto") -> ThinSVD:
    """The leading ``rank`` singular triplets of a float32 or float64 matrix; fewer where its numerical rank is lower.

    ``exact`` is `thin_svd` for these vectors alone. ``randomised`` captures their energy but for a thousandth, and its
    singular vectors are orthonormal. ``auto`` takes whichever is cheaper. The same matrix gives the same bits.
    """
    if not matrix.is_contiguous() or matrix.data_ptr() % CACHE_LINE:
        matrix = matrix.clone(memory_format=torch.contiguous_format)  # BLAS rounds by how and where a matrix lies
    exponent = _excess_exponent(matrix)
    if exponent:
        matrix = matrix * 2.0**-exponent
    if matrix.shape[0] < matrix.shape[1]:
        svd = _tall_svd(matrix.T, rank, method).transposed()
    else:
        svd = _tall_svd(matrix, rank, method)
    return ThinSVD(svd.u, svd.s * 2.0**exponent, svd.v) if exponent else svd


def _tall_svd(matrix: Tensor, rank: int, method: Method) -> ThinSVD:
    width = rank + max(rank // _OVERSAMPLING, _LEAST_OVERSAMPLING)
    randomised = _randomised_is_cheaper(width, matrix.shape[1]) if method == "auto" else method == "randomised"
    if not randomised or not 0 < rank < width < matrix.shape[1] or not matrix.any():
        return _leading(matrix, rank)
    subspace = _leading_subspace(matrix, rank, width)
    svd = _leading(matrix @ subspace, rank)
    return ThinSVD(svd.u, svd.s, subspace @ svd.v)


def _randomised_is_cheaper(width: int, columns: int) -> bool:
    return columns >= 384 and width <= columns // 4


def _leading(matrix: Tensor, rank: int) -> ThinSVD:
    svd = thin_svd(matrix, leading=lambda s: min(rank, len(s)))
    return ThinSVD(svd.u, svd.s[: svd.u.shape[1]], svd.v)


def _leading_subspace(matrix: Tensor, rank: int, width: int) -> Tensor:
    """An orthonormal basis (n×width) of a space that holds the leading right singular vectors, but for a little."""
    times_gram = _multiply_by_gram(matrix, width)
    noise = 8 * torch.finfo(matrix.dtype).eps  # what lies below this share of σ₁², the Gram matrix does not know
    start = torch.randn(matrix.shape[1], width, generator=torch.Generator().manual_seed(0))
    x = torch.linalg.qr(times_gram(start.to(matrix))).Q
    captured = -math.inf
    for _ in range(_MOST_FILTERS):
        y = times_gram(x)
        ritz = torch.linalg.eigvalsh((x.T @ y).double()).flip(0)
        before, captured = captured, float(ritz[:rank].sum())
        cut = max(float(ritz[-1]), noise * float(ritz[0]))
        first = y.mul_(2 / cut).sub_(x)  # T₁ maps [0, cut] onto [-1, 1]
        # A filter divides what is missed by the square of its growth at the last wanted value: a geometric series.
        growth = _chebyshev_2(2 * float(ritz[rank - 1]) / cut - 1)
        if captured - before <= MISSED_ENERGY * captured * max(growth**2 - 1, 0.1):
            return torch.linalg.qr(first).Q  # the product is there: half a filter more
        second = times_gram(first).mul_(4 / cut).sub_(first, alpha=2).sub_(x)  # T₂ = 2·T₁² - 1
        x = torch.linalg.qr(second).Q
    return x


def _chebyshev_2(x: float) -> float:
    return 2 * x * x - 1


def _multiply_by_gram(matrix: Tensor, width: int) -> Callable[[Tensor], Tensor]:
    """x ↦ SᵀS x: with the Gram matrix where that pays, as it does for an eighth of the directions."""
    m, n = matrix.shape
    if m * n + 2 * _USUAL_PRODUCTS * n * width > 4 * _USUAL_PRODUCTS * m * width:
        return lambda x: matrix.T @ (matrix @ x)
    squared = gram(matrix, matrix.dtype)
    return lambda x: squared @ x


def _excess_exponent(matrix: Tensor) -> int:
    """Of the power of two that brings entries into the range in which they can be squared; 0 if they are there."""
    least, most = matrix.aminmax()
    exponent = math.frexp(max(-float(least), float(most)))[1]
    if abs(exponent) <= _SAFE_EXPONENT:
        return 0
    largest = math.frexp(torch.finfo(matrix.dtype).max)[1] - 2
    return max(-largest, min(exponent, largest))
