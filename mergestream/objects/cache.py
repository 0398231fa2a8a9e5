"""What is read of objects, kept on a disk for who reads it again: bounded, and checked when it is read there.

A range is a file whose name says of which version of which object it is, and which begins with a digest of that and of
the bytes: what is stale is never asked for, and what is damaged is fetched again. Each is put in its place whole, so
that any number of processes may share a directory.
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
from mergestream.objects.address import url_of
from mergestream.sizes import parse_size

USUAL_SIZE = "100GB"
_SHARE = 64
"""A process looks again how much there is when it has added a share so small of what there may be"""
_OURS = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]{32})?")
"""Names of files that are whole, and of those that are being written"""


class Cache:
    """A directory; what lies in it and is not ours is left alone."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.size = directory, size
        self._room = 0
        """Bytes that may be added before the next look"""
        self._adding = threading.Lock()

    def read(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """What is kept under the key, else what is fetched, which is kept then."""
        name = text_digest(key)
        path = self.directory / name[:2] / name
        data = _intact(path, key)
        if data is None:
            data = fetch()
            with suppress(OSError), self._adding:  # no room on the disk, say: then it is not kept
                self._keep(path, key, data)
        return data

    def _keep(self, path: Path, key: str, data: bytes) -> None:
        digest = _digest(key, data)
        taken = len(digest) + len(data)
        if taken > self.size:
            return
        if taken > self._room:
            self._room = self._made_room(taken)
        self._room -= taken
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

    def _made_room(self, taken: int) -> int:
        """How much there is room for, once what was not used for longest has made some."""
        room = max(taken, self.size // _SHARE)
        files = sorted(self._files())
        used = sum(size for _, size, _ in files)
        for _, size, path in files:
            if used + room <= self.size:
                break
            path.unlink(missing_ok=True)
            used -= size
        return room

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """When each was used last, its size, and where it is."""
        for path in self.directory.glob("[0-9a-f][0-9a-f]/*"):
            with suppress(OSError):  # another process has removed it
                if _OURS.fullmatch(path.name):
                    found = path.lstat()
                    yield found.st_mtime_ns, found.st_size, path


def _intact(path: Path, key: str) -> bytes | None:
    try:
        with path.open("rb") as file:
            digest, data = file.read(xxhash.xxh3_128().digest_size), file.read()
    except OSError:
        return None
    if digest != _digest(key, data):
        return None
    with suppress(OSError):  # one that may only be read
        os.utime(path)
    return data


def _digest(key: str, data: bytes) -> bytes:
    hasher = xxhash.xxh3_128(key.encode())
    hasher.update(data)
    return hasher.digest()


_current: Cache | None = None


def cache_objects(directory: str | Path | None, size: int | str = USUAL_SIZE) -> None:
    """From now on, have this process keep in a directory what it reads from object storage and ``hf://``; with None,
    nothing. What was not used for longest makes room where it would be more than ``size``, bytes or ``"50GB"``."""
    global _current
    _current = None
    if directory is None:
        return
    if url := url_of(directory):
        raise UsageError(f"{url} is in object storage; a cache is on a disk")
    place = Path(directory).expanduser().absolute()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.joinpath("00").mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"{directory} cannot be used as a cache: {error.strerror}; name another directory") from error
    _current = Cache(place, parse_size(size) if isinstance(size, str) else size)


def cache_in_use() -> tuple[Path | None, int]:
    """The arguments with which another process does the same."""
    return (_current.directory, _current.size) if _current else (None, 0)


def kept(key: str, fetch: Callable[[], bytes]) -> bytes:
    """What the key stands for, from the cache where there is one."""
    return _current.read(key, fetch) if _current else fetch()
