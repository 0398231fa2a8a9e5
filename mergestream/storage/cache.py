"""A cache of ranges of remote objects, in a local directory of bounded size.

Every range is one file. Its name is a digest of the object's URL, version and range, so that a stale range is never
read; it begins with a digest of its content, so that a damaged one is fetched again. Files are replaced atomically:
any number of processes can share the directory.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import xxhash

from mergestream.digest import text_digest
from mergestream.errors import UsageError
from mergestream.sizes import parse_size
from mergestream.storage.url import parse_url

DEFAULT_SIZE = "100GB"
_SHARE = 64
"""A process measures the directory again when it has added one 64th of the allowed size"""
_OURS = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]{32})?")
"""Names of complete files, and of files that are being written"""


class Cache:
    """A directory of cached ranges; other files in it are left alone."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.size = directory, size
        self._allowance = 0
        """Bytes that may be added before the directory is measured again"""
        self._adding = threading.Lock()

    def read(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """Read the cached bytes of a key, or fetch and cache them."""
        name = text_digest(key)
        path = self.directory / name[:2] / name
        data = _read_intact(path, key)
        if data is None:
            data = fetch()
            with suppress(OSError), self._adding:  # for example a full disk: then it is not cached
                self._add(path, key, data)
        return data

    def _add(self, path: Path, key: str, data: bytes) -> None:
        digest = _digest(key, data)
        taken = len(digest) + len(data)
        if taken > self.size:
            return
        if taken > self._allowance:
            self._allowance = self._evict(taken)
        self._allowance -= taken
        path.parent.mkdir(exist_ok=True)
        draft = path.with_name(f"{path.name}.{uuid4().hex}")
        try:
            with draft.open("xb") as file:
                file.write(digest)
                file.write(data)
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise

    def _evict(self, taken: int) -> int:
        """Remove the least recently used files; returns how many bytes may be added now."""
        allowance = max(taken, self.size // _SHARE)
        files = sorted(self._files())
        used = sum(size for _, size, _ in files)
        for _, size, path in files:
            if used + allowance <= self.size:
                break
            path.unlink(missing_ok=True)
            used -= size
        return allowance

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Time of the last use, size and path of every cached file."""
        for path in self.directory.glob("[0-9a-f][0-9a-f]/*"):
            with suppress(OSError):  # another process has removed it
                if _OURS.fullmatch(path.name):
                    found = path.lstat()
                    yield found.st_mtime_ns, found.st_size, path


def _read_intact(path: Path, key: str) -> bytes | None:
    try:
        with path.open("rb") as file:
            digest, data = file.read(xxhash.xxh3_128().digest_size), file.read()
    except OSError:
        return None
    if digest != _digest(key, data):
        return None
    with suppress(OSError):  # a read-only directory
        os.utime(path)
    return data


def _digest(key: str, data: bytes) -> bytes:
    hasher = xxhash.xxh3_128(key.encode())
    hasher.update(data)
    return hasher.digest()


_current: Cache | None = None


def cache_objects(directory: str | Path | None, size: int | str = DEFAULT_SIZE) -> None:
    """Cache what this process reads from object storage and ``hf://`` in a directory from now on; None switches it off.

    The least recently used ranges are removed when the cache would exceed ``size``, bytes or ``"50GB"``."""
    global _current
    _current = None
    if directory is None:
        return
    if url := parse_url(directory):
        raise UsageError(f"{url} is in object storage; the cache must be a local directory")
    place = Path(directory).expanduser().absolute()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.joinpath("00").mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{directory} cannot be used as a cache: {error.strerror}; name another directory") from error
    _current = Cache(place, parse_size(size) if isinstance(size, str) else size)


def cache_in_use() -> tuple[Path | None, int]:
    """The arguments of `cache_objects` that give another process the same cache."""
    return (_current.directory, _current.size) if _current else (None, 0)


def read_cached(key: str, fetch: Callable[[], bytes]) -> bytes:
    """Read the bytes of a key through the cache, if there is one."""
    return _current.read(key, fetch) if _current else fetch()
