"""`Storage`: the files of a store or an export, in a local directory or in a folder of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mergestream.errors import MergestreamError
from mergestream.schema import BACKUP, damaged, parse
from mergestream.storage.cache import read_cached
from mergestream.storage.transfer import start, wait_all

RANGE = 4 << 20
"""Bytes of one request: its latency costs about as much as the transfer of so many bytes"""
UNFINISHED = "unfinished"
"""A key in the marker of a folder in a bucket until all its objects are uploaded"""


class FileReader(Protocol):
    """Reads ranges of files that were listed."""

    def read_range(self, file: StoredFile, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` to ``end``; an error if the file has changed since it was listed."""


@dataclass(frozen=True)
class StoredFile:
    """A file as it was listed: its place, size and version."""

    storage: FileReader = field(compare=False, repr=False)
    key: str
    """The name in the storage, with its folders"""
    size: int
    tag: str
    """Changes with the content: an ETag, or the time of modification"""
    version: str | None = None
    """A second sign of a change: the version of the object, or the inode"""
    changed: float = field(default=0.0, compare=False)
    """Time of modification, in seconds since 1970"""

    def __str__(self) -> str:
        return f"{self.storage}/{self.key}"

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    def read(self, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes of a range, from the cache if there is one."""
        end = self.size if end is None else end
        if begin >= end:
            return b""

        def fetch() -> bytes:
            data = self.storage.read_range(self, begin, end)
            if len(data) != end - begin:
                wanted = end - begin
                raise MergestreamError(f"{self} gave {len(data)} bytes where {wanted} were asked for; copy it again")
            return data

        if not self.tag:  # a cached range could be of another version
            return fetch()
        return read_cached(f"{self} {self.size} {self.tag} {self.version} {begin}-{end}", fetch)

    def read_into(self, buffer: memoryview, begin: int) -> None:
        """Fill a buffer with the bytes from ``begin`` on, by several requests at a time."""

        def fetch(offset: int) -> None:
            stop = min(offset + RANGE, len(buffer))
            buffer[offset:stop] = self.read(begin + offset, begin + stop)

        wait_all(start(fetch, offset) for offset in range(0, len(buffer), RANGE))


class Listing(NamedTuple):
    """One level of a folder: its files by name, and the names of its folders."""

    files: Mapping[str, StoredFile]
    folders: tuple[str, ...]


class ModelFolder(FileReader, Protocol):
    """A folder of remote files that holds a model: a folder of a bucket, or a commit on the hub."""

    def scan(self) -> Listing:
        """List the folder, but not what is below its folders."""

    def list_below(self, folder: str = "") -> Mapping[str, StoredFile]:
        """List all files below a folder, by their keys."""


class Journal(Protocol):
    """A log of finished work; what it has lost is done again."""

    def write(self, line: bytes, durable: int) -> None:
        """Append a line; ``durable`` counts the tensors that are safe in the storage by now."""

    def close(self) -> None: ...


class Storage(FileReader, Protocol):
    """Named files of a store or an export; ``open_storage`` makes one of a path or a URL.

    Names are relative, with ``/`` between folders. A file is replaced whole: readers see the old one or the new one.
    """

    has_lock: bool
    """Whether `writing` keeps other writers out; else they run side by side, and the first to commit wins"""

    @property
    def name(self) -> str:
        """The last part of the path or URL."""

    @property
    def address(self) -> str:
        """The absolute path or the URL."""

    def path(self, name: str = "") -> Path | None:
        """The local path of a file or folder; None for a bucket."""

    @property
    def is_writable(self) -> bool: ...

    # --- reading

    def files(self, folder: str = "") -> Mapping[str, StoredFile]:
        """All files below a folder, by their names from there; a bucket is listed once until something is written."""

    def folders(self, folder: str) -> list[str]:
        """The names of the folders in a folder."""

    def stat(self, name: str) -> StoredFile | None:
        """The size and version of a file; None if it does not exist."""

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if it does not exist."""

    def fetch(self, name: str) -> tuple[bytes, StoredFile] | None:
        """The content of a small file as it is now, and its version; later listings are not older than this."""

    def is_current(self, file: StoredFile | None) -> bool:
        """Whether a file still has the version that was fetched; costs one request, and no download."""

    def check(self) -> None:
        """Refuse a directory that holds links or pipes: files of a store are never followed out of it."""

    # --- writing

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there."""

    @property
    def is_free(self) -> bool:
        """Whether a new store may be made here: nothing is there, except what an interrupted `init` has left."""

    def creating(self) -> AbstractContextManager[None]:
        """Make the directory; an error inside the block removes it again."""

    def writing(self, name: str) -> AbstractContextManager[None]:
        """Be the only writer: by a lock, or by compare-and-swap of the file ``name``. StoreBusyError for the loser."""

    def put(self, name: str, content: bytes | Iterable[bytes]) -> None:
        """Write or replace a file."""

    def put_if(self, name: str, data: bytes, before: StoredFile | None) -> StoredFile:
        """Replace a file if it is still ``before`` (None: if it does not exist), else raise StoreBusyError.

        The file is complete afterwards, but a local one may be lost by a power cut until `sync`.
        """

    def copy(self, name: str, to: str) -> None:
        """Copy a file that is never changed: a hard link, or a copy inside the bucket."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; it is no error if they are gone already."""

    def remove(self, folder: str) -> None:
        """Delete a folder with all its files."""

    def sync(self, folder: str = "") -> None:
        """Make the names in a folder durable."""

    def drafting(self, folder: str) -> AbstractContextManager[Path]:
        """A local directory to write a new folder in; at the end of the block it is complete and durable."""

    def replacing(self, marker: str, check: Callable[[], None]) -> AbstractContextManager[Path]:
        """A local directory that replaces all files at the end of the block, or none of them.

        ``check`` may refuse to replace what is there. The draft must hold a JSON file ``marker``: in a bucket it says
        that the folder is unfinished until all files are uploaded.
        """

    def journal(self, folder: str) -> Journal:
        """Open the journal of a folder for appending."""

    def read_journal(self, folder: str) -> bytes:
        """All lines that were written to the journal of a folder."""

    def new_mark(self) -> str:
        """A suffix that keeps folders of concurrent writers apart; empty where a lock does."""

    # --- local copies and temporary files

    def save_to(self, name: str, path: Path) -> None:
        """Copy a file to a local path: a hard link if possible, or a download."""

    def workspace(self) -> AbstractContextManager[Path]:
        """A local directory for temporary files, in the storage itself if it is local; removed at the end."""

    def scratch(self) -> AbstractContextManager[Storage]:
        """A temporary storage that other machines see as they see this one; removed at the end."""

    def clean_scratch(self) -> None:
        """Remove temporary files that killed processes have left."""


def total_bytes(files: Mapping[str, StoredFile]) -> int:
    """The size of all files together."""
    return sum(file.size for file in files.values())


def read_text(storage: Storage, name: str) -> str:
    """The text of a file of a store."""
    where, data = f"{storage}/{name}", storage.read(name)
    if data is None:
        raise MergestreamError(f"{where} cannot be read: it does not exist; {BACKUP}")
    try:
        return data.decode()
    except ValueError as error:
        raise damaged(where, "it is not text") from error


def read_json(storage: Storage, name: str) -> dict[str, Any]:
    """The JSON object in a file of a store."""
    return parse(read_text(storage, name), f"{storage}/{name}")
