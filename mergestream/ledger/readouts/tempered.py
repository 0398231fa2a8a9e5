"""tempered: TSV-Merge, scaled to the mean norm of the experts."""

from __future__ import annotations

from torch import Tensor

from mergestream.ledger.readouts.tsv import Tsv
from mergestream.ledger.span import Span


class Tempered(Tsv):
    """tsv, scaled to the mean norm of the experts: the default where adapters are merged.

        M · n/‖M‖  with M of tsv and n = Σ c_i ‖Δ_i‖ / Σ c_i

    The norm is OPCM's (Tang et al., 2025), here of every matrix. Full fine-tuning moves a weight along its inputs, and
    `agree` builds on that. An adapter moves it along its factor A, which was drawn at random and is often the same for
    all adapters. That says nothing about the inputs, and a merge with a larger norm than its experts does harm
    (docs/results).
    """

    name = "tempered"

    def coefficients(self, span: Span) -> Tensor:
        Z = super().coefficients(span)
        length2 = (Z * (span.output_gram @ Z @ span.input_gram)).sum()
        return Z * (span.mean_norm / length2.sqrt())
