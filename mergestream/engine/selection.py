"""The exact k-th largest magnitude of data that is too large to sort, or even to hold.

A sample brackets the value. One pass counts what lies above the bracket and on its two ends, and
collects what lies strictly inside: about a hundredth of the data, however often single values
repeat (in bfloat16 models a few values make up most of a task vector; such values end up on the
ends). Sorting that gives the exact answer. Should the bracket have missed, it moves to the side of
the miss and gets wider, and the pass is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

SMALLEST_SAMPLE, LARGEST_SAMPLE = 1 << 15, 1 << 18
_BLOCK = 512
_GOLDEN = (math.sqrt(5) - 1) / 2

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
    size = min(max(total // 256, SMALLEST_SAMPLE), LARGEST_SAMPLE)
    stride = max(1, total // size)
    sampled = np.sort(np.concatenate([np.abs(block.numpy()) for block in sample(stride)]))[::-1]
    if stride == 1:
        return float(sampled[count - 1])
    share = count / total
    place = share * len(sampled)
    # Neighbours are correlated, so the margin is far wider than the 4σ of independent draws.
    margin = 16 * math.sqrt(place * (1 - share)) + 16
    low, high = _at(sampled, place + margin), _at(sampled, place - margin)
    while True:
        found = _add_up(tallies((low, high)))
        rank = count - found.above
        margin *= 4
        if rank <= 0:
            low, high = high, _at(sampled, place - margin)
        elif rank <= found.at_high:
            return high
        elif rank <= found.at_high + len(found.inside):
            return _largest(found.inside, rank - found.at_high)
        elif rank <= found.at_high + len(found.inside) + found.at_low or low == 0:  # only NaN is below zero
            return low
        else:
            low, high = _at(sampled, place + margin), low


def tally(piece: Tensor, bracket: Bracket) -> Tally:
    """Count and collect one piece of the data."""
    low, high = bracket
    magnitude = np.abs(piece.numpy())  # numpy compares, selects and sorts ten times faster than torch
    from_high = magnitude >= high
    above = int(np.count_nonzero(magnitude > high))
    at_high = int(np.count_nonzero(from_high)) - above
    if low == high:
        return Tally(above, at_high, magnitude[:0].copy(), 0)
    inside = magnitude[np.flatnonzero((magnitude > low) > from_high)]
    at_low = int(np.count_nonzero(magnitude >= low)) - above - at_high - len(inside)
    return Tally(above, at_high, inside, at_low)


def sample_ranges(numel: int, stride: int) -> Iterator[tuple[int, int]]:
    """Ranges that hold about every ``stride``-th of ``numel`` entries, in blocks that share pages.

    There is one in every window of equal size, but not always at the same place: the rows of a matrix and what
    repeats within them would be in step with that.
    """
    if stride == 1:
        yield 0, numel
        return
    window = _BLOCK * stride
    for number, start in enumerate(range(0, numel, window)):
        room = max(min(window, numel - start) - _BLOCK, 0)
        start += int(number * _GOLDEN % 1 * room)
        yield start, min(start + _BLOCK, numel)


def _at(descending: Array, place: float) -> float:
    """About the value at a place; beyond the ends, a bound of all values."""
    if place < 1:
        return math.inf
    return float(descending[int(place) - 1]) if place <= len(descending) else 0.0


def _largest(values: Array, rank: int) -> float:
    """The ``rank``-th largest value, counted from 1."""
    place = len(values) - rank
    return float(np.partition(values, place)[place])


def _add_up(tallies: Iterable[Tally]) -> Tally:
    parts = list(tallies)
    return Tally(
        sum(part.above for part in parts),
        sum(part.at_high for part in parts),
        np.concatenate([part.inside for part in parts]),
        sum(part.at_low for part in parts),
    )
