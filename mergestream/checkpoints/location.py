"""Finding the files of a model: a local path, a URL of object storage, or a hub id that is downloaded.

Of a model in object storage only the small files are downloaded; its weights are read by range.
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple

from mergestream.checkpoints.hub import cached, download
from mergestream.checkpoints.layout import CODE, MARKER, is_index, is_weight_file, may_go_along, names_code
from mergestream.errors import MergestreamError, UsageError, known_as
from mergestream.escaping import is_utf8
from mergestream.files import read_json
from mergestream.storage import UNFINISHED, StoredFile, Url, local_path, open_storage, parse_url
from mergestream.storage.base import check_small, transfers

_HUB_ID = re.compile(r"(hf://)?[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_CREDENTIALS = re.compile(r"://[^/]*@")


class Location(NamedTuple):
    """A local file or directory, and the source that it came from: a path, a URL, or ``org/name@commit``."""

    path: Path
    source: str
    objects: Mapping[str, StoredFile] = MappingProxyType({})
    """Remote files of the directory, by name: weights in object storage"""

    @property
    def directory(self) -> Location:
        """The directory of a file."""
        return Location(self.path.parent, self.source.rpartition("/")[0], self.objects)

    @property
    def names(self) -> set[str]:
        """The names of all files in a directory."""
        return {entry.name for entry in self.path.iterdir()} | self.objects.keys()


def locate(source: str | Path, *, weights: bool = True) -> Location:
    """Find a model by its path, URL or hub id ``[hf://]org/name[@revision]``; download it from the hub if necessary.

    Without ``weights`` only the configuration and its companions are downloaded.
    """
    url = parse_url(source)
    with system_errors_explained(source):
        if url and url.scheme == "hf":
            if not _is_hub_id(str(url)):
                raise UsageError(f"{url} is not a model on the hub: give hf://org/name[@revision]")
            return Location(*download(str(url).removeprefix("hf://"), weights=weights))
        if url:
            return _locate_remote(url)
        path = _resolved(source)
        if path.exists():
            if not is_utf8(str(path)):  # it goes into JSON files and model cards
                raise MergestreamError(f"{path} is not valid UTF-8; rename it")
            return Location(path, str(path))
        if _is_hub_id(source):
            return Location(*download(str(source), weights=weights))
    raise MergestreamError(f"{source} does not exist: give a directory, a file, or a hub id org/name[@revision]")


def _locate_remote(url: Url) -> Location:
    """Find a model in object storage, and download all of its files except the weights."""
    folder = url.parent if is_weight_file(url.key) else url
    files = open_storage(str(folder)).files()
    here = {name for name in files if "/" not in name}
    small = {name for name in files if may_go_along(name)} | set(filter(is_index, here))
    directory = _download(folder, frozenset(files[name] for name in small))
    if names_code(directory):
        small |= {name for name in files if name.endswith(CODE)}
        directory = _download(folder, frozenset(files[name] for name in small))
    marker = directory / MARKER
    if marker.exists() and UNFINISHED in read_json(marker):
        raise MergestreamError(f"{folder} is being written by an export, or by one that was interrupted; export again")
    location = Location(directory, str(folder), {name: files[name] for name in filter(is_weight_file, here)})
    if folder is url:
        if not location.names:
            raise MergestreamError(f"{url} holds neither a model nor its configuration; check the address")
        return location
    if url.name not in location.objects:
        raise MergestreamError(f"{url} does not exist")
    return Location(location.path / url.name, str(url), location.objects)


@cache
def _download(url: Url, files: frozenset[StoredFile]) -> Path:
    """A temporary directory with these files, the same one as long as they do not change; errors show the URL."""
    if unsafe := [file.key for file in files if not {"", ".", ".."}.isdisjoint(file.key.split("/"))]:
        raise MergestreamError(f"{url} holds {unsafe[0]!r}, which is not a valid file name; remove it")
    for file in files:
        check_small(file)
    temporary = TemporaryDirectory(prefix="mergestream-")
    atexit.register(temporary.cleanup)
    directory = Path(temporary.name) / url.name
    directory.mkdir()
    list(transfers().map(lambda file: file.storage.save_to(file.key, directory / file.key), files))
    known_as(directory, str(url))
    return directory


def locate_here(source: str) -> Path | None:
    """The local path of a model; None if it is not on this machine. The hub is not asked."""
    try:
        path = _resolved(source)
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError, UsageError):  # not a valid path
        return None
    return cached(source.removeprefix("hf://")) if _is_hub_id(source) else None


def _resolved(source: str | Path) -> Path:
    """The absolute path. A link to a file is kept, because in a cache only the link's name tells the format."""
    path = local_path(source).expanduser()
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def without_revision(source: str) -> str:
    """A hub id without ``hf://`` and ``@commit``; a path is not changed."""
    return source.removeprefix("hf://").partition("@")[0] if _HUB_ID.fullmatch(source) else source


def hub_name(source: str) -> str | None:
    """The hub id of a source, without its ``@commit``; None for a local path."""
    is_id = _is_hub_id(source) and (parse_url(source) is not None or not _resolved(source).exists())
    return without_revision(source) if is_id else None


def public_name(source: str, given: str) -> str:
    """The name of a model in cards and recipes: its hub id and commit, or what the user has typed.

    Older stores do not know what was typed. Then it is the last part of the path, to keep local paths private.
    """
    if not Path(source).is_absolute():
        return source
    return _CREDENTIALS.sub("://", given.partition("?")[0] if "://" in given else given) or Path(source).name


@contextmanager
def system_errors_explained(source: str | Path) -> Iterator[None]:
    """Raise errors of the operating system as a sentence about the source."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise MergestreamError(f"{source} cannot be opened: {reason}") from error


def _is_hub_id(source: str | Path) -> bool:
    """Whether a source that is not a local path may be a hub id."""
    return isinstance(source, str) and bool(_HUB_ID.fullmatch(source)) and not is_weight_file(source)
