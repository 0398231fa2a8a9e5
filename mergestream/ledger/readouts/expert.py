"""expert:NAME: one expert, read back from its entry."""

from __future__ import annotations

from mergestream.ledger.readouts.sum import Sum


class Expert(Sum):
    """One expert, read back from its entry: expert:NAME.

    Gargiulo et al., Task Singular Vectors (2025): TSV-Compress.
    """

    name = "expert"
    scale = 1.0
