"""The cache directory: everything fetched, prepared, trained or measured, each under the digest of what made it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mergestream.digest import text_digest


def cache_directory() -> Path:
    """``$MERGESTREAM_CACHE``, else ``mergestream`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    chosen = os.environ.get("MERGESTREAM_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergestream"


def key_of(*parts: Any) -> str:
    """A short name for the content ``parts`` (anything JSON can write)."""
    return text_digest(json.dumps(parts, sort_keys=True, ensure_ascii=False))[:16]


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """A temporary neighbour of ``target`` that takes its place if the block ends well, and vanishes if not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)) / target.name
    try:
        yield draft
        try:
            draft.replace(target)
        except OSError:
            if not target.is_dir():
                raise  # else another process was faster, and what it made is the same
    finally:
        shutil.rmtree(draft.parent, ignore_errors=True)


def cached_directory(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, made by ``make`` if it is not there yet."""
    if not target.is_dir():
        with written_whole(target) as draft:
            draft.mkdir()
            make(draft)
    return target
