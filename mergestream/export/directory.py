"""A directory that is replaced whole, or not at all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mergestream.checkpoints import FLOATS
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.errors import MergestreamError, UsageError
from mergestream.files import sync_directory


@dataclass(frozen=True)
class Output:
    """A directory to be; all is written beside it and renamed, so there is never half a model, nor an old file."""

    path: Path
    dtype: str | None = None
    """As torch names it; every tensor keeps the base's by default"""
    max_shard_size: int = DEFAULT_SHARD_SIZE
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in FLOATS:
            raise UsageError(f"--dtype {self.dtype} is not one of {', '.join(FLOATS)}")
        if self.path.exists() and not self.path.is_dir():
            raise MergestreamError(f"{self.path} is a file; choose another place")
        if self.path.exists() and not self.overwrite:
            raise MergestreamError(f"{self.path} exists already; pass --overwrite to replace it")

    def refuse_to_replace(self, *sources: str | Path) -> None:
        """Refuse an output that is, or holds, one of the sources: they are being read."""
        place = self.path.resolve()
        for source in map(Path, sources):
            if self.path.exists() and (place == source.resolve() or place in source.resolve().parents):
                raise MergestreamError(
                    f"{self.path} would replace {source}, which is being merged; choose another place"
                )

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """A directory beside the output that takes its place when all has gone well."""
        place = self.path.absolute().parent
        try:
            place.mkdir(parents=True, exist_ok=True)
            remove_left_behind(place, self._prefix)
            draft = self._beside(place)
        except OSError as error:
            raise MergestreamError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            yield draft
            sync_directory(draft)
            if self.path.exists():
                old = self._beside(place)
                self.path.rename(old / "replaced")
                draft.rename(self.path)
                shutil.rmtree(old)
            else:
                draft.rename(self.path)
            sync_directory(place)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _beside(self, place: Path) -> Path:
        """A new directory, with the permissions that a new directory has."""
        path = place / f"{self._prefix}{secrets.token_hex(4)}"
        path.mkdir()
        return path

    @property
    def _prefix(self) -> str:
        return f".{self.path.name}.mergestream-"


def remove_left_behind(place: Path, prefix: str) -> None:
    """Remove what a killed process that wrote to the same place has left beside it."""
    for path in place.iterdir():
        if path.name.startswith(prefix):
            shutil.rmtree(path, ignore_errors=True)
