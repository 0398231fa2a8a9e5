"""`LocalStorage`: a directory on this machine, with atomic file replacement and one writer at a time by a file lock."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from mergestream.errors import MergestreamError, StoreBusyError
from mergestream.files import (
    DRAFT_SUFFIX,
    REMOVED_SUFFIX,
    exchange,
    new_directories,
    remove,
    replace_file,
    sync_directory,
    sync_file,
    write_error,
)
from mergestream.storage.base import Storage, StoredFile, busy, changed, check_small

_LOCK, _LOCK_FLAGS = "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_WORKSPACE = "candidate"


class LocalStorage(Storage):
    """The files below a directory."""

    has_lock = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __str__(self) -> str:
        return str(self._directory)

    @property
    def address(self) -> str:
        return str(self._directory.resolve())

    def path(self, name: str = "") -> Path:
        return self._directory / name

    @property
    def is_writable(self) -> bool:
        return os.access(self._directory, os.W_OK)

    # --- reading

    def files(self, folder: str = "") -> dict[str, StoredFile]:
        root = self.path(folder)
        found = {}
        for path in sorted(root.rglob("*")):
            with suppress(FileNotFoundError):  # a writer has removed it just now
                if path.is_file():
                    found[path.relative_to(root).as_posix()] = self._describe(path, path.stat())
        return found

    def _describe(self, path: Path, stat: os.stat_result) -> StoredFile:
        key = path.relative_to(self._directory).as_posix()
        return StoredFile(self, key, stat.st_size, str(stat.st_mtime_ns), str(stat.st_ino), stat.st_mtime)

    def folders(self, folder: str) -> list[str]:
        try:
            with os.scandir(self.path(folder)) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def stat(self, name: str) -> StoredFile | None:
        path = self.path(name)
        try:
            return self._describe(path, path.stat())
        except OSError:
            return None

    def fetch(self, name: str) -> tuple[bytes, StoredFile] | None:
        path = self.path(name)
        try:
            if not path.is_file():  # opening a pipe would block
                return None
            with path.open("rb") as file:
                found = self._describe(path, os.fstat(file.fileno()))
                check_small(found)
                return file.read(), found
        except FileNotFoundError:
            return None
        except OSError as error:
            raise MergestreamError(f"{path} cannot be read: {error.strerror}") from error

    def read_range(self, file: StoredFile, begin: int, end: int) -> bytes:
        with self.path(file.key).open("rb") as opened:
            return os.pread(opened.fileno(), end - begin, begin)

    def is_current(self, file: StoredFile | None) -> bool:
        return file is not None and self.stat(file.key) == file

    def check(self) -> None:
        _check_entries(self._directory)
        for kind in ("steps", "experts", "inputs"):
            for entry in _check_entries(self.path(kind)):
                _check_entries(Path(entry))

    # --- writing

    @property
    def is_empty(self) -> bool:
        return not self._directory.exists() or (self._directory.is_dir() and not any(self._directory.iterdir()))

    @property
    def is_free(self) -> bool:
        if self.is_empty:
            return True
        return self._directory.is_dir() and all(
            path.name == _LOCK or path.name.endswith(DRAFT_SUFFIX) for path in self._directory.iterdir()
        )

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Hold the lock; the operating system drops it when its holder dies."""
        with new_directories(self._directory):
            try:
                descriptor = os.open(self.path(_LOCK), _LOCK_FLAGS, 0o666)
            except OSError as error:
                raise MergestreamError(f"{self} cannot be written to: {error.strerror}") from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                who = holder or "another process"
                raise StoreBusyError(f"{self} is being written to by {who}; wait until it is done") from None
            with suppress(OSError):  # only for the message above; a full disk must not stop an undo
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def put_if(self, name: str, data: bytes, before: StoredFile | None) -> StoredFile:
        path = self.path(name)
        if self.stat(name) != before:
            raise changed(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, data)
            return self.stat(name) or StoredFile(self, name, len(data), "")
        except OSError as error:
            raise write_error(path, error) from error

    def copy(self, name: str, to: str) -> None:
        self.save_to(name, self.path(to))

    def save_to(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            os.link(self.path(name), path)
        except OSError:  # a file system without hard links
            shutil.copyfile(self.path(name), path)
            sync_file(path)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self.path(name).unlink(missing_ok=True)

    def remove(self, folder: str) -> None:
        remove(self.path(folder))

    def sync(self, folder: str = "") -> None:
        sync_directory(self.path(folder))

    def publish(self, draft: Path, folder: str) -> None:
        sync_directory(draft.parent)

    def replacing(self, marker: str, check: Callable[[], None]) -> AbstractContextManager[Path]:
        return _replace_directory(self._directory, check)

    # --- temporary files

    @contextmanager
    def workspace(self) -> Iterator[Path]:
        directory = self.path(_WORKSPACE)
        try:
            yield directory
        finally:
            with suppress(OSError):  # the next writer removes it
                remove(directory)

    def clean_scratch(self) -> None:
        remove(self.path(_WORKSPACE))
        for half_removed in self._directory.glob(f"*/.*{REMOVED_SUFFIX}"):
            shutil.rmtree(half_removed)
        for unfinished in self._directory.glob(f"*.json{DRAFT_SUFFIX}"):
            unfinished.unlink(missing_ok=True)


def _check_entries(directory: Path) -> list[os.DirEntry[str]]:
    """The entries of a directory, all of them files or directories; none if a writer has just removed it."""
    try:
        with os.scandir(directory) as found:
            entries = list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise MergestreamError(f"{directory} cannot be read: {error.strerror}") from error
    for entry in entries:
        if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
            kind = "a symbolic link" if entry.is_symlink() else "neither a file nor a directory"
            raise MergestreamError(f"{entry.path} is {kind}, which a store never contains; replace it by its content")
    return entries


@contextmanager
def _replace_directory(directory: Path, check: Callable[[], None]) -> Iterator[Path]:
    """Yield an empty draft, which replaces the directory at the end; ``check`` may refuse to replace what is there."""
    place = Path(os.path.realpath(directory))  # a link that changes now changes nothing
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
            with suppress(OSError):  # the next export cleans up
                _settle(work, place)


def _take_place(draft: Path, place: Path, check: Callable[[], None]) -> None:
    """Flush the draft and let it replace the directory; if that fails, everything is as before."""
    for path in (*draft.rglob("*"), draft):
        sync_file(path)
    check()  # once more: writing the draft may have taken long
    replaced = None
    if place.exists():
        replaced = exchange(draft, place, draft.with_name("replaced"))
    else:
        draft.rename(place)
    try:
        sync_directory(place.parent)
    except OSError:
        if replaced:
            exchange(replaced, place, draft.with_name("withdrawn"))
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
        lock = os.open(work / _LOCK, _LOCK_FLAGS, 0o666)
    except FileNotFoundError:  # its holder has just removed it
        raise busy(directory) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), (work / _LOCK).stat()):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):
            raise busy(directory) from None
        try:
            yield
        finally:
            with suppress(OSError):
                (work / _LOCK).unlink()
                work.rmdir()
    finally:
        os.close(lock)
