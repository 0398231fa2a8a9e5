"""`Output`: where an export goes, how it replaces an earlier one, and the recipe in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mergestream import __version__
from mergestream.checkpoints import float_name
from mergestream.checkpoints.layout import MARKER
from mergestream.checkpoints.location import public_name
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.errors import MergestreamError, UsageError
from mergestream.export.places import is_export
from mergestream.files import to_json
from mergestream.ledger.selection import Selection
from mergestream.storage import Storage, open_storage, parse_url
from mergestream.store.manifest import MANIFEST, Manifest, is_store

RECIPE_FORMAT = 1
"""The version of the recipe's format"""


@dataclass(frozen=True)
class ReadoutChoice(Selection):
    """How a model is read out: the readout and its experts, the scale, and the expert whose head is included."""

    scale: str | float | None = None
    task: str | None = None
    files_from: str | None = None
    """The expert whose chat template, special tokens and generation settings are written, or ``base``"""


DEFAULT_CHOICE = ReadoutChoice()


@dataclass(frozen=True)
class Output:
    """A directory, or a folder in a bucket, that an export writes; readers never see a part of it as complete."""

    path: Path
    dtype: str | None = None
    """Torch's name of the floating-point type, or a short name of it; the base's dtypes by default"""
    max_shard_size: int = DEFAULT_SHARD_SIZE
    overwrite: bool = False
    command: str | None = None
    """The command line, for the model card"""

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", float_name(self.dtype))
        self._check_free()

    def __str__(self) -> str:
        return str(self._storage)

    @cached_property
    def _storage(self) -> Storage:
        url = parse_url(self.path)
        if url and url.scheme == "hf":
            raise UsageError(f"{url} is on the hub: export to a directory, and add --push {url.bucket}/{url.key}")
        return open_storage(self.path)

    def _check_free(self) -> None:
        """Refuse to replace anything except an earlier export."""
        storage = self._storage
        try:
            if storage.is_empty:
                return
            if not is_export(storage):
                raise MergestreamError(f"{self} is not empty, and no export of mergestream; choose another place")
            if not self.overwrite:
                raise MergestreamError(f"{self} exists already; pass --overwrite to replace it")
            for name in storage.files():
                folder, _, file = name.rpartition("/")
                if file == MANIFEST and is_store(storage, folder):
                    raise MergestreamError(f"{self} holds the store {storage}/{folder}; choose another place")
        except OSError as error:
            raise MergestreamError(f"{self} cannot be replaced: {error.strerror}") from error

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """A directory to write to, which becomes the output at the end; files beside it are removed then."""
        try:
            with self._storage.replacing(MARKER, self._check_free) as draft:
                yield draft
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise MergestreamError(f"{self} was not written: {error.strerror or error}{where}") from error

    def mark(
        self,
        draft: Path,
        manifest: Manifest,
        form: Mapping[str, Any],
        result: str,
        choice: ReadoutChoice = DEFAULT_CHOICE,
        made_by: str = "store",
    ) -> None:
        """Write the marker, which identifies an export and holds its recipe: what it was made from.

        ``form`` is the format of the files, and ``result`` the digest of the written tensors. ``made_by`` is ``store``
        if experts were added one by one, and ``merge`` if each tensor was merged in one pass over all experts.
        """
        base = manifest.base
        experts = [
            {key: getattr(entry, key) for key in ("name", "digest", "options", "cut")}
            | {"source": public_name(entry.source, entry.given)}
            for entry in manifest.history
        ]
        recipe = {
            "mergestream": __version__,
            "command": self.command,
            "recipe": RECIPE_FORMAT,
            "made_by": made_by,
            "base": {
                "source": public_name(base.source, base.given),
                "digest": base.digest if base.measured else None,
                **{key: getattr(base, key) for key in ("linear", "not_linear", "heads")},
            },
            "method": manifest.method,
            "parameters": manifest.parameters,
            "experts": experts,
            "form": {"format": "full", "rank": None, "dtype": self.dtype, "max_shard_size": None, **form},
            "result": result,
            "readout": asdict(choice),
        }
        (draft / MARKER).write_text(to_json(recipe), encoding="utf-8")
