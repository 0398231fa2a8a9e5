"""sum: task arithmetic on the entries."""

from __future__ import annotations

from torch import Tensor

from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.ledger.span import Span


class Sum(EntriesReadout):
    """Task arithmetic: Σ c_i Δ_i, scaled.

    Ilharco et al., Editing Models with Task Arithmetic (2023); 0.3 for eight tasks in the OPCM paper.
    """

    name = "sum"
    scale = 0.3
    additive = True

    def coefficients(self, span: Span) -> Tensor:
        return span.weighted

    def share(self, weight: float, total: float) -> float:
        return weight


class Expert(Sum):
    """One expert, read back from its entry: expert:NAME.

    Gargiulo et al., Task Singular Vectors (2025): TSV-Compress.
    """

    name = "expert"
    scale = 1.0
