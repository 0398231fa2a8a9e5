"""Where and how a merged model is written: a directory that ``from_pretrained`` loads, whole or not at all."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints import FLOATS, Checkpoint, SafetensorsWriter, TensorSpec
from mergestream.checkpoints.layout import is_companion
from mergestream.checkpoints.writer import DEFAULT_SHARD_SIZE
from mergestream.engine import LocalEngine
from mergestream.errors import MergestreamError, UsageError
from mergestream.export.card import CardFacts, model_card
from mergestream.files import read_json, sync_directory, write_text
from mergestream.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

Pieces = Callable[[str, str], "Iterator[tuple[int, Tensor]]"]
"""Tensor name and dtype to the tensor's pieces in order, each with the number of its first element."""


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

    def write_tensors(
        self, draft: Path, forms: Mapping[str, TensorSpec], pieces: Pieces, engine: LocalEngine, progress: Progress
    ) -> None:
        """Stream every tensor to its place, several at a time."""
        dtype = FLOATS.get(self.dtype or "")
        layout = {
            name: TensorSpec(dtype if dtype and form.is_float else form.dtype, form.shape)
            for name, form in forms.items()
        }

        def write(name: str) -> None:
            for start, piece in pieces(name, layout[name].dtype):
                writer.write_piece(name, start, piece)

        costs = {name: spec.nbytes for name, spec in layout.items()}
        with (
            SafetensorsWriter(draft, layout, max_shard_size=self.max_shard_size) as writer,
            progress.task(f"writing {self.path.name}", sum(costs.values())) as advance,
        ):
            for name, _ in engine.run(costs, write):
                advance(costs[name])

    def write_companions(
        self, draft: Path, base: Checkpoint, card: CardFacts, config: Mapping[str, Any] | None = None
    ) -> None:
        """Copy config, tokenizer and generation files from the base, and write the model card.

        ``config`` is that of the expert whose head is put in place, with labels of its own.
        """
        if base.directory is not None:
            for path in base.directory.iterdir():
                if path.is_file() and is_companion(path.name):
                    shutil.copyfile(path, draft / path.name)
        if config is not None:
            _put_config(draft / "config.json", config)
        if self.dtype is not None:
            _set_config_dtype(draft / "config.json", self.dtype)
        write_text(draft / "README.md", model_card(card, _hub_id(base)))


def remove_left_behind(place: Path, prefix: str) -> None:
    """Remove what a killed process that wrote to the same place has left beside it."""
    for path in place.iterdir():
        if path.name.startswith(prefix):
            shutil.rmtree(path, ignore_errors=True)


_DTYPE_KEYS = {"dtype", "torch_dtype"}


def _put_config(path: Path, config: Mapping[str, Any]) -> None:
    """Put an expert's config in place of the base's; the tensors still have the base's type."""
    base = read_json(path) if path.is_file() else {}
    theirs = {key: value for key, value in config.items() if key not in _DTYPE_KEYS}
    _write_config(path, theirs | {key: base[key] for key in sorted(_DTYPE_KEYS & base.keys())})


def _set_config_dtype(path: Path, dtype: str) -> None:
    """Make ``from_pretrained`` load what was written, not the base's type."""
    if path.is_file():
        config = read_json(path)
        _write_config(path, config | dict.fromkeys(sorted(_DTYPE_KEYS & config.keys()), dtype))


def _write_config(path: Path, config: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _hub_id(base: Checkpoint) -> str | None:
    """The base's id on the hub: as it was given, or as its config remembers it."""
    source = base.source.split("@")[0]
    if not Path(base.source).exists() and source.count("/") == 1:
        return source
    config = base.directory / "config.json" if base.directory else None
    if config is None or not config.is_file():
        return None
    remembered = str(read_json(config).get("_name_or_path"))
    return remembered if remembered.count("/") == 1 and not remembered.startswith((".", "/")) else None
