"""A directory that is replaced whole, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mergestream import __version__
from mergestream.checkpoints import float_name
from mergestream.checkpoints.layout import MARKER
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.errors import MergestreamError, StoreBusyError, UsageError
from mergestream.export.bucket import BucketOutput
from mergestream.export.places import is_export, refuse_around, refuse_within, store_within
from mergestream.files import exchange, new_directories, sync_directory, sync_file, to_json
from mergestream.storage import parse_url
from mergestream.storage.bucket import BucketStorage

_LOCK = "lock"


@dataclass(frozen=True)
class Output:
    """A directory to be; all is written beside it and renamed, so there is never half a model, nor an old file.

    In object storage it is a folder of objects: all is written on this machine and uploaded.
    """

    path: Path
    dtype: str | None = None
    """As people name it, and then as torch does; every tensor keeps the base's by default"""
    max_shard_size: int = DEFAULT_SHARD_SIZE
    overwrite: bool = False
    command: str | None = None
    """That makes it, for the model card"""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", float_name(self.dtype))
        self._refuse_to_destroy()

    def __str__(self) -> str:
        return str(self._bucket.folder.url if self._bucket else self.path)

    def keep_off(self, *sources: str | Path) -> None:
        """Refuse an output that is, lies in or holds one of the sources, or lies in any store."""
        if self._bucket:
            self._bucket.keep_off(*sources)
        else:
            refuse_within(self.path, *sources)
            refuse_around(self.path, *sources)

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """A directory that takes the place of the output when all has gone well; what is beside it is removed then."""
        try:
            with self._workplace() as work:
                draft = work / "model"
                draft.mkdir()
                yield draft
                if not (draft / MARKER).exists():
                    self.mark(draft, {})
                if self._bucket:
                    self._bucket.publish(draft)
                else:
                    self._put_in_place(draft)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise MergestreamError(f"{self} was not written: {error.strerror or error}{where}") from error

    def mark(self, draft: Path, recipe: Mapping[str, Any]) -> None:
        """Say in the draft what it is, and how to make it again."""
        marker = {"mergestream": __version__, "command": self.command, **recipe}
        (draft / MARKER).write_text(to_json(marker), encoding="utf-8")

    @cached_property
    def _bucket(self) -> BucketOutput | None:
        url = parse_url(self.path)
        if url and url.scheme == "hf":
            raise UsageError(f"{url} is on the hub: write to a disk, and add --push {url.bucket}/{url.key}")
        return BucketOutput(BucketStorage(url), self.overwrite) if url else None

    @cached_property
    def _place(self) -> Path:
        """Where it is to be: links are followed, so that what is looked at is what is replaced."""
        return Path(os.path.realpath(self.path))

    def _refuse_to_destroy(self) -> None:
        """Refuse a place where there is anything but an earlier export, which may be replaced."""
        if self._bucket:
            return self._bucket.refuse_to_destroy()
        place = self._place
        try:
            if place.exists() and not place.is_dir():
                raise MergestreamError(f"{self.path} is a file; choose another place")
            if not place.exists() or not any(place.iterdir()):
                return
            if not is_export(place):
                raise MergestreamError(f"{self.path} is not empty, and no export of mergestream; choose another place")
            if not self.overwrite:
                raise MergestreamError(f"{self.path} exists already; pass --overwrite to replace it")
            if store := store_within(place):
                raise MergestreamError(f"{self.path} holds the store {store}; choose another place")
        except OSError as error:
            raise MergestreamError(f"{self.path} cannot be replaced: {error.strerror}") from error

    @contextmanager
    def _workplace(self) -> Iterator[Path]:
        """A directory beside the output, for one export at a time; what a killed one has left is settled first."""
        if self._bucket:
            with TemporaryDirectory(prefix="mergestream-") as temporary:
                yield Path(temporary)
            return
        work = self._place.with_name(f".{self._place.name}.mergestream")
        with new_directories(work.parent), _held(work, self.path):
            self._settle(work)
            self._refuse_to_destroy()  # again: there may be an old export once more
            try:
                yield work
            finally:
                with suppress(OSError):  # it is in its place, or an error is on its way; the next export settles it
                    self._settle(work)

    def _settle(self, work: Path) -> None:
        """Put an old export back that was to be replaced and was not, and remove all else."""
        aside = _aside(work)
        if aside.exists() and not self._place.exists():
            aside.rename(self._place)
        for path in work.iterdir():
            if path.name != _LOCK:
                shutil.rmtree(path, ignore_errors=True)

    def _put_in_place(self, draft: Path) -> None:
        """Flush all that was written, and let it take its place; where that fails, all is as it was."""
        for path in (*draft.rglob("*"), draft):
            sync_file(path)
        self._refuse_to_destroy()  # once more: it took a while
        place, aside, replaces = self._place, _aside(draft.parent), self._place.exists()
        if replaces:
            exchange(draft, place, aside)
        else:
            draft.rename(place)
        try:
            sync_directory(place.parent)
        except OSError:
            if replaces:
                exchange(draft, place, aside)
            else:
                place.rename(draft)
            raise


def _aside(work: Path) -> Path:
    """Where an old export is while the new one takes its place."""
    return work / "replaced"


@contextmanager
def _held(work: Path, path: Path) -> Iterator[None]:
    """Make a directory, or find what a killed process has left of it, and hold it alone until it is removed."""
    while (lock := _lock(work, path)) is None:
        continue
    try:
        yield
    finally:
        with suppress(OSError):
            (work / _LOCK).unlink()
            work.rmdir()
        os.close(lock)


def _lock(work: Path, path: Path) -> int | None:
    """A lock that the system drops when its holder dies; None where a holder has removed it before we got it."""
    with suppress(FileExistsError):
        work.mkdir()
    if work.is_symlink():
        raise MergestreamError(f"{work}, where {path} would be written, is a link; remove it")
    with ExitStack() as stack:
        try:
            lock = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), (work / _LOCK).stat()):
                return None
        except FileNotFoundError:
            return None
        except BlockingIOError:
            raise StoreBusyError(f"{path} is being written by another export; wait until it is done") from None
        stack.pop_all()
        return lock
