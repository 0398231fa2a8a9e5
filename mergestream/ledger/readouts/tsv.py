"""TSV-Merge: the experts' directions, made orthogonal to each other."""

from __future__ import annotations

from torch import Tensor

from mergestream.algebra.symmetric import power
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.ledger.span import Span


class Tsv(EntriesReadout):
    """All experts' directions, made orthogonal to each other.

        polar(U) · diag(c·σ) · polar(V)ᵀ,   polar(U) = U (UᵀU)^(−½)

    Gargiulo et al., Task Singular Vectors (2025), with α = 1.
    """

    name = "tsv"

    def coefficients(self, span: Span) -> Tensor:
        left, right = power(span.output_gram.clone(), -0.5), power(span.input_gram.clone(), -0.5)
        return (left * span.weighted) @ right
