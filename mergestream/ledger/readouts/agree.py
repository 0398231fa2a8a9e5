"""agree: the merged weight matches each expert on that expert's inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mergestream.algebra.symmetric import leading_eigenvectors
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.ledger.span import Span


class Agree(EntriesReadout):
    """The weight that matches each expert on that expert's inputs; no scale to choose.

    It minimises Σ c_i ‖(M − Δ_i)|Δ_i|‖²/‖Δ_i‖², and equals Σ c_i Δ_i in the directions that matter to no expert:

        C = Σ c_i V_i Σ_i² V_iᵀ/‖Δ_i‖²    D = Σ c_i U_i Σ_i³ V_iᵀ/‖Δ_i‖²    S = Σ c_i U_i Σ_i V_iᵀ
        C = Q Λ Qᵀ    K = ⌈(tr √Λ)²/tr Λ⌉    P = the first K columns of Q
        M = S (I − P Pᵀ) + D P Λ_K⁻¹ Pᵀ

    The objective is that of WUDI (Cheng et al., 2025), the cut at K that of SWUDI-A (arXiv 2606.07289).

    With V the directions of all experts side by side and g = √c·σ/‖Δ‖, C = (V g)(V g)ᵀ has the eigenvalues of
    the κ×κ matrix (V g)ᵀ(V g) = E Λ Eᵀ, and P = V F with F = g E Λ^(−½).
    """

    name = "agree"

    def coefficients(self, span: Span) -> Tensor:
        answer = span.weight * span.sigma.square() / span.norm2
        g = answer.sqrt()
        values, E = leading_eigenvectors(g[:, None] * span.input_gram * g, _effective_rank)
        values = values[: E.shape[1]]
        F = g[:, None] * E / values.sqrt()
        inside = span.input_gram @ F  # VᵀP
        agreed = (answer * span.sigma)[:, None] * inside / values  # D P Λ⁻¹ = U · this
        return torch.diag(span.weighted).addmm_(agreed.sub_(span.weighted[:, None] * inside), F.T)


def _effective_rank(values: Tensor) -> int:
    """K, at most the number of eigenvalues."""
    return math.ceil(float(values.sqrt().sum().square() / values.sum()) * (1 - 1e-12)) if len(values) else 0
