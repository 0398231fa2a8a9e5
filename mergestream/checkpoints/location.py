"""From what a user names to files: a local path, an address in object storage, or else a hub id that is downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mergestream.checkpoints.formats import is_weight_file
from mergestream.checkpoints.hub import Repository, cached, download
from mergestream.checkpoints.layout import MARKER
from mergestream.errors import MergestreamError, UsageError
from mergestream.escaping import is_utf8
from mergestream.files import read_json
from mergestream.storage import UNFINISHED, StoredFile, Url, local_path, open_model_folder, parse_url

_HUB_ID = re.compile(r"(hf://)?[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_CREDENTIALS = re.compile(r"://[^/]*@")


class Location(NamedTuple):
    """A file or directory, and how people know it: by its path, its address, or as ``org/name@commit``."""

    path: Path
    source: str
    objects: Mapping[str, StoredFile] = MappingProxyType({})
    """Files of the directory that are not on this machine, by their names: weights in object storage"""

    @property
    def directory(self) -> Location:
        """Where a file is."""
        return Location(self.path.parent, self.source.rpartition("/")[0], self.objects)

    def file(self, name: str) -> Location:
        """One of a directory's files."""
        return Location(self.path / name, f"{self.source}/{name}", self.objects)

    @property
    def names(self) -> set[str]:
        """Of what is in a directory."""
        return {entry.name for entry in self.path.iterdir()} | self.objects.keys()

    @property
    def is_local(self) -> bool:
        return self.source == str(self.path)


def locate(source: str | Path, *, weights: bool = True) -> Location:
    """Find a local file or directory, or what is in object storage, or download a hub id ``org/name[@revision]``.

    Without ``weights`` only the configuration and what goes with it are downloaded.
    """
    url = parse_url(source)
    with system_errors_explained(source):
        if url:
            return _in_storage(url)
        path = _resolved(source)
        if path.exists():
            if not is_utf8(str(path)):  # it is kept in JSON, and goes into model cards
                raise MergestreamError(f"{path} is not valid UTF-8; rename it")
            return Location(path, str(path))
        if _is_hub_id(source):
            return Location(*download(str(source), weights=weights))
    raise MergestreamError(f"{source} does not exist: give a directory, a file, or a hub id org/name[@revision]")


def _in_storage(url: Url) -> Location:
    from mergestream.checkpoints.remote import fetch_companions

    if url.scheme == "hf":
        if not _is_hub_id(str(url)):
            raise UsageError(f"{url} is no address on the hub: give hf://org/name[@revision]")
        repository = Repository.at(f"{url.bucket}/{url.key}")
        path, objects = fetch_companions(repository, str(repository.url))
        return Location(path, str(repository.url), objects)
    folder = url.parent if is_weight_file(url.key) else url
    path, objects = fetch_companions(open_model_folder(folder), str(folder))
    marker = path / MARKER
    if marker.exists() and UNFINISHED in read_json(marker):
        raise MergestreamError(f"{folder} is being written by an export, or one was cut short there; export it again")
    if folder is url:
        if not objects and not any(path.iterdir()):
            raise MergestreamError(f"{url} holds neither a model nor its configuration; check the address")
        return Location(path, str(url), objects)
    if url.name not in objects:
        raise MergestreamError(f"{url} does not exist")
    return Location(path / url.name, str(url), objects)


def locate_here(source: str) -> Path | None:
    """The same without asking the hub: None where it is not on this machine."""
    try:
        path = _resolved(source)
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError, UsageError):  # a name that no path can have
        return None
    return cached(source) if _is_hub_id(source) else None


def _resolved(source: str | Path) -> Path:
    """Of a file only the directory is resolved: a cache's link tells the format by its name, its target does not."""
    path = local_path(source).expanduser()
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def without_revision(source: str) -> str:
    """A hub id without ``hf://`` and ``@commit``; a path as it is, whatever is in it."""
    return source.removeprefix("hf://").partition("@")[0] if _HUB_ID.fullmatch(source) else source


def is_commit(source: str) -> bool:
    """Whether it is what the hub has under a commit, ``org/name@commit``, and no path."""
    return bool(_HUB_ID.fullmatch(source)) and re.fullmatch(r"[0-9a-f]{40}", source.partition("@")[2]) is not None


def hub_name(source: str) -> str | None:
    """The id without its ``@commit`` of what is no local path, but may be on the hub; else None."""
    is_id = _is_hub_id(source) and (parse_url(source) is not None or not _resolved(source).exists())
    return without_revision(source) if is_id else None


def shown(source: str, given: str) -> str:
    """How others are told of a model, in a card or a recipe: by its hub id and commit, else as the user has typed it.

    Where nobody knows that, in older stores, of a path only its last part: where things lie is nobody's business.
    """
    if not Path(source).is_absolute():
        return source
    return _CREDENTIALS.sub("://", given.partition("?")[0] if "://" in given else given) or Path(source).name


@contextmanager
def system_errors_explained(source: str | Path) -> Iterator[None]:
    """What the system has against it, in a sentence: no permission, a name too long, a home that does not exist."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MergestreamError(f"{source} cannot be opened: {reason}") from error


def _is_hub_id(source: str | Path) -> bool:
    """Whether a name that is no local path may be one on the hub."""
    return isinstance(source, str) and bool(_HUB_ID.fullmatch(source)) and not is_weight_file(source)
