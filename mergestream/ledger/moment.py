"""The second moment of a layer's inputs, cut to its leading directions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mergestream.algebra.symmetric import leading_eigenvectors


@dataclass(frozen=True)
class Moment:
    """A matrix G = mean of x xᵀ (n×n), as its k leading eigenpairs and the trace of what they leave out.

        G = Σ_j values_j v_j v_jᵀ + rest/(n − k) · (I − Σ_j v_j v_jᵀ)

    The cuts are nested: those of k directions begin with those of fewer. ``apply`` uses the vectors as they are
    stored, so rounding them to bfloat16 changes G by as much.
    """

    values: Tensor
    """k eigenvalues, float64, descending"""
    vectors: Tensor
    """k×n: their eigenvectors v_j, one per row"""
    rest: float = 0.0
    """The trace of G outside of these directions; 0 where k = n"""

    @staticmethod
    def of(matrix: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Moment:
        """The ``count`` leading eigenpairs of a symmetric, positive semidefinite matrix; fewer where its rank is."""
        exact = matrix.double().clone(memory_format=torch.contiguous_format)
        values, vectors = leading_eigenvectors(exact, lambda found: min(count, len(found)))
        kept = values[: vectors.shape[1]].clone()
        n = matrix.shape[0]
        rest = math.fsum([*matrix.diagonal().double().tolist(), *(-kept).tolist()]) if len(kept) < n else 0.0
        return Moment(kept, vectors.T.to(dtype).contiguous(), max(0.0, rest))

    @property
    def spread(self) -> float:
        """The eigenvalue of G in all other directions: rest/(n − k)."""
        k, n = self.vectors.shape
        return self.rest / (n - k) if k < n else 0.0

    @property
    def trace(self) -> float:
        return math.fsum([*self.values.tolist(), self.rest])

    @property
    def factor(self) -> Tensor:
        """R (k×n, float64) of G = RᵀR + spread · I"""
        return (self.values - self.spread).clamp(min=0).sqrt()[:, None] * self.vectors.double()

    def apply(self, rows: Tensor) -> Tensor:
        """rows · G (float64)"""
        rows, vectors = rows.double(), self.vectors.to(rows.device, torch.float64)
        weights = (self.values - self.spread).to(rows.device)
        return (rows @ vectors.T * weights) @ vectors + self.spread * rows

    def cut(self, count: int) -> Moment:
        """At most ``count`` directions; the eigenvalues of the others are added to the rest."""
        if count >= len(self.values):
            return self
        rest = math.fsum([*self.values[count:].tolist(), self.rest])
        return Moment(self.values[:count], self.vectors[:count], rest)
