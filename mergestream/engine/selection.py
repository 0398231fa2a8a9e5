"""The exact k-th largest magnitude of data that is too large to sort, or even to hold.

A sample brackets the value; one pass counts what lies above the bracket and collects what lies
inside, which is a few thousandths of the data; sorting that gives the exact answer. Should the
bracket have missed, it is widened on the side of the miss, and the pass repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

SAMPLE_BLOCK = 512
SAMPLE_SIZE = 1 << 20
_CROWDED = 0.05  # share of a piece from which on repeated values are counted instead of listed

Bracket = tuple[float, float]
Tally = tuple[int, Tensor, Tensor]
"""How many magnitudes lie above the bracket; the distinct ones inside; how often each occurs."""


def kth_magnitude(
    count: int,
    total: int,
    sample: Callable[[int], Iterable[Tensor]],
    tallies: Callable[[Bracket], Iterable[Tally]],
) -> float:
    """The ``count``-th largest of ``total`` magnitudes.

    ``sample(stride)`` yields blocks of about every stride-th entry, ``tallies(bracket)`` yields
    ``tally(piece, bracket)`` for all pieces of the data, in any order.
    """
    if count <= 0:
        return math.inf
    if count >= total:
        return 0.0
    magnitudes = torch.cat([block.abs() for block in sample(max(1, total // SAMPLE_SIZE))])
    bracket = _first_bracket(magnitudes.sort(descending=True).values, count / total)
    while True:
        above, values, counts = _add_up(tallies(bracket))
        inside = int(counts.sum())
        if count <= above:
            bracket = (bracket[1], math.inf)
        elif count > above + inside:
            bracket = (0.0, bracket[0])
        else:
            rank = torch.searchsorted(counts.cumsum(0), torch.tensor(count - above))
            return float(values[rank])


def tally(piece: Tensor, bracket: Bracket) -> Tally:
    """Count and collect one piece of the data."""
    low, high = bracket
    magnitude = piece.abs()
    above = int(torch.count_nonzero(magnitude > high))
    inside = magnitude[(magnitude >= low) & (magnitude <= high)]
    if len(inside) > _CROWDED * len(magnitude):
        values, counts = inside.unique(return_counts=True)
        return above, values, counts
    return above, inside, torch.ones(len(inside), dtype=torch.long)


def blocks(numel: int, stride: int) -> Iterator[tuple[int, int]]:
    """Ranges that hold about every ``stride``-th of ``numel`` entries, in blocks that share pages."""
    for start in range(0, numel, SAMPLE_BLOCK * stride):
        yield start, min(start + SAMPLE_BLOCK, numel)


def _first_bracket(descending: Tensor, share: float) -> Bracket:
    n = len(descending)
    # Blocks are correlated, so the margin is far wider than the 4σ of independent draws.
    margin = 16 * math.sqrt(share * (1 - share) * n) + 16
    first, last = int(share * n - margin), int(share * n + margin)
    high = float(descending[first]) if first >= 0 else math.inf
    low = float(descending[last]) if last < n else 0.0
    return low, high


def _add_up(tallies: Iterable[Tally]) -> Tally:
    """All tallies as one, its values descending."""
    above, values, counts = 0, [], []
    for over, inside, times in tallies:
        above += over
        values.append(inside)
        counts.append(times)
    distinct, where = torch.cat(values).unique(return_inverse=True)
    summed = torch.zeros(len(distinct), dtype=torch.long).index_add_(0, where, torch.cat(counts))
    return above, distinct.flip(0), summed.flip(0)
