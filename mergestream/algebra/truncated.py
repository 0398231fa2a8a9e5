"""The leading singular triplets of a matrix: exact where that is cheap, from a random start where it is not.

The random way is the subspace iteration of Halko, Martinsson and Tropp, "Finding structure with randomness" (SIAM
Review 53, 2011): multiply a Gaussian block of somewhat more columns than are wanted by SᵀS until it leans on the
leading singular vectors, and decompose S within its span. Of all polynomials in SᵀS, Chebyshev's get there soonest,
which is why block Krylov spaces do (Musco and Musco, "Randomized block Krylov methods", NIPS 2015). A Krylov space for
n/8 directions is soon as large as the matrix, so the block is filtered instead: by T₂, two products at a time, which
keeps small what lies below the block's own values and lets grow what lies above (Zhou, Saad, Tiago and Chelikowsky,
"Self-consistent-field calculations using Chebyshev-filtered subspace iteration", 2006). On a Gaussian matrix that takes
about half as many products as powers of SᵀS do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from mergestream.algebra.products import gram, multiply
from mergestream.algebra.svd import RANK_TOLERANCE, ThinSVD, exact_svd, moderate, numerical_rank
from mergestream.sizes import CACHE_LINE

Method = Literal["auto", "exact", "randomised"]

# The share of the exact triplets' energy Σσ² that the randomised ones may miss, by estimate. The estimate was up to
# three times too low, but the half filter after it gained more: at most 4e-4 were missed of any of 1440 task vectors.
MISSED_ENERGY = 5e-4

# The block is wider than the rank by a quarter. An eighth to a third cost the same: fewer columns, more products.
_OVERSAMPLING = 4
_LEAST_OVERSAMPLING = 8
_MOST_FILTERS = 10  # Gaussian matrices, the slowest to converge, need 3 (square) to 7 (16 times as long as wide)
USUAL_PRODUCTS = 4  # with SᵀS, on task vectors

# From this size on, and up to this share of the directions, the randomised way is the faster one whatever the spectrum
# (`python -m benchmarks.truncated`): 1.5 to 3 times as fast on task vectors, 1 to 1.6 times on Gaussian matrices.
# Below, a matrix takes less than 10 ms either way, and exact triplets cost next to nothing more.
_LEAST_SIZE = 384
_LARGEST_SHARE = 1 / 6


def truncated_svd(matrix: Tensor, rank: int, method: Method = "auto") -> ThinSVD:
    """The leading ``rank`` singular triplets of a float32 or float64 matrix; fewer where its numerical rank is lower.

    ``exact`` is `thin_svd` for these vectors alone. ``randomised`` captures their energy but for a thousandth, and its
    singular vectors are orthonormal. ``auto`` takes whichever is cheaper. The same matrix gives the same bits.
    """
    if not matrix.is_contiguous() or matrix.data_ptr() % CACHE_LINE:
        matrix = matrix.clone(memory_format=torch.contiguous_format)  # BLAS rounds by how and where a matrix lies
    if not matrix.any():
        method = "exact"
    matrix, exponent = moderate(matrix)
    is_wide = matrix.shape[0] < matrix.shape[1]
    tall = matrix.T if is_wide else matrix
    n = tall.shape[1]
    is_randomised = n >= _LEAST_SIZE and rank <= _LARGEST_SHARE * n if method == "auto" else method == "randomised"
    if is_randomised and rank > 0 and block_width(rank) < n:
        svd = _randomised_svd(tall, rank)
    else:
        svd = exact_svd(tall, leading=rank)
        svd = ThinSVD(svd.u, svd.s[:rank], svd.v)
    return (svd.transposed() if is_wide else svd).times(2.0**exponent)


def block_width(rank: int) -> int:
    """The number of columns of the filtered block."""
    return rank + max(rank // _OVERSAMPLING, _LEAST_OVERSAMPLING)


def _randomised_svd(matrix: Tensor, rank: int) -> ThinSVD:
    """The SVD of S X Xᵀ through S X = Q R, so that u is as orthonormal as v even for small σ."""
    x = _leading_subspace(matrix, rank)
    q, r = torch.linalg.qr(multiply(matrix, x))
    u, s, vh = torch.linalg.svd(r.double())
    count = min(rank, numerical_rank(s, RANK_TOLERANCE[matrix.dtype]))
    return ThinSVD(multiply(q, u[:, :count].to(q)), s[:count], multiply(x, vh[:count].T.to(x)))


def _leading_subspace(matrix: Tensor, rank: int) -> Tensor:
    """An orthonormal basis (n×width) that spans the leading right singular vectors, up to a small error."""
    times_gram = _multiply_by_gram(matrix, block_width(rank))
    noise = 8 * torch.finfo(matrix.dtype).eps  # what lies below this share of σ₁², the Gram matrix does not know
    start = torch.randn(matrix.shape[1], block_width(rank), generator=torch.Generator().manual_seed(0))
    x = _orthonormal(times_gram(start.to(matrix)))
    captured = -math.inf
    for _ in range(_MOST_FILTERS):
        y = times_gram(x)
        ritz = torch.linalg.eigvalsh(multiply(x.T, y).double()).flip(0)
        before, captured = captured, float(ritz[:rank].sum())
        cut = max(float(ritz[-1]), noise * float(ritz[0]))
        first = y.mul_(2 / cut).sub_(x)  # T₁ maps [0, cut] onto [-1, 1]
        # A filter divides what is missed by the square of its growth at the last wanted value: a geometric series.
        growth = 2 * (2 * float(ritz[rank - 1]) / cut - 1) ** 2 - 1  # T₂
        if captured - before <= MISSED_ENERGY * captured * max(growth**2 - 1, 0.1):
            if float(ritz[rank - 1]) < 100 * noise * float(ritz[0]):
                # Too steep for a Gram matrix: once more with S itself, whose singular values are not squared.
                return _orthonormal(multiply(matrix.T, _orthonormal(multiply(matrix, x))))
            return _orthonormal(first)  # the product is there: half a filter more
        second = times_gram(first).mul_(4 / cut).sub_(first, alpha=2).sub_(x)  # T₂ = 2·T₁² - 1
        x = _orthonormal(second)
    return x


def _orthonormal(x: Tensor) -> Tensor:
    """The Q of a QR decomposition: as fast as two rounds of Cholesky, and always defined."""
    orthonormal: Tensor = torch.linalg.qr(x)[0]
    return orthonormal


def _multiply_by_gram(matrix: Tensor, width: int) -> Callable[[Tensor], Tensor]:
    """x ↦ SᵀS x, by S and Sᵀ where the Gram matrix would take more operations; for an eighth of the directions it
    takes fewer."""
    m, n = matrix.shape
    if m * n + 2 * USUAL_PRODUCTS * n * width > 4 * USUAL_PRODUCTS * m * width:
        return lambda x: multiply(matrix.T, multiply(matrix, x))
    squared = gram(matrix, matrix.dtype)
    return lambda x: multiply(squared, x)
