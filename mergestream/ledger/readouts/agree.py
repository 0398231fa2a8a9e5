"""agree: the merged weight matches each expert on that expert's inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mergestream.algebra.products import gram
from mergestream.algebra.symmetric import leading_eigenvectors
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.ledger.span import Factors, Span


class Agree(EntriesReadout):
    """The weight that matches each expert on that expert's inputs; no scale to choose.

    It minimises Σ c_i ‖(M − Δ_i)|Δ_i|‖²/‖Δ_i‖², and equals Σ c_i Δ_i in the directions that matter to no expert:

        C = Σ c_i V_i Σ_i² V_iᵀ/‖Δ_i‖²    D = Σ c_i U_i Σ_i³ V_iᵀ/‖Δ_i‖²    S = Σ c_i U_i Σ_i V_iᵀ
        C = Q Λ Qᵀ    K = ⌈(tr √Λ)²/tr Λ⌉    P = the first K columns of Q
        M = S (I − P Pᵀ) + D P Λ_K⁻¹ Pᵀ

    The objective is that of WUDI (Cheng et al., 2025), the cut at K that of SWUDI-A (arXiv 2606.07289).

    With V the directions of all experts side by side and g = √c·σ/‖Δ‖, C = (V g)(V g)ᵀ has the eigenvalues of
    A = (V g)ᵀ(V g) = E Λ Eᵀ, which is κ×κ, and P = V g E Λ^(−½). So PᵀV = Λ^½ Eᵀ/g, and with the first K columns of E

        M = S + U (g·σ·E/Λ − √c·‖Δ‖·E) (g·E)ᵀ Vᵀ

    Float32 will do for A: it rounds each direction by its own length, so no small eigenvalue drowns
    (docs: performance-notes.md).
    """

    name = "agree"

    def coefficients(self, span: Span) -> Factors:
        dtype = span.inputs.dtype
        g = span.weight.sqrt() * span.sigma / span.norm2.sqrt()
        values, E = leading_eigenvectors(gram(span.inputs.T * g.to(dtype), dtype), _effective_rank)
        agreed = torch.outer(g * span.sigma, 1 / values[: E.shape[1]])
        left = E * agreed.sub_((span.weight * span.norm2).sqrt()[:, None]).to(dtype)
        return Factors(left, g.to(dtype) * E.T, span.weighted)


def _effective_rank(values: Tensor) -> int:
    """K, at most the number of eigenvalues."""
    return math.ceil(float(values.sqrt().sum().square() / values.sum()) * (1 - 1e-12)) if len(values) else 0
