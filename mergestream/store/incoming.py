"""Where experts appear for `watch`: in a directory, or in a folder of a bucket."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from mergestream.checkpoints.layout import find_weights, is_index, read_index
from mergestream.checkpoints.location import locate
from mergestream.errors import MergestreamError, UsageError
from mergestream.sizes import counted
from mergestream.storage import StoredFile, Url, open_storage, parse_url
from mergestream.store.watched import files_signature, signature


class FoundExpert(NamedTuple):
    """An expert as it is seen at a look."""

    source: str
    """What it is absorbed as"""
    files: str
    """Their `signature`"""
    changed: float
    """When, in seconds: the oldest comes first"""


class WatchSource(Protocol):
    """A place that is looked at time and again."""

    @property
    def place(self) -> Path | Url: ...

    def look(self) -> Iterator[tuple[Path | Url, FoundExpert | Exception]]:
        """All that is there, or what is the matter with it."""

    def awaited(self, expert: Path | Url) -> str | None:
        """What is still to come, in words, of an expert that does not change."""


def incoming_at(place: str) -> WatchSource:
    url = parse_url(place)
    if url is None:
        if not Path(place).is_dir():
            raise MergestreamError(f"{place} is not a directory")
        return Directory(Path(place))
    if url.scheme == "hf":
        raise UsageError(f"{url} is on the hub, where nothing appears; watch a directory, or a folder in a bucket")
    return Folder(url)


@dataclass(frozen=True)
class Directory:
    """Each file or directory in it is an expert."""

    place: Path

    def look(self) -> Iterator[tuple[Path, FoundExpert | Exception]]:
        for path in self.place.resolve().iterdir():
            if path.name.startswith("."):
                continue
            try:
                changed = path.stat().st_mtime
                yield path, FoundExpert(locate(path).source, signature(path), changed)
            except (MergestreamError, OSError) as error:
                if os.path.lexists(path):  # else it has gone meanwhile
                    yield path, error

    def awaited(self, expert: Path | Url) -> str | None:
        """Nothing: a file that is being written grows from look to look."""
        return None


@dataclass(frozen=True)
class Folder:
    """Each folder in it is an expert, and each object. They are listed all at once, whatever their number."""

    place: Url

    def look(self) -> Iterator[tuple[Url, FoundExpert]]:
        experts: dict[str, dict[str, StoredFile]] = defaultdict(dict)
        for path, found in open_storage(str(self.place)).files().items():
            name, _, file = path.partition("/")
            if found.size and not name.startswith("."):  # an empty object is how consoles make a folder
                experts[name][file or name] = found
        for name, objects in experts.items():
            changed = max(found.changed for found in objects.values())
            url = self.place.child(name)
            yield url, FoundExpert(str(url), files_signature(objects), changed)

    def awaited(self, expert: Path | Url) -> str | None:
        """An object is there at once when all of it has come, and the next one may take its time."""
        try:
            location = locate(str(expert))
            names = location.names if location.path.is_dir() else set()
            entry = find_weights(names, location.source)
        except MergestreamError as error:
            if isinstance(error.__cause__, OSError):  # a fault of the network
                raise
            return str(error)
        if not location.objects:
            return "its weights are still to come"
        shards = set(read_index(location.path / entry).values()) if entry and is_index(entry) else set()
        missing = shards - names
        return f"{len(missing)} of its {counted(len(shards), 'shard')} are still to come" if missing else None
