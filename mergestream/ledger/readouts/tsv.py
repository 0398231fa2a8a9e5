"""TSV-Merge: the experts' directions, made orthogonal to each other."""

from __future__ import annotations

from torch import Tensor

from mergestream.algebra.products import gram, multiply
from mergestream.algebra.symmetric import leading_eigenvectors
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.ledger.span import Factors, Span


class Tsv(EntriesReadout):
    """All experts' directions, made orthogonal to each other.

        polar(U) · diag(c·σ) · polar(V)ᵀ,   polar(U) = U (UᵀU)^(−½)

    Gargiulo et al., Task Singular Vectors (2025), with α = 1.

    With UᵀU = E Λ Eᵀ, polar(U) = U E Λ^(−½) · Eᵀ, where U E Λ^(−½) is orthonormal.
    """

    name = "tsv"

    def coefficients(self, span: Span) -> Factors:
        left, middle, right = _parts(span)
        return Factors(multiply(left, middle), right)


class Tempered(Tsv):
    """tsv, scaled to the mean norm of the experts: the default where adapters are merged.

        M · n/‖M‖  with M of tsv and n = Σ c_i ‖Δ_i‖ / Σ c_i

    The norm is OPCM's (Tang et al., 2025), here of every matrix. Full fine-tuning moves a weight along its inputs, and
    `agree` builds on that. An adapter moves it along its factor A, which was drawn at random and is often the same for
    all adapters. That says nothing about the inputs, and a merge with a larger norm than its experts does harm
    (docs/results).
    """

    name = "tempered"

    def coefficients(self, span: Span) -> Factors:
        left, middle, right = _parts(span)
        return Factors(multiply(left, middle) * (span.mean_norm / middle.double().norm()), right)


def _parts(span: Span) -> tuple[Tensor, Tensor, Tensor]:
    """Z as L · middle · R, where U L and R Vᵀ are orthonormal."""
    (left_roots, E), (right_roots, F) = spectrum(span.outputs), spectrum(span.inputs)
    return E / left_roots, multiply(E.T * span.weighted.to(E), F), (F / right_roots).T


def spectrum(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Λ^½ and E of rows · rowsᵀ = E Λ Eᵀ, in the dtype of the rows.

    The Gram matrix and Λ are found in float64, for the least eigenvalues are as important as the largest.
    """
    values, E = leading_eigenvectors(gram(rows.T), dtype=rows.dtype)
    return values.sqrt().to(E), E
