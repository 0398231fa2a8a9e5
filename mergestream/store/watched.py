"""``watched.json``: experts that `watch` leaves alone, refused or taken back, until their files change."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mergestream.checkpoints.layout import is_weight_file
from mergestream.digest import json_digest, text_digest
from mergestream.files import to_json, write_json
from mergestream.objects import Bucket, Object, Url, url_of
from mergestream.schema import BACKUP, damaged, parse, read_text, validate
from mergestream.store.mirror import Mirror, Place, fetched

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


def recall(store: Place) -> dict[str, LeftAlone]:
    """By the source of the expert."""
    path = fetched(store, NAME)
    if not path.is_file():
        return {}
    data = parse(read_text(path), path)
    experts = data.get("experts")
    if data.get("digest") != json_digest(experts):
        raise damaged(path, "its digest does not match", _REMEDY)
    return validate(experts, dict[str, LeftAlone], path)


def remember(store: Place, experts: Mapping[str, LeftAlone]) -> None:
    """Add to what is left alone; the store must be held for writing."""
    data = {source: asdict(entry) for source, entry in {**recall(store), **experts}.items()}
    content = {"experts": data, "digest": json_digest(data)}
    if isinstance(store, Mirror):
        store.replace(NAME, to_json(content))
    else:
        write_json(store / NAME, content)


def remember_departed(store: Place, source: str) -> None:
    """The same for an expert that is taken out of the store, where it is still where it came from."""
    url = url_of(source)
    try:
        files = _signature_there(url) if url else signature(Path(source))
    except OSError:
        return
    if files:
        remember(store, {source: LeftAlone(files, "it was taken back")})


def signature(path: Path) -> str:
    """Changes with the names, sizes and times of a file or of all files in a directory; empty where there is none."""
    found = _stats(path) if path.is_dir() else [(path.name, path.stat())]
    return _digest(f"{name!a} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found)


def objects_signature(objects: Mapping[str, Object]) -> str:
    """The same of objects, by their names in the folder: it changes with what is in them, where the service tells."""
    return _digest(f"{name!a} {found.size} {found.tag or found.changed}" for name, found in sorted(objects.items()))


def _signature_there(url: Url) -> str:
    """Of what is in object storage; a commit on the hub is nothing that appears."""
    if url.scheme == "hf":
        return ""
    if is_weight_file(url.name):
        beside = Bucket(url.parent).listing().objects
        return objects_signature({name: found for name, found in beside.items() if name == url.name})
    return objects_signature({name: found for name, found in Bucket(url).below("").items() if found.size})


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
