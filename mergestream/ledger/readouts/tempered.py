"""TSV-Merge, no longer than the experts are."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mergestream.algebra import work
from mergestream.ledger.readouts.tsv import Tsv
from mergestream.ledger.span import Span


class Tempered(Tsv):
    """As tsv, and as long as the experts are in the mean: the default where adapters are merged.

        M · n/‖M‖  with M of tsv and n = Σ c_i ‖Δ_i‖ / Σ c_i

    The length is OPCM's (Tang et al., 2025), here of every matrix. Full fine-tuning moves a weight along its inputs,
    which is what `agree` builds on. An adapter moves it where its factor A was drawn at random, often the same for all:
    that says nothing of the inputs, and a merge that is longer than its experts does harm (docs/results).
    """

    name = "tempered"

    def coefficients(self, span: Span) -> Tensor:
        Z = super().coefficients(span)
        length2 = (Z * (span.output_gram @ Z @ span.input_gram)).sum()
        return Z * (span.mean_norm / length2.sqrt())

    def operations(self, outputs: int, inputs: int, directions: int) -> Sequence[work.Work]:
        length = work.product(directions, directions, directions, "product64")
        return [*super().operations(outputs, inputs, directions), *[length] * 2]
