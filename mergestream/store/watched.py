"""Experts for `watch`: where they appear, and ``watched.json``, the experts that it skips until their files change."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mergestream.checkpoints.layout import find_weights, is_index, is_weight_file, read_index
from mergestream.checkpoints.location import locate
from mergestream.digest import json_digest, text_digest
from mergestream.errors import MergestreamError, UsageError
from mergestream.files import to_json, write_error
from mergestream.schema import BACKUP, damaged, validate
from mergestream.sizes import counted
from mergestream.storage import Storage, StoredFile, Url, open_storage, parse_url, read_json

NAME = "watched.json"
_REMEDY = f"{BACKUP}, or remove the file to let watch try again what was refused or taken back"


@dataclass(frozen=True)
class SkippedExpert:
    """An expert that `watch` skips as long as its files do not change."""

    files: str
    """Their `signature`"""
    reason: str
    options: Mapping[str, Any] | None = None
    """The options that it was refused with; None if it was taken back"""

    def applies_to(self, files: str, options: Mapping[str, Any]) -> bool:
        """Whether these files are skipped with these options."""
        return self.files == files and self.options in (None, options)


def recall(storage: Storage) -> dict[str, SkippedExpert]:
    """The experts that `watch` skips, by their source."""
    if storage.read(NAME) is None:
        return {}
    where, data = f"{storage}/{NAME}", read_json(storage, NAME)
    experts = data.get("experts")
    if data.get("digest") != json_digest(experts):
        raise damaged(where, "its digest does not match", _REMEDY)
    return validate(experts, dict[str, SkippedExpert], where)


def remember(storage: Storage, experts: Mapping[str, SkippedExpert]) -> None:
    """Add experts that `watch` skips; the caller must be the writer of the store."""
    data = {source: asdict(entry) for source, entry in {**recall(storage), **experts}.items()}
    content = {"experts": data, "digest": json_digest(data)}
    storage.put_if(NAME, to_json(content).encode(), storage.stat(NAME))
    try:
        storage.sync()
    except OSError as error:
        raise write_error(f"{storage}/{NAME}", error) from error


def remember_departed(storage: Storage, source: str) -> None:
    """Have `watch` skip an expert that is taken out of the store, if its files are still there."""
    try:
        files = signature(source)
    except OSError:
        return
    if files:
        remember(storage, {source: SkippedExpert(files, "it was taken back")})


def signature(source: str | Path) -> str:
    """A digest of the names, sizes and versions of an expert's files; empty if there are none.

    A commit on the hub has none either: it never changes.
    """
    url = parse_url(source)
    if url and url.scheme == "hf":
        return ""
    parent, name = (str(url.parent), url.name) if url else (str(Path(source).parent), Path(source).name)
    if is_weight_file(name) if url else Path(source).is_file():
        file = open_storage(parent).stat(name)
        return _digest({name: file} if file else {})
    return _digest({name: file for name, file in open_storage(source).files().items() if file.size or not url})


def _digest(files: Mapping[str, StoredFile]) -> str:
    ordered = sorted(files.items(), key=lambda item: item[0].split("/"))
    text = "\n".join(f"{name!a} {file.size} {file.tag or file.changed}" for name, file in ordered)
    return text_digest(text) if text else ""


class FoundExpert(NamedTuple):
    """An expert that was found in a watched place."""

    source: str
    """The name to add it by"""
    files: str
    """Their `signature`"""
    changed: float
    """Time of the last change, in seconds: the oldest is added first"""


class WatchSource(Protocol):
    """A place that experts appear in."""

    @property
    def place(self) -> Path | Url: ...

    def look(self) -> Iterator[tuple[Path | Url, FoundExpert | Exception]]:
        """Every expert, or the error that it causes."""

    def missing_files(self, expert: Path | Url) -> str | None:
        """A sentence about files that have yet to arrive; None if the expert is complete."""


def open_watch_source(place: str) -> WatchSource:
    """A directory, or a folder of a bucket, to watch."""
    url = parse_url(place)
    if url is None:
        if not Path(place).is_dir():
            raise MergestreamError(f"{place} is not a directory")
        return WatchedDirectory(Path(place))
    if url.scheme == "hf":
        raise UsageError(f"{url} is on the hub, where no experts appear; watch a directory, or a folder in a bucket")
    return WatchedFolder(url)


@dataclass(frozen=True)
class WatchedDirectory:
    """A directory; every file or directory in it is an expert."""

    place: Path

    def look(self) -> Iterator[tuple[Path, FoundExpert | Exception]]:
        for path in self.place.resolve().iterdir():
            if path.name.startswith("."):
                continue
            try:
                changed = path.stat().st_mtime
                yield path, FoundExpert(locate(path).source, signature(path), changed)
            except (MergestreamError, OSError) as error:
                if os.path.lexists(path):  # else it was removed just now
                    yield path, error

    def missing_files(self, expert: Path | Url) -> str | None:
        """None: a local file that is incomplete still grows between two looks."""
        return None


@dataclass(frozen=True)
class WatchedFolder:
    """A folder of a bucket; every folder or object in it is an expert."""

    place: Url

    def look(self) -> Iterator[tuple[Url, FoundExpert]]:
        experts: dict[str, dict[str, StoredFile]] = defaultdict(dict)
        for key, file in open_storage(str(self.place)).files().items():
            name, _, below = key.partition("/")
            if file.size and not name.startswith("."):  # consoles make a folder by an empty object
                experts[name][below or name] = file
        for name, files in experts.items():
            url, changed = self.place.child(name), max(file.changed for file in files.values())
            yield url, FoundExpert(str(url), _digest(files), changed)

    def missing_files(self, expert: Path | Url) -> str | None:
        """An object appears when it is complete, but the next one may take a while."""
        try:
            location = locate(str(expert))
            names = location.names if location.path.is_dir() else set()
            entry = find_weights(names, location.source)
        except MergestreamError as error:
            if isinstance(error.__cause__, OSError):  # a failure of the network
                raise
            return str(error)
        if not location.objects:
            return "its weights have not arrived yet"
        shards = set(read_index(location.path / entry).values()) if entry and is_index(entry) else set()
        missing = shards - names
        return f"{len(missing)} of its {counted(len(shards), 'shard')} have not arrived yet" if missing else None
