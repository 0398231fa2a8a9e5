"""One expert back."""

from __future__ import annotations

from mergestream.ledger.readouts.sum import Sum


class Expert(Sum):
    """Δ_i as its entry has it, of the one expert that is heard.

    Gargiulo et al., Task Singular Vectors (2025): TSV-Compress.
    """

    name = "expert"
    scale = 1.0
