"""Small files that are either the old ones or the new ones, whatever happens in between."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from mergestream.errors import MergestreamError, UsageError
from mergestream.objects import url_of

_OTHER_FILES = 512
"""That a process has open: the base's shards, an expert's, libraries"""
_HERE, _RENAME_EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of <fcntl.h>"""
DRAFT_SUFFIX = ".new"
"""What the name of a file ends in until it is whole"""
_REMOVED = ".removed"
"""What the name of a directory ends in while it is being removed"""
_MAKE_ROOM = "; make room and run it again"
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: "; the file system or a limit of the process (ulimit -f) allows no file of that size",
}
MAX_JSON_BYTES = 1 << 28
"""No index is near a tenth of it; what is larger fills the memory."""


def local_path(place: str | Path) -> Path:
    """The path that is meant; what is in object storage has none, and nothing is to be made under its name."""
    if url := url_of(place):
        raise UsageError(f"{url} is in object storage, where only models and stores may be; name a path on a disk")
    return Path(place)


def sync_file(path: Path) -> None:
    """Bring to the disk what is in a file, or the names that are in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


sync_directory = sync_file


def replace_file(path: Path, text: str, *, new: bool = False) -> None:
    """Replace a file at once: written beside, flushed to the disk, renamed. What goes wrong is an OSError, and nothing
    has changed then. One that is to be ``new`` replaces none: FileExistsError."""
    beside = path.with_name(path.name + DRAFT_SUFFIX)
    try:
        beside.unlink(missing_ok=True)  # what a kill has left, or a link that somebody has laid
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        (_rename_to_new if new else _rename)(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise


def _rename(old: Path, new: Path) -> None:
    try:
        old.replace(new)
    except OSError:
        if old.exists():  # else it is done, whatever a file system on the network says
            raise


def _rename_to_new(old: Path, new: Path) -> None:
    try:
        os.link(old, new)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if new.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from None
        old.rename(new)
    else:
        with contextlib.suppress(OSError):  # it is done
            old.unlink()


def replace_text(path: Path, text: str) -> None:
    """Replace a file at once, and bring its name to the disk too. What goes wrong is an OSError."""
    replace_file(path, text)
    sync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a file at once; what goes wrong is told to the user."""
    try:
        replace_text(path, text)
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: Path | str, error: OSError) -> MergestreamError:
    """What is told to the user of a file that could not be written."""
    return MergestreamError(f"{path} cannot be written: {error.strerror}{_REMEDIES.get(error.errno or 0, '')}")


def to_json(data: Any) -> str:
    """The text of a file."""
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, data: Any) -> None:
    write_text(path, to_json(data))


def read_json(path: Path, *, finite: bool = False) -> dict[str, Any]:
    """The object in a file: nothing that we read is another kind of JSON.

    Python takes Infinity and NaN for JSON, and transformers writes them; ``finite`` refuses them.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would keep us waiting
            raise MergestreamError(f"{path} is no regular file")
        if path.stat().st_size > MAX_JSON_BYTES:
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


@contextlib.contextmanager
def new_directories(path: Path) -> Iterator[None]:
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
    doomed = directory.with_name(f".{directory.name}{_REMOVED}")
    if doomed.exists():
        shutil.rmtree(doomed)
    if directory.exists():
        directory.rename(doomed)
        shutil.rmtree(doomed)


def remove_other_directories(parent: Path, kept: Collection[str]) -> None:
    """Remove the directories in ``parent`` that are not to be kept, and what a killed removal has left."""
    for directory in sorted(parent.iterdir()) if parent.is_dir() else ():
        if directory.name.endswith(_REMOVED):
            shutil.rmtree(directory)
        elif directory.name[:1].isdigit() and directory.name not in kept:
            remove(directory)
