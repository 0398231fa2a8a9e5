"""Small files that are either the old ones or the new ones, whatever happens in between."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from mergestream.errors import MergestreamError

_OTHER_FILES = 512
"""That a process has open: the base's shards, an expert's, libraries"""
_HERE, _RENAME_EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of <fcntl.h>"""
BESIDE = ".new"
"""What the name of a file ends in until it is whole"""


def sync_file(path: Path) -> None:
    """Bring to the disk what is in a file, or the names that are in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_directory = sync_file


def replace_text(path: Path, text: str) -> None:
    """Replace a file at once: written beside, flushed to the disk, renamed. What goes wrong is an OSError."""
    beside = path.with_name(path.name + BESIDE)
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_directory(path.parent)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a file at once; what goes wrong is told to the user."""
    try:
        replace_text(path, text)
    except OSError as error:
        raise MergestreamError(f"{path} cannot be written: {error.strerror}") from error


def write_json(path: Path, data: Any) -> None:
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file: nothing that we read is another kind of JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MergestreamError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise MergestreamError(f"{path} is not valid JSON; restore it, or download it again") from error
    if not isinstance(content, dict):
        raise MergestreamError(f"{path} is not a JSON object; restore it, or download it again")
    return content


def allow_open_files(count: int) -> None:
    """Have the system let this process open so many files more, as far as it may: few are the default."""
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, soft), hard))


@contextlib.contextmanager
def directories_made(path: Path) -> Iterator[None]:
    """Make a directory, and those above it; where what follows fails, those that were not there are removed again."""
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


def exchange(new: Path, old: Path, aside: Path) -> None:
    """Let two directories change places: at once where the system can, else with ``old`` at ``aside`` in between.

    What fails leaves both where they were. Where this process is killed in between, there is nothing in the place of
    ``old``, and who comes next can put it back.
    """
    if _exchange_at_once(new, old):
        return
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        if not old.exists():
            aside.rename(old)
        raise
    aside.rename(new)


def _exchange_at_once(one: Path, other: Path) -> bool:
    """Linux can, with most file systems. Whatever it has against it: two renames do as well, or say what is wrong."""
    import ctypes

    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _RENAME_EXCHANGE) == 0


def remove(directory: Path) -> None:
    """Remove a directory that nothing refers to any more; renamed first, so that nobody ever finds half of it."""
    doomed = directory.with_name(f".{directory.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        directory.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def remove_all_but(parent: Path, kept: Collection[str]) -> None:
    """Remove the directories in ``parent`` that are not to be kept, and what a killed removal has left."""
    for directory in sorted(parent.iterdir()) if parent.is_dir() else ():
        if directory.name.endswith(".removed"):
            shutil.rmtree(directory, ignore_errors=True)
        elif directory.name.isdigit() and directory.name not in kept:
            remove(directory)
