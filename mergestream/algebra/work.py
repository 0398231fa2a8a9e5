"""What the linear algebra of a matrix costs: floating-point operations, by the kernel that does them (docs/scale.md).

m ≥ n are the sides of a matrix, whichever way it lies; lower orders are left out. What depends on the numbers in it,
such as how soon an iteration ends, is what task vectors were seen to take.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from mergestream.algebra.bounds import FactorBounds
from mergestream.algebra.truncated import USUAL_PRODUCTS, block_width, is_randomised, uses_gram

Kernel = Literal["product", "product64", "eigen", "leading", "orthonormal", "svd"]
"""Products in float32 and in float64, eigenvectors of a symmetric matrix, all or the leading ones, the Q of a QR
decomposition, a small SVD in float64: what has a rate of its own on every processor"""


class Work(NamedTuple):
    """So many operations of a kernel, whose rate depends on a side of what it works on."""

    kernel: Kernel
    side: int
    flops: float


def product(m: int, k: int, n: int, kernel: Literal["product", "product64"] = "product") -> Work:
    """m×k times k×n."""
    return Work(kernel, min(m, k, n), 2.0 * m * k * n)


def gram(m: int, n: int, kernel: Literal["product", "product64"] = "product64") -> Work:
    """SᵀS of m×n, one triangle only."""
    return Work(kernel, n, 1.0 * m * n**2)


def eigenvectors(n: int, count: int | None = None) -> Work:
    """4/3 n³ to the tridiagonal form and 2 n² for each vector on the way back; for all of them 4/3 n³ between."""
    if count is None:
        return Work("eigen", n, 14 / 3 * n**3)
    return Work("leading", n, 4 / 3 * n**3 + 2.0 * n**2 * count)


def orthonormal(m: int, n: int) -> Work:
    return Work("orthonormal", n, 4.0 * m * n**2)


def small_svd(n: int) -> Work:
    return Work("svd", n, 22.0 * n**3)


def thin_svd(m: int, n: int, leading: int | None = None) -> list[Work]:
    m, n = max(m, n), min(m, n)
    return [gram(m, n), eigenvectors(n, leading), product(m, n, n if leading is None else leading)]


def projection(m: int, n: int, protected: int, form: Literal["reference", "paper", "block"]) -> list[Work]:
    """Of a matrix of full rank, but for its decomposition."""
    m, n, q = max(m, n), min(m, n), protected
    rank = q if form == "block" else n
    block = [product(q, n, q), *([product(m, n, q), product(m, q, q)] if form == "paper" else [])]
    back = [product(m, q, n)] if form == "paper" else [product(q, q, n)]
    return [product(rank, m, n), *block, *back, product(m, rank, n)]


def truncated_svd(m: int, n: int, rank: int, method: Literal["auto", "exact", "randomised"]) -> list[Work]:
    m, n = max(m, n), min(m, n)
    if not is_randomised(n, rank, method):
        return thin_svd(m, n, rank)
    width, products = block_width(rank), USUAL_PRODUCTS
    times_gram = [product(m, n, width)] * 2 * products
    if uses_gram(m, n, width):
        times_gram = [gram(m, n, "product"), *[product(n, n, width)] * products]
    rounds = products // 2
    """Each of two products, eigenvalues in the block and a new basis"""
    within = [product(width, n, width), Work("leading", width, 4 / 3 * width**3), orthonormal(n, width)]
    turned = [product(m, n, width), orthonormal(m, width), product(m, width, rank), product(n, width, rank)]
    return [*times_gram, *within * rounds, orthonormal(n, width), *turned, small_svd(width)]


def factored(bounds: FactorBounds) -> list[Work]:
    """Absorbing a matrix of low rank into one in factors: new rows beside the old ones of both bases, and the core."""
    (m, n), (a, b), core = bounds.shape, bounds.new, max(bounds.core)
    both = [(m, a), (n, b)]
    beside = [product(rows, side, core, "product64") for side, rows in both]
    turned = [gram(side, rows) for side, rows in both]
    return [*beside, *beside, *turned, *turned, *thin_svd(core, core), *projection(core, core, core, "reference")]
