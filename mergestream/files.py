"""Small files that are either the old ones or the new ones, whatever happens in between."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mergestream.errors import MergestreamError

_OTHER_FILES = 512
"""That a process has open: the base's shards, an expert's, libraries"""
BESIDE = ".new"
"""What the name of a file ends in until it is whole"""
_LARGEST_JSON = 1 << 28
"""No index is near a tenth of it; what is larger fills the memory."""


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


def read_json(path: Path, *, finite: bool = False) -> dict[str, Any]:
    """The object in a file: nothing that we read is another kind of JSON.

    Python takes Infinity and NaN for JSON, and transformers writes them; ``finite`` refuses them.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would keep us waiting
            raise MergestreamError(f"{path} is no regular file")
        if path.stat().st_size > _LARGEST_JSON:
            raise MergestreamError(f"{path} is too large to be the JSON that is expected there")
        text = path.read_text(encoding="utf-8")
        content = json.loads(text)
        if "\\u" in text or finite:  # half a surrogate pair is valid JSON, but no text
            json.dumps(content, ensure_ascii=False, allow_nan=not finite).encode()
    except OSError as error:
        raise MergestreamError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        what = "valid JSON of finite numbers" if finite else "valid JSON"
        raise MergestreamError(f"{path} is not {what}; restore it, or download it again") from error
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
