"""How many experts share the room of a ledger. Nothing heavy is imported here: the status of a store asks for it."""

from __future__ import annotations

from collections.abc import Sequence


def sharing(cuts: Sequence[int]) -> int:
    """How many experts entries are read for, by what each one leaves room for: none has less, so all are cut alike."""
    return max(len(cuts), *cuts)
