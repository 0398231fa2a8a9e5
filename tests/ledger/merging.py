"""Ledgers in memory."""

from __future__ import annotations

from collections.abc import Sequence

from mergestream import Ledger, Merger
from mergestream.testing import StateDict


def ledger_of(models: Sequence[StateDict], order: Sequence[int], method: Ledger | None = None) -> Merger:
    """Return a ledger with the models of these numbers, in this order, named by number; model 0 is the base."""
    merger = Merger(models[0], method or Ledger())
    for number in order:
        merger.add(models[number], name=str(number))
    return merger
