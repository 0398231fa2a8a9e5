"""Checks of where an output may go: never into a store, or onto the models that it is made of."""

from __future__ import annotations

import json
import os
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
                raise _overlap_error(url, "is or lies in", other)
            if f"{other}/".startswith(f"{url}/"):
                raise _overlap_error(url, "holds", other)
        return
    place = _real(path)
    for directory in (place, *place.parents):
        if directory.is_dir() and is_store(open_storage(directory)):
            relation = "is" if directory == place else "lies in"
            raise MergestreamError(f"{path} {relation} the store {directory}; choose another place")
    for source in sources:
        model = _real(source)
        for inner, outer, relation in ((place, model, "lies in"), (model, place, "holds")):
            if any(_is_same(directory, outer) for directory in (inner, *inner.parents)):
                raise _overlap_error(path, "is" if _is_same(place, model) else relation, source)


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


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(Path(path).expanduser()))


def _is_same(one: Path, other: Path) -> bool:
    """Whether two paths name the same directory or file: by device and inode, because it may have several names."""
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False


def _overlap_error(path: object, relation: str, source: object) -> MergestreamError:
    return MergestreamError(f"{path} {relation} {source}, which the merge is made of; choose another place")
