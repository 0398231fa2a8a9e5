"""Atomic file replacement, durable renames, and small JSON files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mergestream.errors import MergestreamError

_OTHER_FILES = 512
"""Room for other open files: shards of the base and of the expert, libraries"""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Constants of <fcntl.h>"""
DRAFT_SUFFIX = ".new"
"""Suffix of a file that is still being written"""
REMOVED_SUFFIX = ".removed"
"""Suffix of a directory that is being removed"""
AGAIN = "download or copy it again"
"""The remedy for a damaged file of a model"""
_MAKE_ROOM = "; free some disk space and run the command again"
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: "; the file system or a process limit (ulimit -f) does not allow a file of that size",
}
MAX_JSON_BYTES = 1 << 28
"""Refuse larger files of JSON or text, which would fill the memory; real index files are ten times smaller"""


def sync_file(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


sync_directory = sync_file


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically: write a draft beside it, flush it, rename it.

    Raises OSError and changes nothing if that fails.
    """
    beside = path.with_name(path.name + DRAFT_SUFFIX)
    try:
        beside.unlink(missing_ok=True)  # left by a killed process, or a link planted by somebody
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            beside.replace(path)
        except OSError:
            if beside.exists():  # else the rename worked, even if a network file system reports an error
                raise
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically and durably. Raises MergestreamError."""
    try:
        replace_file(path, text.encode())
        sync_directory(path.parent)
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: Path | str, error: OSError) -> MergestreamError:
    """The error for a file that could not be written, with a remedy where one is known."""
    return MergestreamError(f"{path} cannot be written: {error.strerror}{_REMEDIES.get(error.errno or 0, '')}")


def to_json(data: Any) -> str:
    """Serialize to indented JSON; NaN and infinity are refused."""
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, data: Any) -> None:
    write_text(path, to_json(data))


def read_small(path: Path) -> str:
    """The text of a small file. Raises MergestreamError, OSError, or ValueError for what is not UTF-8."""
    if path.exists() and not path.is_file():  # reading a pipe could block for ever
        raise MergestreamError(f"{path} is not a regular file")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise MergestreamError(f"{path} is too large for the small file that is expected there")
    return path.read_text(encoding="utf-8")


def read_json(path: Path, *, finite: bool = False) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Python accepts Infinity and NaN, and transformers writes them; ``finite`` refuses them.
    """
    try:
        text = read_small(path)
        content = json.loads(text)
        if "\\u" in text or finite:  # an unpaired surrogate is valid JSON but not valid text
            json.dumps(content, ensure_ascii=False, allow_nan=not finite).encode()
    except OSError as error:
        raise MergestreamError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        what = "valid JSON with finite numbers" if finite else "valid JSON"
        raise MergestreamError(f"{path} is not {what}; restore it, or download it again") from error
    if not isinstance(content, dict):
        raise MergestreamError(f"{path} is not a JSON object; restore it, or download it again")
    return content


def allow_open_files(count: int) -> None:
    """Raise the soft limit of open files so that ``count`` more can be opened, if the hard limit allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, soft), hard))


@contextlib.contextmanager
def new_directories(path: Path) -> Iterator[None]:
    """Create a directory and its parents; remove the new ones again if the body of the ``with`` fails."""
    made = [directory for directory in (path, *path.parents) if not directory.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for directory in made:
            sync_directory(directory.parent)
        yield
    except BaseException:
        for directory in made:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise


def exchange(new: Path, old: Path, aside: Path) -> Path:
    """Put ``new`` in the place of ``old``: they swap where the system supports it, else ``old`` moves ``aside`` first.

    Returns where the old directory is now. A failure leaves both in place. If the process is killed between the
    renames, ``old`` is found at ``aside`` and the next process can put it back.
    """
    if _exchange_at_once(new, old):
        return new
    sync_directory(aside.parent.parent)  # the folder that holds the only copy for a moment must last
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        if not old.exists():
            aside.rename(old)
        raise
    return aside


def _exchange_at_once(one: Path, other: Path) -> bool:
    """Swap with renameat2, which Linux supports on most file systems; False if it failed for any reason."""
    import ctypes

    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def remove(directory: Path) -> None:
    """Remove a directory; rename it first, so that no reader ever sees a part of it."""
    doomed = directory.with_name(f".{directory.name}{REMOVED_SUFFIX}")
    if doomed.exists():
        shutil.rmtree(doomed)
    if directory.exists():
        directory.rename(doomed)
        shutil.rmtree(doomed)
