"""Functions of symmetric, positive semidefinite matrices in float64, by their eigenvectors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mergestream.algebra.lapack import eigh_upper

# Gram matrices are summed in float64: what is smaller than this share of the largest eigenvalue is rounding.
_NOISE = 1e-12


def leading_eigenvectors(matrix: Tensor, wanted: Callable[[Tensor], int] | None = None) -> tuple[Tensor, Tensor]:
    """The eigenvalues above rounding noise, descending, and the eigenvectors of the first of them, as columns.

    ``wanted`` makes of the values how many vectors are needed; by default all. The matrix is overwritten.
    """

    def above_noise(ascending: Tensor) -> Tensor:
        values = ascending.flip(0)
        return values[values > _NOISE * values[:1].clamp(min=0)]

    def count(ascending: Tensor) -> int:
        values = above_noise(ascending)
        return wanted(values) if wanted else len(values)

    ascending, vectors = eigh_upper(matrix, torch.float64, count)
    return above_noise(ascending), vectors.flip(1)


def power(matrix: Tensor, exponent: float) -> Tensor:
    """Aˣ on the range of A, zero elsewhere: for x = −½ the root of the pseudo-inverse. A is overwritten."""
    values, vectors = leading_eigenvectors(matrix)
    return (vectors * values.pow(exponent)) @ vectors.T
