"""Where outputs may go: never where that is which they are made of, nor where there is anything but an export."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from mergestream.errors import MergestreamError
from mergestream.files import read_json
from mergestream.store.manifest import is_store

MARKER = "mergestream.json"
"""Beside every export: what made it"""
_CARD = "README.md"
_LONGEST_FRONT = 10_000


def refuse_within(path: Path, *sources: str | Path) -> None:
    """Refuse an output that is, or lies in, any store or one of the models that are read."""
    existing = list(_existing(sources))
    for directory in _upwards(path):
        if is_store(directory):
            raise MergestreamError(f"{path} {_relation(path, directory)} the store {directory}; choose another place")
        for source in existing:
            if _same(directory, source):
                relation = _relation(path, source)
                raise MergestreamError(f"{path} {relation} {source}, which the merge is made of; choose another place")


def refuse_around(path: Path, *sources: str | Path) -> None:
    """Refuse an output that holds one of the models that are read, and would replace it."""
    for source in _existing(sources):
        if any(_same(path, directory) for directory in _upwards(source)):
            raise MergestreamError(f"{path} holds {source}, which the merge is made of; choose another place")


def refuse_file(path: Path, *sources: str | Path) -> None:
    """Refuse a file to be where anything but a file is, and all that `refuse_within` refuses."""
    if path.is_symlink():
        raise MergestreamError(f"{path} is a link; name the file that it leads to")
    if path.exists() and not path.is_file():
        raise MergestreamError(f"{path} is not a file; choose another place")
    refuse_within(path, *sources)


def is_export(directory: Path) -> bool:
    """Whether we have written it: by the marker, or by the card where a version has written it that knew no marker."""
    try:
        return {"mergestream", "command"} <= read_json(directory / MARKER).keys()
    except MergestreamError:
        return _has_our_card(directory)


def store_within(directory: Path) -> Path | None:
    """A store that somebody has put in there."""
    return next((found for path in directory.rglob("manifest.json") if is_store(found := path.parent)), None)


def _has_our_card(directory: Path) -> bool:
    try:
        with (directory / _CARD).open(encoding="utf-8", errors="replace") as card:
            front, closed, _ = card.read(_LONGEST_FRONT).partition("\n---\n")
    except OSError:
        return False
    return bool(closed) and front.startswith("---\n") and "- mergestream" in front.splitlines()


def _existing(sources: Iterable[str | Path]) -> Iterator[Path]:
    """Those on this machine: some were taken from the hub, or from memory, or are gone."""
    for source in sources:
        with suppress(OSError, RuntimeError, ValueError):
            path = Path(source).expanduser()
            if path.exists():
                yield path


def _upwards(path: Path) -> Iterator[Path]:
    place = Path(os.path.realpath(path))
    yield place
    yield from place.parents


def _same(one: Path, other: Path) -> bool:
    """Whatever they are called: links, mounts, upper and lower case may lead to the same place."""
    return one.exists() and other.exists() and one.samefile(other)


def _relation(path: Path, other: Path) -> str:
    return "is" if _same(path, other) else "lies in"
