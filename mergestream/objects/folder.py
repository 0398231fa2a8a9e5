"""A folder of objects, and one of them: read by range, and only as long as it is the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from mergestream.errors import MergestreamError
from mergestream.objects.address import Url
from mergestream.objects.cache import kept
from mergestream.objects.trying import in_background, tried, wait_for

RANGE = 4 << 20
"""Bytes that are asked for at once: a request costs about as much as so many take on a fast network"""


@dataclass(frozen=True)
class Object:
    """One object as it was listed; it is read only as long as it is the same."""

    folder: Objects
    name: str
    """Below the folder"""
    size: int
    tag: str
    """Changes when the object does"""
    version: str | None = None
    """By which some services know it besides"""
    changed: float = 0.0
    """When, in seconds since 1970, where that is told"""

    def __str__(self) -> str:
        return f"{self.folder.url}/{self.name}"

    def read(self, begin: int = 0, end: int | None = None) -> bytes:
        end = self.size if end is None else end
        if begin >= end:
            return b""

        def fetch() -> bytes:
            data = tried(str(self), lambda: self.folder.read(self, begin, end))
            if len(data) != end - begin:
                wanted = end - begin
                raise MergestreamError(f"{self} gave {len(data)} bytes where {wanted} were asked for; copy it again")
            return data

        if not self.tag:  # nobody could tell whether it is still the same
            return fetch()
        return kept(f"{self} {self.size} {self.tag} {self.version} {begin}-{end}", fetch)

    def read_into(self, buffer: memoryview, begin: int) -> None:
        """Fill a buffer with what is there from ``begin`` on, range by range, some of them at a time."""

        def fetch(start: int) -> None:
            stop = min(start + RANGE, len(buffer))
            buffer[start:stop] = self.read(begin + start, begin + stop)

        wait_for(in_background(fetch, start) for start in range(0, len(buffer), RANGE))


class Listing(NamedTuple):
    """What is in a folder: objects by their names, and the names of folders."""

    objects: Mapping[str, Object]
    folders: tuple[str, ...]


class Objects(Protocol):
    """A folder of objects."""

    @property
    def url(self) -> Url: ...

    def listing(self) -> Listing:
        """Of the folder itself."""

    def below(self, folder: str) -> Mapping[str, Object]:
        """All objects below a folder in it, by their names from here; all of them for ``""``."""

    def read(self, found: Object, begin: int, end: int) -> bytes:
        """Once; a `PassingError` where it may be tried again."""
