"""Small pieces of an object that lie side by side: fetched together, for a request takes longer than they do."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from threading import Lock

from mergestream.objects.folder import RANGE, Object
from mergestream.objects.trying import in_background

SMALL = 1 << 20
"""Bytes; larger pieces are fetched alone"""
_KEPT = 2
"""Stretches that are in memory at a time: pieces are asked for about in their order"""


class Neighbours:
    """Gives small pieces of an object, each out of the stretch that was fetched for it and those beside it."""

    def __init__(self, found: Object, pieces: Iterable[tuple[int, int]]) -> None:
        """``pieces`` are the small ones, by where they begin and end."""
        self._object = found
        self._stretch = {begin: stretch for stretch, begins in _stretches(pieces) for begin in begins}
        self._fetched: dict[tuple[int, int], Future[bytes]] = {}
        self._lock = Lock()

    def read(self, begin: int, end: int) -> bytes:
        start, stop = stretch = self._stretch[begin]
        with self._lock:
            fetched = self._fetched.pop(stretch, None) or in_background(self._object.read, start, stop)
            self._fetched[stretch] = fetched
            for oldest in list(self._fetched)[:-_KEPT]:
                del self._fetched[oldest]
        return fetched.result()[begin - start : end - start]


def _stretches(pieces: Iterable[tuple[int, int]]) -> Iterable[tuple[tuple[int, int], list[int]]]:
    """Where each begins and ends, and where its pieces begin."""
    start, stop, begins = 0, 0, list[int]()
    for begin, end in sorted(pieces):
        if begins and (begin != stop or end - start > RANGE):
            yield (start, stop), begins
            begins = []
        start, stop = (start if begins else begin), end
        begins.append(begin)
    if begins:
        yield (start, stop), begins
