"""The exact k-th largest magnitude of data that is too large to sort or to hold in memory.

A sample brackets the value. One pass counts what lies above the bracket and on its two ends, and
collects what lies strictly inside: about a hundredth of the data, however often single values
repeat (in bfloat16 models a few values make up most of a task vector; such values end up on the
ends). Sorting that gives the exact answer. Should the bracket have missed, it moves to the side of
the miss and gets wider, and the pass is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# What is collected takes 26 · total / √sample bytes: for 4 GB of bfloat16 and the largest sample, 26 MB.
SMALLEST_SAMPLE, LARGEST_SAMPLE = 1 << 15, 1 << 22
MARGIN = 8
"""Half the bracket's width, in standard deviations that a rank has in a sample of independent entries"""
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


class Search:
    """Looks for the ``count``-th largest of ``total`` magnitudes, given about every ``sample_stride``-th of them.

    Until ``found`` is known, all data must be tallied against the ``bracket``, in any order. Several searches may
    share a pass over their data.
    """

    def __init__(self, count: int, total: int, sample: Iterable[Tensor]) -> None:
        self._count = count
        self.bracket: Bracket = (0.0, math.inf)
        self.found: float | None = None
        if count <= 0:
            self.found = math.inf
        elif count >= total:
            self.found = 0.0
        else:
            self._sample = np.sort(np.concatenate([block.numpy() for block in sample]))[::-1]
            if sample_stride(total) == 1:
                self.found = float(self._sample[count - 1])
            share = count / total
            self._place = share * len(self._sample)
            # Neighbours are correlated, so 4σ would not do; where this misses, one more pass is needed.
            self._margin = MARGIN * math.sqrt(self._place * (1 - share)) + MARGIN
            self.bracket = self._below(), self._above()

    def narrow(self, tallies: Iterable[Tally]) -> None:
        """Take the tallies of all data: either they give the answer, or the bracket moves."""
        above, at_high, inside, at_low = zip(*tallies, strict=True)
        collected = np.concatenate(inside)
        low, high = self.bracket
        rank = self._count - sum(above)  # from here on down, counted from 1
        self._margin *= 4
        if rank <= 0:
            self.bracket = high, self._above()
        elif rank <= sum(at_high):
            self.found = high
        elif rank <= sum(at_high) + len(collected):
            place = len(collected) - rank + sum(at_high)
            self.found = float(np.partition(collected, place)[place])
        elif rank <= sum(at_high) + len(collected) + sum(at_low) or low == 0:  # only NaN is below zero
            self.found = low
        else:
            self.bracket = self._below(), low

    def _above(self) -> float:
        return _at(self._sample, self._place - self._margin)

    def _below(self) -> float:
        return _at(self._sample, self._place + self._margin)


def sample_stride(total: int) -> int:
    size = min(max(total // 256, SMALLEST_SAMPLE), LARGEST_SAMPLE)
    return max(1, total // size)


def tally(magnitudes: Tensor, bracket: Bracket) -> Tally:
    """Count and collect one piece of the data."""
    low, high = bracket
    magnitude = magnitudes.numpy()  # numpy compares, selects and sorts ten times faster than torch
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
        slack = max(min(window, numel - start) - _BLOCK, 0)
        start += int(number * _GOLDEN % 1 * slack)
        yield start, min(start + _BLOCK, numel)


def _at(descending: Array, place: float) -> float:
    """Approximately the value at a place; beyond the ends, a bound of all values."""
    if place < 1:
        return math.inf
    return float(descending[int(place) - 1]) if place <= len(descending) else 0.0
