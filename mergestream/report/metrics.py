"""The paper's metrics (section 5), from the accuracy matrix of one stream.

A[i][j] is the accuracy on task j of the model after i + 1 experts, with tasks in the order of their experts. It is None
if it was not measured. A metric is None if an entry that it needs is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

Entry = float | None
Matrix = Sequence[Sequence[Entry]]


def mean(values: Sequence[Entry]) -> Entry:
    """The mean; None if a value is missing."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def average_accuracy(matrix: Matrix) -> Entry:
    """ACC: the mean over all tasks after the last expert."""
    return mean(matrix[-1])


def backward_transfer(matrix: Matrix) -> Entry:
    """BWT: the mean change of a task since its own expert was added, over all tasks except the last."""
    last = len(matrix) - 1
    return mean([_difference(matrix[last][i], matrix[i][i]) for i in range(last)])


def worst_task(matrix: Matrix) -> Entry:
    """The lowest accuracy after the last expert."""
    known = [value for value in matrix[-1] if value is not None]
    return min(known) if len(known) == len(matrix[-1]) else None


def seen_means(matrix: Matrix) -> list[Entry]:
    """After each step, the mean over the tasks whose experts are in the store."""
    return [mean(row[: step + 1]) for step, row in enumerate(matrix)]


def retention(matrix: Matrix, base: Sequence[float]) -> Entry:
    """The mean change from the base on tasks whose experts are not in the store yet: A[i][j] − base[j] over j > i."""
    return mean([_difference(row[j], base[j]) for i, row in enumerate(matrix) for j in range(i + 1, len(row))])


def _difference(left: Entry, right: Entry) -> Entry:
    return None if left is None or right is None else left - right


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over orders of the experts."""

    mean: float
    std: float | None
    count: int

    @staticmethod
    def of(values: Sequence[Entry]) -> Spread | None:
        """The spread of the known values; None if there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known))
