"""`StoredFile`: a file as it was listed, and reading of its ranges; small adjacent ones are fetched by one request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

from mergestream.errors import MergestreamError
from mergestream.files import MAX_JSON_BYTES

if TYPE_CHECKING:
    from mergestream.storage.base import Storage

RANGE = 4 << 20
"""Bytes of one request: its latency costs about as much as the transfer of so many bytes"""
SMALL = 1 << 20
"""Bytes; larger tensors are fetched by requests of their own"""
_KEPT = 2
"""Spans kept in memory: tensors are asked for about in their order"""
_THREADS = 8


@dataclass(frozen=True)
class StoredFile:
    """A file as it was listed: its place, size and version."""

    storage: Storage = field(compare=False, repr=False)
    key: str
    """The name in the storage, with its folders"""
    size: int
    tag: str
    """Changes with the content: an ETag, or the time of modification"""
    version: str | None = None
    """A second sign of a change: the version of the object, or the inode"""
    changed: float = field(default=0.0, compare=False)
    """Time of modification, in seconds since 1970"""

    def __str__(self) -> str:
        return f"{self.storage}/{self.key}"

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    def read(self, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes of a range; an error if the file has changed, or if it is shorter."""
        end = self.size if end is None else end
        if begin >= end:
            return b""
        data = self.storage.read_range(self, begin, end)
        if len(data) != end - begin:
            raise MergestreamError(f"{self} gave {len(data)} bytes where {end - begin} were asked for; copy it again")
        return data

    def read_into(self, buffer: memoryview, begin: int) -> None:
        """Fill a buffer with the bytes from ``begin`` on, by several requests at a time."""

        def fetch(offset: int) -> None:
            stop = min(offset + RANGE, len(buffer))
            buffer[offset:stop] = self.read(begin + offset, begin + stop)

        wait_all(start(fetch, offset) for offset in range(0, len(buffer), RANGE))


def check_small(file: StoredFile) -> None:
    """Refuse a file that would fill the memory where a small one is expected."""
    if file.size > MAX_JSON_BYTES:
        raise MergestreamError(f"{file} is too large to be a file of a store; move it elsewhere")


def total_bytes(files: Mapping[str, StoredFile]) -> int:
    """The size of all files together."""
    return sum(file.size for file in files.values())


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


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="mergestream-transfer")


def start(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run a transfer on one of the pool's threads; a transfer must not wait for another one."""
    return _pool().submit(work, *arguments)


def wait_all(transfers: Iterable[Future[Any]]) -> None:
    """Wait for all transfers; the first failure cancels the others."""
    waiting = list(transfers)
    try:
        for transfer in waiting:
            transfer.result()
    finally:
        for transfer in waiting:
            transfer.cancel()
