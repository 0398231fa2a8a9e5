"""The cache of the suites: downloads, prepared data and trained experts, each named by a digest of its inputs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mergestream.evaluation.suites import cache_directory as cache_directory
from mergestream.evaluation.suites import key_of as key_of


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
