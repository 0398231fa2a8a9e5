"""outputs: the merged weight matches each expert where that expert's outputs lie."""

from __future__ import annotations

from mergestream.ledger.readouts.agree import Agree
from mergestream.ledger.span import Factors, Span

LENGTH = 1.5
"""The norm of a merged matrix, in mean norms of the experts"""


class Outputs(Agree):
    """`agree` on the side of the outputs, scaled to a fixed norm: for adapters.

        Mᵀ of `agree` for all Δ_iᵀ,  times 1.5 n/‖M‖  with n = Σ c_i ‖Δ_i‖ / Σ c_i

    An adapter is B·A. Its factor A is mostly as it was drawn, and says nothing about the inputs. Its factor B has been
    learnt: it is where the expert's outputs lie.
    """

    name = "outputs"

    def coefficients(self, span: Span) -> Factors:
        Z = super().coefficients(span.reversed).transposed
        return Z.times(LENGTH * span.mean_norm / span.squared_norm(Z).sqrt())
