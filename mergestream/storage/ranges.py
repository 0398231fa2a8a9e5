"""Coalesced range reads: small tensors that are adjacent in an object are fetched by one request."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from threading import Lock

from mergestream.storage.base import RANGE, StoredFile
from mergestream.storage.transfer import start

SMALL = 1 << 20
"""Bytes; larger tensors are fetched by requests of their own"""
_KEPT = 2
"""Spans kept in memory: tensors are asked for about in their order"""


class CoalescedReader:
    """Reads small pieces of an object, each from a span that is fetched once for all adjacent pieces."""

    def __init__(self, file: StoredFile, pieces: Iterable[tuple[int, int]]) -> None:
        """``pieces`` are the small ones, as (begin, end)."""
        self._file = file
        self._span = {begin: span for span, begins in _join(pieces) for begin in begins}
        self._fetched: dict[tuple[int, int], Future[bytes]] = {}
        self._lock = Lock()

    def read(self, begin: int, end: int) -> bytes:
        """The bytes of one piece."""
        first, last = span = self._span[begin]
        with self._lock:
            fetched = self._fetched.pop(span, None) or start(self._file.read, first, last)
            self._fetched[span] = fetched
            for oldest in list(self._fetched)[:-_KEPT]:
                del self._fetched[oldest]
        return fetched.result()[begin - first : end - first]


def _join(pieces: Iterable[tuple[int, int]]) -> Iterable[tuple[tuple[int, int], list[int]]]:
    """Join adjacent pieces to spans of at most `RANGE` bytes; yields each span and where its pieces begin."""
    first, last, begins = 0, 0, list[int]()
    for begin, end in sorted(pieces):
        if begins and (begin != last or end - first > RANGE):
            yield (first, last), begins
            begins = []
        first, last = (first if begins else begin), end
        begins.append(begin)
    if begins:
        yield (first, last), begins
