"""The paper's metrics (section 5), from the accuracy matrix of one stream.

A[i][j] is the accuracy on the j-th task to arrive, of the model read out after i + 1 models; None where it was
not measured. A metric is None where an entry it needs is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Entry = float | None
Matrix = Sequence[Sequence[Entry]]


def mean(values: Sequence[Entry]) -> Entry:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def average_accuracy(matrix: Matrix) -> Entry:
    """ACC: the mean over all tasks after the last model."""
    return mean(matrix[-1])


def backward_transfer(matrix: Matrix) -> Entry:
    """BWT: what a task lost (or won) since its own model was absorbed, over all tasks but the last."""
    last = len(matrix) - 1
    return mean([_difference(matrix[last][i], matrix[i][i]) for i in range(last)])


def worst_task(matrix: Matrix) -> Entry:
    known = [value for value in matrix[-1] if value is not None]
    return min(known) if len(known) == len(matrix[-1]) else None


def seen_means(matrix: Matrix) -> list[Entry]:
    """After each step, the mean over the tasks whose models have been absorbed."""
    return [mean(row[: step + 1]) for step, row in enumerate(matrix)]


def retention(matrix: Matrix, base: Sequence[float]) -> Entry:
    """How much better (or worse) than the base the merged models do on tasks that are not merged yet.

    The mean of A[i][j] − base[j] over j > i; ``base`` in the order of arrival.
    """
    return mean([_difference(row[j], base[j]) for i, row in enumerate(matrix) for j in range(i + 1, len(row))])


def _difference(left: Entry, right: Entry) -> Entry:
    return None if left is None or right is None else left - right


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over orders."""

    mean: float
    std: float | None
    count: int

    @staticmethod
    def of(values: Sequence[Entry]) -> Spread | None:
        """None if there is nothing to average; orders in which the metric was not measured do not count."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        centre = math.fsum(known) / len(known)
        if len(known) == 1:
            return Spread(centre, None, 1)
        variance = math.fsum((value - centre) ** 2 for value in known) / (len(known) - 1)
        return Spread(centre, math.sqrt(variance), len(known))
