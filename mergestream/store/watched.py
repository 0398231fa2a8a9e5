"""Experts for `watch`: where they appear, and ``watched.json``, the refused ones, skipped until their files change."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mergestream.checkpoints.location import locate
from mergestream.digest import json_digest, text_digest
from mergestream.errors import MergestreamError
from mergestream.files import to_json, write_error
from mergestream.schema import BACKUP, damaged, validate
from mergestream.storage import Storage, StoredFile, Url, open_storage, parse_url, read_json

NAME = "watched.json"
_REMEDY = f"{BACKUP}, or remove the file to let watch try again what was refused"


@dataclass(frozen=True)
class SkippedExpert:
    """An expert that `watch` skips as long as its files do not change."""

    files: str
    """Their `signature`"""
    reason: str
    options: Mapping[str, Any] | None = None
    """The options that it was refused with; None for any (older versions: it was taken out of the store)"""

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


def signature(path: Path) -> str:
    """A digest of the names, sizes and times of an expert's files; empty if there are none."""
    if path.is_file():
        file = open_storage(path.parent).stat(path.name)
        return _digest({path.name: file} if file else {})
    return _digest(open_storage(path).files())


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


def watched_place(place: str) -> Path | Url:
    """A directory, or a folder of a bucket, to watch."""
    url = parse_url(place)
    if url is None and not Path(place).is_dir():
        raise MergestreamError(f"{place} is not a directory")
    return url or Path(place)


def find_experts(place: Path | Url) -> Iterator[tuple[Path | Url, FoundExpert | Exception]]:
    """Every expert in a watched place, or the error that it causes."""
    return _in_directory(place) if isinstance(place, Path) else _in_bucket(place)


def _in_directory(place: Path) -> Iterator[tuple[Path, FoundExpert | Exception]]:
    """Every file or directory is an expert."""
    for path in place.resolve().iterdir():
        if path.name.startswith("."):
            continue
        try:
            changed = path.stat().st_mtime
            yield path, FoundExpert(locate(path).source, signature(path), changed)
        except (MergestreamError, OSError) as error:
            if os.path.lexists(path):  # else it was removed just now
                yield path, error


def _in_bucket(place: Url) -> Iterator[tuple[Url, FoundExpert]]:
    """Every folder or object is an expert."""
    experts: dict[str, dict[str, StoredFile]] = defaultdict(dict)
    for key, file in open_storage(str(place)).files().items():
        name, _, below = key.partition("/")
        if file.size and not name.startswith("."):  # consoles make a folder by an empty object
            experts[name][below or name] = file
    for name, files in experts.items():
        url, changed = place.child(name), max(file.changed for file in files.values())
        yield url, FoundExpert(str(url), _digest(files), changed)
