"""The exact k-th largest magnitude of data that is too large to sort, or even to hold.

A sample brackets the value. One pass counts what lies above the bracket and on its two ends, and
collects what lies strictly inside: about a hundredth of the data, however often single values
repeat (in bfloat16 models a few values make up most of a task vector; such values end up on the
ends). Sorting that gives the exact answer. Should the bracket have missed, it is widened on the
side of the miss, and the pass repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SMALLEST_SAMPLE, LARGEST_SAMPLE = 1 << 15, 1 << 20
_BLOCK = 512

Array = NDArray[Any]
Bracket = tuple[float, float]


class Tally(NamedTuple):
    """Where the magnitudes of some data lie, relative to a bracket."""

    above: int
    at_high: int
    inside: Array
    at_low: int


def kth_magnitude(
    count: int,
    total: int,
    sample: Callable[[int], Iterable[Tensor]],
    tallies: Callable[[Bracket], Iterable[Tally]],
) -> float:
    """The ``count``-th largest of ``total`` magnitudes.

    ``sample(stride)`` yields about every stride-th entry, ``tallies(bracket)`` yields
    ``tally(piece, bracket)`` for all pieces of the data, in any order.
    """
    if count <= 0:
        return math.inf
    if count >= total:
        return 0.0
    size = min(max(total // 64, SMALLEST_SAMPLE), LARGEST_SAMPLE)
    stride = max(1, total // size)
    sampled = np.concatenate([np.abs(block.numpy()) for block in sample(stride)])
    if stride == 1:
        return _largest(sampled, count)
    bracket = _first_bracket(sampled, count / total)
    while True:
        low, high = bracket
        found = _add_up(tallies(bracket))
        rank = count - found.above
        if rank <= 0:
            bracket = (high, math.inf)
        elif rank <= found.at_high:
            return high
        elif rank <= found.at_high + len(found.inside):
            return _largest(found.inside, rank - found.at_high)
        elif rank <= found.at_high + len(found.inside) + found.at_low:
            return low
        else:
            bracket = (0.0, low)


def tally(piece: Tensor, bracket: Bracket) -> Tally:
    """Count and collect one piece of the data."""
    low, high = bracket
    magnitude = np.abs(piece.numpy())  # numpy compares, selects and sorts ten times faster than torch
    above = int(np.count_nonzero(magnitude > high))
    from_high = int(np.count_nonzero(magnitude >= high))
    from_low = int(np.count_nonzero(magnitude >= low)) if low < high else from_high
    inside = magnitude[(magnitude > low) & (magnitude < high)]
    return Tally(above, from_high - above, inside, from_low - from_high - len(inside))


def sample_ranges(numel: int, stride: int) -> Iterator[tuple[int, int]]:
    """Ranges that hold about every ``stride``-th of ``numel`` entries, in blocks that share pages."""
    if stride == 1:
        yield 0, numel
        return
    for start in range(0, numel, _BLOCK * stride):
        yield start, min(start + _BLOCK, numel)


def _largest(values: Array, rank: int) -> float:
    """The ``rank``-th largest value, counted from 1."""
    place = len(values) - rank
    return float(np.partition(values, place)[place])


def _first_bracket(sampled: Array, share: float) -> Bracket:
    n = len(sampled)
    # Neighbours are correlated, so the margin is far wider than the 4σ of independent draws.
    margin = 16 * math.sqrt(share * (1 - share) * n) + 16
    above, below = int(share * n - margin), int(share * n + margin)
    high = _largest(sampled, above) if above >= 1 else math.inf
    low = _largest(sampled, below) if below <= n else 0.0
    return low, high


def _add_up(tallies: Iterable[Tally]) -> Tally:
    parts = list(tallies)
    return Tally(
        sum(part.above for part in parts),
        sum(part.at_high for part in parts),
        np.concatenate([part.inside for part in parts]),
        sum(part.at_low for part in parts),
    )
