"""The cache directory: downloads, prepared data, trained experts and scores, each named by a digest of its inputs."""

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
    """Return ``$MERGESTREAM_CACHE``, else ``mergestream`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    chosen = os.environ.get("MERGESTREAM_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergestream"


def key_of(*parts: Any) -> str:
    """Return a short digest of ``parts``, which may be anything that JSON can write."""
    return text_digest(json.dumps(parts, sort_keys=True, ensure_ascii=False))[:16]


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yield a draft beside ``target`` that replaces it if the block succeeds, and is removed if not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)) / target.name
    try:
        yield draft
        try:
            draft.replace(target)
        except OSError:
            if not target.is_dir():
                raise  # else another process was faster, and made the same
    finally:
        shutil.rmtree(draft.parent, ignore_errors=True)


def cached_directory(target: Path, make: Callable[[Path], None]) -> Path:
    """Return ``target``; call ``make`` with a draft directory if it does not exist yet."""
    if not target.is_dir():
        with written_whole(target) as draft:
            draft.mkdir()
            make(draft)
    return target
