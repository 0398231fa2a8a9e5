"""Replacing a whole directory, or all objects of a folder, by a draft.

A directory is exchanged atomically. In a bucket a marker object says that the folder is unfinished until all objects
are uploaded; compare-and-swap of the marker lets only one of two writers finish.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.errors import MergestreamError, StoreBusyError
from mergestream.files import exchange, new_directories, sync_directory, sync_file, to_json
from mergestream.storage.base import UNFINISHED, Storage

if TYPE_CHECKING:
    from mergestream.storage.bucket import BucketStorage

_LOCK = "lock"


@contextmanager
def replace_directory(directory: Path, check: Callable[[], None]) -> Iterator[Path]:
    """Yield an empty draft, which replaces the directory at the end; ``check`` may refuse to replace what is there."""
    place = Path(os.path.realpath(directory))  # what is checked is what is replaced
    work = place.with_name(f".{place.name}.mergestream")
    with new_directories(work.parent), _locked(work, directory):
        _settle(work, place)
        check()  # a killed process may have left an old directory, which is back now
        try:
            draft = work / "model"
            draft.mkdir()
            yield draft
            _take_place(draft, place, check)
        finally:
            with suppress(OSError):  # the next one settles it
                _settle(work, place)


def _take_place(draft: Path, place: Path, check: Callable[[], None]) -> None:
    """Flush the draft and let it replace the directory; if that fails, everything is as before."""
    for path in (*draft.rglob("*"), draft):
        sync_file(path)
    check()  # once more: writing the draft may have taken long
    aside, replaces = draft.with_name("replaced"), place.exists()
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


def _settle(work: Path, place: Path) -> None:
    """Put back a directory that was moved aside and not replaced, and remove everything else."""
    aside = work / "replaced"
    if aside.exists() and not place.exists():
        aside.rename(place)
    for path in work.iterdir():
        if path.name != _LOCK:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(work: Path, directory: Path) -> Iterator[None]:
    """Make a working directory, or find the one of a killed process, and lock it until it is removed."""
    with suppress(FileExistsError):
        work.mkdir()
    if work.is_symlink():
        raise MergestreamError(f"{work}, where the draft of {directory} would be written, is a link; remove it")
    try:
        lock = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:  # its holder has just removed it
        raise _busy(directory) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), (work / _LOCK).stat()):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):
            raise _busy(directory) from None
        try:
            yield
        finally:
            with suppress(OSError):
                (work / _LOCK).unlink()
                work.rmdir()
    finally:
        os.close(lock)


@contextmanager
def replace_objects(storage: BucketStorage, marker: str, check: Callable[[], None]) -> Iterator[Path]:
    """Yield an empty draft, which is uploaded at the end; its JSON file ``marker`` is the marker."""
    with storage.workspace() as temporary:
        draft = temporary / "model"
        draft.mkdir()
        yield draft
        found = storage.fetch(marker)
        check()
        before = found[1] if found else None
        files = {path.relative_to(draft).as_posix(): path for path in sorted(draft.rglob("*")) if path.is_file()}
        content = json.loads(files.pop(marker).read_bytes())
        try:
            claim = storage.put_if(marker, to_json({**content, UNFINISHED: True}).encode(), before)
            for name, path in files.items():
                storage.put(name, path)
            storage.delete(storage.files().keys() - files.keys() - {marker})
            storage.put_if(marker, to_json(content).encode(), claim)
        except StoreBusyError:  # the objects are the other writer's now
            raise _busy(storage) from None
        except BaseException:
            if before is None:
                with suppress(MergestreamError):
                    storage.delete([*files, marker])
            raise


def _busy(place: Path | Storage) -> StoreBusyError:
    return StoreBusyError(f"{place} is being written by another export; wait until it is done")
