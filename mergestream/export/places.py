"""Checks of where an output may go: never into a store, or onto the models that it is made of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from mergestream.checkpoints.layout import MARKER
from mergestream.errors import MergestreamError
from mergestream.storage import Storage, local_path, open_storage, parse_url
from mergestream.store.manifest import is_store


def refuse_overlap(path: Path, *sources: str | Path) -> None:
    """Refuse an output that is, lies in or holds one of the models that are read, or that lies in any store."""
    if url := parse_url(path):
        for other in filter(None, map(parse_url, sources)):
            if f"{url}/".startswith(f"{other}/"):
                raise _used(url, "is or lies in", other)
            if f"{other}/".startswith(f"{url}/"):
                raise _used(url, "holds", other)
        return
    above = {identity: directory for directory in _upwards(path) if (identity := _identity(directory))}
    for directory in above.values():
        if is_store(open_storage(directory)):
            raise MergestreamError(f"{path} {_relation(path, directory)} the store {directory}; choose another place")
    place = _identity(path)
    for source in sources:
        if not (identity := _identity(source)):
            continue
        if identity in above:
            raise _used(path, _relation(path, source), source)
        if place in map(_identity, _upwards(source)):
            raise _used(path, "holds", source)


def refuse_file(path: Path, *sources: str | Path) -> None:
    """Refuse an output file that exists and is no regular file, or that `refuse_overlap` refuses."""
    if local_path(path).is_symlink():
        raise MergestreamError(f"{path} is a link; name the file that it leads to")
    if path.exists() and not path.is_file():
        raise MergestreamError(f"{path} is not a file; choose another place")
    refuse_overlap(path, *sources)


def is_export(storage: Storage) -> bool:
    """Whether mergestream has written it, by the marker."""
    try:
        marker = json.loads(storage.read(MARKER) or b"null")
    except ValueError:
        return False
    return isinstance(marker, dict) and {"mergestream", "command"} <= marker.keys()


def _upwards(path: str | Path) -> Iterator[Path]:
    place = Path(os.path.realpath(Path(path).expanduser()))
    yield place
    yield from place.parents


def _identity(path: str | Path) -> tuple[int, int] | None:
    """Device and inode, which are the same for every name of a directory; None if it does not exist."""
    try:
        found = Path(path).expanduser().stat()
    except (OSError, RuntimeError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _relation(path: Path, other: str | Path) -> str:
    return "is" if _identity(path) == _identity(other) else "lies in"


def _used(path: object, relation: str, source: object) -> MergestreamError:
    return MergestreamError(f"{path} {relation} {source}, which the merge is made of; choose another place")
