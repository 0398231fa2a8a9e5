"""What a store is made of: files and directories of its own, never links, for a store may come from somebody else."""

from __future__ import annotations

import os
from pathlib import Path

from mergestream.errors import MergestreamError
from mergestream.store.mirror import Mirror, Place

CANDIDATE = "candidate"
"""The model that a review looks at, while it does"""


def check_parts(store: Place) -> None:
    """Refuse a store whose parts are links, for what is written or removed through them lies elsewhere, or pipes and
    the like, for which one waits for ever. The store itself may be reached through a link; a bucket has none."""
    if isinstance(store, Mirror):
        return
    _check_entries(store)
    for kind in ("steps", "experts"):
        for entry in _check_entries(store / kind):
            _check_entries(Path(entry))


def _check_entries(directory: Path) -> list[os.DirEntry[str]]:
    """What is in a directory; nothing where a writer has just removed it, or where it is none."""
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
            raise MergestreamError(
                f"{entry.path} is {kind}, and a store is made of files and directories of its own; "
                "remove it, or put in its place what it stands for"
            )
    return entries
