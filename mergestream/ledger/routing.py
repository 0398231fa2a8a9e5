"""A router chooses the expert for an input: a linear discriminant of pooled features, a few numbers per expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mergestream.ledger.moment import Moment

SHRINKAGE = 0.1
"""How far the covariance is moved towards a multiple of the identity"""


@dataclass(frozen=True)
class FeatureStatistics:
    """The features of one expert's inputs, of which only these sums are kept."""

    count: int
    mean: Tensor
    """f numbers, float64"""
    scatter: Moment
    """Σ (x − mean)(x − mean)ᵀ, cut to its leading directions"""

    @staticmethod
    def of(features: Tensor, directions: int) -> FeatureStatistics:
        """From features, one row per input."""
        rows = features.double()
        mean = rows.mean(0)
        centred = rows - mean
        return FeatureStatistics(len(rows), mean, Moment.of(centred.T @ centred, directions, torch.float32))


@dataclass(frozen=True)
class Router:
    """score_i(x) = ⟨x, Σ⁻¹ μ_i⟩ − ½ ⟨μ_i, Σ⁻¹ μ_i⟩, with one covariance Σ pooled over all experts."""

    experts: tuple[str, ...]
    weights: Tensor
    """experts × f: Σ⁻¹ μ_i"""
    biases: Tensor

    @staticmethod
    def of(statistics: Mapping[str, FeatureStatistics]) -> Router:
        """Made of the statistics of each expert by name; their order does not matter."""
        experts = tuple(sorted(statistics))
        parts = [statistics[expert] for expert in experts]
        means = torch.stack([part.mean for part in parts])
        identity = torch.eye(means.shape[1], dtype=torch.float64)
        covariance = torch.stack([part.scatter.apply(identity) for part in parts]).sum(0)
        covariance /= max(1, sum(part.count - 1 for part in parts))
        covariance = (covariance + covariance.T) / 2  # stored directions are rounded
        scale = float(covariance.diagonal().mean()) or 1.0
        covariance = (1 - SHRINKAGE) * covariance + SHRINKAGE * scale * identity
        centre = means.mean(0)  # moves all scores by the same amount, and keeps them small
        weights = torch.linalg.solve(covariance, (means - centre).T).T
        return Router(experts, weights, -0.5 * (weights * (means + centre)).sum(1))

    def scores(self, features: Tensor) -> Tensor:
        """One row per input, one column per expert."""
        return features.double() @ self.weights.T.to(features.device) + self.biases.to(features.device)

    def route(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the best expert for each input, and its posterior probability."""
        confidence, expert = self.scores(features).softmax(1).max(1)
        return expert, confidence
