"""The exact k-th largest magnitude of data that is too large to sort or to hold in memory: radix selection.

Numbers that are not negative are in the same order as their bits, read as integers. Each pass over the data counts
the next 16 bits of the magnitudes whose higher bits are known: two passes for float32, four for float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_BITS = 16
"""Bits that are counted in one pass"""
DIGITS = 2**_BITS


class Search:
    """Looks for the ``count``-th largest of ``total`` magnitudes.

    Until ``found`` is known, `histogram` must see all data, in any pieces, and `narrow` gets the sum.
    """

    def __init__(self, count: int, total: int, is_float64: bool = False) -> None:
        self.found: float | None = math.inf if count <= 0 else 0.0 if count >= total else None
        self._rank = count  # among the magnitudes with the known bits, from above
        self._known = 0
        self._unknown = 64 if is_float64 else 32
        self._dtype = np.float64 if is_float64 else np.float32
        self._integer: type[np.unsignedinteger[Any]] = np.uint64 if is_float64 else np.uint32

    def histogram(self, magnitudes: Tensor) -> NDArray[Any]:
        """How many magnitudes have the known bits, by the digit that follows these."""
        digits = magnitudes.numpy().astype(self._dtype, copy=False).view(self._integer)
        digits = digits >> self._integer(self._unknown - _BITS)
        if self._unknown < 8 * digits.itemsize:
            digits = digits[np.flatnonzero(digits >> self._integer(_BITS) == self._integer(self._known))]
        digits &= self._integer(DIGITS - 1)
        return np.bincount(digits.astype(np.int64), minlength=DIGITS)

    def narrow(self, histogram: NDArray[Any]) -> None:
        """Find the next digit from the histogram of all data; the last digit gives the answer."""
        from_above = histogram[::-1].cumsum()
        place = int(np.searchsorted(from_above, self._rank))
        self._rank -= int(from_above[place - 1]) if place else 0
        self._known = self._known << _BITS | (DIGITS - 1 - place)
        self._unknown -= _BITS
        if not self._unknown:
            self.found = float(np.array(self._known, self._integer).view(self._dtype))
