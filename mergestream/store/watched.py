"""``watched.json``: experts that `watch` leaves alone, refused or taken back, until their files change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mergestream.checkpoints.formats import is_weight_file
from mergestream.digest import json_digest, text_digest
from mergestream.files import to_json
from mergestream.schema import BACKUP, damaged, validate
from mergestream.storage import Storage, StoredFile, Url, open_storage, parse_url, read_json

NAME = "watched.json"
_REMEDY = f"{BACKUP}, or remove it to have watch try again what was refused or taken back"


@dataclass(frozen=True)
class LeftAlone:
    """An expert that is not to be tried again while its files are what they were."""

    files: str
    """Their `signature`"""
    reason: str
    options: Mapping[str, Any] | None = None
    """With which it was refused: with others it may be tried; None where it was taken back"""

    def still(self, files: str, options: Mapping[str, Any]) -> bool:
        return self.files == files and self.options in (None, options)


def recall(storage: Storage) -> dict[str, LeftAlone]:
    """The experts that `watch` skips, by their source."""
    if storage.read(NAME) is None:
        return {}
    where, data = f"{storage}/{NAME}", read_json(storage, NAME)
    experts = data.get("experts")
    if data.get("digest") != json_digest(experts):
        raise damaged(where, "its digest does not match", _REMEDY)
    return validate(experts, dict[str, LeftAlone], where)


def remember(storage: Storage, experts: Mapping[str, LeftAlone]) -> None:
    """Add experts that `watch` skips; the caller must be the writer of the store."""
    data = {source: asdict(entry) for source, entry in {**recall(storage), **experts}.items()}
    content = {"experts": data, "digest": json_digest(data)}
    storage.put_if(NAME, to_json(content).encode(), storage.stat(NAME))
    storage.sync()


def remember_departed(storage: Storage, source: str) -> None:
    """Have `watch` skip an expert that is taken out of the store, if its files are still there."""
    url = parse_url(source)
    try:
        files = _remote_signature(url) if url else signature(Path(source))
    except OSError:
        return
    if files:
        remember(storage, {source: LeftAlone(files, "it was taken back")})


def signature(path: Path) -> str:
    """Changes with the names, sizes and times of a file or of all files in a directory; empty where there is none."""
    found = _stats(path) if path.is_dir() else [(path.name, path.stat())]
    return _digest(f"{name!a} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found)


def files_signature(files: Mapping[str, StoredFile]) -> str:
    """The same of remote files, by their names in the folder: changes with their content."""
    return _digest(f"{name!a} {file.size} {file.tag or file.changed}" for name, file in sorted(files.items()))


def _remote_signature(url: Url) -> str:
    if url.scheme == "hf":  # a commit on the hub never changes
        return ""
    if is_weight_file(url.name):
        file = open_storage(str(url.parent)).stat(url.name)
        return files_signature({url.name: file} if file else {})
    return files_signature({name: file for name, file in open_storage(str(url)).files().items() if file.size})


def _digest(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return text_digest(text) if text else ""


def _stats(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    for file in sorted(directory.rglob("*")):
        try:
            if file.is_file():
                yield str(file.relative_to(directory)), file.stat()
        except FileNotFoundError:  # renamed or removed meanwhile: it is still being written
            continue
