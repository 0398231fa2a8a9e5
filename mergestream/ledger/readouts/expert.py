"""One expert back."""

from __future__ import annotations

from mergestream.ledger.readouts.sum import Sum


class Expert(Sum):
    """One expert as its entry has it: expert:NAME.

    Gargiulo et al., Task Singular Vectors (2025): TSV-Compress.
    """

    name = "expert"
    scale = 1.0
