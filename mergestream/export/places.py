"""Where outputs may go: never where that is which they are made of, nor where there is anything but an export."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mergestream.checkpoints.layout import CARD, MARKER
from mergestream.errors import MergestreamError
from mergestream.export.labels import front_matter
from mergestream.files import read_json
from mergestream.storage import local_path
from mergestream.store.manifest import is_store


def refuse_within(path: Path, *sources: str | Path) -> None:
    """Refuse an output that is, or lies in, any store or one of the models that are read."""
    above = {identity: directory for directory in _upwards(path) if (identity := _identity(directory))}
    for directory in above.values():
        if is_store(directory):
            raise MergestreamError(f"{path} {_relation(path, directory)} the store {directory}; choose another place")
    for source in sources:
        if _identity(source) in above:
            relation = _relation(path, source)
            raise MergestreamError(f"{path} {relation} {source}, which the merge is made of; choose another place")


def refuse_around(path: Path, *sources: str | Path) -> None:
    """Refuse an output that holds one of the models that are read, and would replace it."""
    place = _identity(path)
    for source in sources if place else ():
        if _identity(source) and place in map(_identity, _upwards(source)):
            raise MergestreamError(f"{path} holds {source}, which the merge is made of; choose another place")


def refuse_file(path: Path, *sources: str | Path) -> None:
    """Refuse a file to be where anything but a file is, and all that `refuse_within` refuses."""
    if local_path(path).is_symlink():
        raise MergestreamError(f"{path} is a link; name the file that it leads to")
    if path.exists() and not path.is_file():
        raise MergestreamError(f"{path} is not a file; choose another place")
    refuse_within(path, *sources)


def is_export(directory: Path) -> bool:
    """Whether we have written it: by the marker, or by the card where a version has written it that knew no marker."""
    marker, card = directory / MARKER, directory / CARD
    if marker.is_file():
        with suppress(MergestreamError):
            return {"mergestream", "command"} <= read_json(marker).keys()
    return "- mergestream" in front_matter(card)


def store_within(directory: Path) -> Path | None:
    """A store that somebody has put in there."""
    return next((found for path in directory.rglob("manifest.json") if is_store(found := path.parent)), None)


def _upwards(path: str | Path) -> Iterator[Path]:
    place = Path(os.path.realpath(Path(path).expanduser()))
    yield place
    yield from place.parents


def _identity(path: str | Path) -> tuple[int, int] | None:
    """What a place is, whatever it is called: links, mounts, upper and lower case may lead to the same one.

    None where there is nothing: some models were taken from the hub, or from memory, or are gone.
    """
    try:
        found = Path(path).expanduser().stat()
    except (OSError, RuntimeError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _relation(path: Path, other: str | Path) -> str:
    return "is" if _identity(path) == _identity(other) else "lies in"
