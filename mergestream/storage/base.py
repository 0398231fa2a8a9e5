"""`Storage`, the files of a store or an export in a directory or a bucket, and `StoredFile`, one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from mergestream.errors import MergestreamError, StoreBusyError
from mergestream.files import MAX_JSON_BYTES
from mergestream.schema import BACKUP, damaged, parse

RANGE = 4 << 20
"""Bytes of one request: its latency costs about as much as the transfer of so many bytes"""
UNFINISHED = "unfinished"
"""A key in the marker of a folder in a bucket until all its objects are uploaded"""


class Storage(ABC):
    """Named files of a store or an export; ``open_storage`` makes one of a path or a URL.

    Names are relative, with ``/`` between folders. A file is replaced whole: readers see the old one or the new one.
    """

    has_lock: ClassVar[bool]
    """Whether `writing` keeps other writers out; else they run side by side, and the first to commit wins"""

    @property
    def address(self) -> str:
        """The absolute path or the URL."""
        return str(self)

    def path(self, name: str = "") -> Path | None:
        """The local path of a file or folder; None for a bucket."""
        return None

    @property
    def is_writable(self) -> bool:
        """Whether this user may write here, as far as that can be told without trying."""
        return True

    # --- reading

    @abstractmethod
    def files(self, folder: str = "") -> Mapping[str, StoredFile]:
        """All files below a folder, by their names from there; a bucket is listed once until something is written."""

    def folders(self, folder: str) -> list[str]:
        """The names of the folders in a folder."""
        return sorted({name.partition("/")[0] for name in self.files(folder) if "/" in name})

    def stat(self, name: str) -> StoredFile | None:
        """The size and version of a file; None if it does not exist."""
        return self.files().get(name)

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if it does not exist."""
        found = self.fetch(name)
        return found[0] if found else None

    @abstractmethod
    def fetch(self, name: str) -> tuple[bytes, StoredFile] | None:
        """The content of a small file as it is now, and its version; later listings are at least as new."""

    @abstractmethod
    def read_range(self, file: StoredFile, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` to ``end``; an error if the file has changed since it was listed."""

    @abstractmethod
    def is_current(self, file: StoredFile | None) -> bool:
        """Whether a file still has the version that was fetched, by one request; later listings are at least as new."""

    @abstractmethod
    def save_to(self, name: str, path: Path) -> None:
        """Copy a file to a local path: a hard link if possible, or a download."""

    def check(self) -> None:  # noqa: B027
        """Refuse a directory that holds links or pipes: files of a store are never followed out of it."""

    # --- writing

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing is there."""

    @property
    def is_free(self) -> bool:
        """Whether a new store may be made here: nothing is there, except what an interrupted `init` has left."""
        return self.is_empty

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[None]:
        """Be the only writer: by a lock, or by compare-and-swap of the file ``name``. StoreBusyError for the loser.

        A directory is made if it does not exist.
        """

    @abstractmethod
    def put_if(self, name: str, data: bytes, before: StoredFile | None) -> StoredFile:
        """Replace a file if it is still ``before`` (None: if it does not exist), else raise StoreBusyError.

        The file is complete afterwards, but a local one may be lost by a power cut until `sync`.
        """

    @abstractmethod
    def copy(self, name: str, to: str) -> None:
        """Copy a file that is never changed: a hard link, or a copy inside the bucket."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete files; it is no error if they are gone already."""

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Delete a folder with all its files."""

    def sync(self, folder: str = "") -> None:  # noqa: B027
        """Make the names in a folder durable."""

    @abstractmethod
    def publish(self, draft: Path, folder: str) -> None:
        """Make the files of a local directory durable as a folder: flush its name, or upload them."""

    @contextmanager
    def drafting(self, folder: str) -> Iterator[Path]:
        """A local directory to write a new folder in; at the end of the block it is complete and durable."""
        self.remove(folder)
        with ExitStack() as temporary:
            draft = self.path(folder) or temporary.enter_context(self.workspace())
            draft.mkdir(parents=True, exist_ok=True)
            yield draft
            self.publish(draft, folder)

    @abstractmethod
    def replacing(self, marker: str, check: Callable[[], None]) -> AbstractContextManager[Path]:
        """A local directory that replaces all files at the end of the block, or none of them.

        ``check`` may refuse to replace what is there. The draft must hold a JSON file ``marker``: in a bucket it says
        that the folder is unfinished until all files are uploaded.
        """

    def new_mark(self) -> str:
        """A suffix that keeps folders of concurrent writers apart; empty where a lock does."""
        return "" if self.has_lock else uuid4().hex[:16]

    # --- temporary files

    @abstractmethod
    def workspace(self) -> AbstractContextManager[Path]:
        """A local directory for temporary files, in the storage itself if it is local; removed at the end."""

    def clean_scratch(self) -> None:  # noqa: B027
        """Remove temporary files that killed processes have left."""


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


@dataclass(frozen=True)
class StoredFile:
    """A file as it was listed: its place, size and version."""

    storage: Storage = field(compare=False, repr=False)
    key: str
    """The name in the storage, with its folders"""
    size: int
    tag: str
    """Changes when the content changes: an ETag, or the time of modification"""
    version: str | None = None
    """Changes too, where there is one: the version of the object, or the inode"""
    changed: float = field(default=0.0, compare=False)
    """Time of modification, in seconds since 1970"""

    def __str__(self) -> str:
        return f"{self.storage}/{self.key}"

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    def read(self, begin: int = 0, end: int | None = None) -> bytes:
        """The bytes of a range; an error if the file has changed, or if it is shorter."""
        end = self.size if end is None else end
        if begin >= end:
            return b""
        data = self.storage.read_range(self, begin, end)
        if len(data) != end - begin:
            raise MergestreamError(f"{self} gave {len(data)} bytes where {end - begin} were asked for; copy it again")
        return data

    def read_into(self, buffer: memoryview, begin: int) -> None:
        """Fill a buffer with the bytes from ``begin`` on, by several requests at a time."""

        def fetch(offset: int) -> None:
            stop = min(offset + RANGE, len(buffer))
            buffer[offset:stop] = self.read(begin + offset, begin + stop)

        list(transfers().map(fetch, range(0, len(buffer), RANGE)))  # raises the first failure, and cancels the others


def check_small(file: StoredFile) -> None:
    """Refuse a file that would fill the memory where a small one is expected."""
    if file.size > MAX_JSON_BYTES:
        raise MergestreamError(f"{file} is too large for the small file that is expected there; move it elsewhere")


def total_bytes(files: Mapping[str, StoredFile]) -> int:
    """The size of all files together."""
    return sum(file.size for file in files.values())


@cache
def transfers() -> ThreadPoolExecutor:
    """The threads for transfers; a transfer must not wait for another one."""
    return ThreadPoolExecutor(8, thread_name_prefix="mergestream-transfer")


def changed(place: Path | Storage) -> StoreBusyError:
    """The error for the loser of two commits."""
    return StoreBusyError(f"{place} was changed by another process in the meantime; run the command again")


def busy(place: Path | Storage) -> StoreBusyError:
    """The error for the loser of two exports to the same place."""
    return StoreBusyError(f"{place} is being written by another export; wait until it is done")
