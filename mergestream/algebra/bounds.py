"""How large the factors of a low-rank state may become in a step, computed from ranks alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class FactorBounds:
    """Upper bounds of the factors Lᵀ C R of one tensor's slots after a step."""

    shape: tuple[int, int]
    """The shape of the tensor as a matrix"""
    new: tuple[int, int]
    """Rows that the step may add to the left and to the right basis"""
    core: tuple[int, int]

    @classmethod
    def after(
        cls, shape: tuple[int, ...], before: Iterable[tuple[int, int]], rank: int, max_rank: int | None
    ) -> FactorBounds | None:
        """Of slots with bases of these ranks that absorb a task vector of ``rank``; None where the dense tensor
        takes no more."""
        m, n = matrix_shape(shape)
        ranks = [(0, 0), *before]
        a, b = min(max(left for left, _ in ranks) + rank, m), min(max(right for _, right in ranks) + rank, n)
        new = min(rank, m), min(rank, n)
        if max_rank is not None and max(a, b) > max_rank:
            new = a, b = min(a, max_rank), min(b, max_rank)
        bounds = cls((m, n), new, (a, b))
        return bounds if bounds.stored < m * n or not a else None

    @property
    def stored(self) -> int:
        """Numbers in the factors of one slot."""
        (m, n), (a, b) = self.shape, self.core
        return m * a + a * b + n * b

    @property
    def workspace(self) -> int:
        """Bytes of float64 that absorbing takes: the new rows of both bases a few times, a dozen cores."""
        (m, n), (left, right) = self.shape, self.new
        return 8 * (4 * (m * left + n * right) + 12 * max(self.core) ** 2)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor as the matrix with its first dimension as rows."""
    return (shape[0] if shape else 1), math.prod(shape[1:])
