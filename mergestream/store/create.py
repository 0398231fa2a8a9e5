"""`init`: examine a base model, and write the first manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mergestream.base.model import BaseModel, open_base
from mergestream.engine import Engine
from mergestream.errors import MergestreamError, UsageError
from mergestream.experts import ExpertSource
from mergestream.progress import Progress
from mergestream.storage import Storage
from mergestream.store.manifest import MANIFEST, Manifest


def check_free(storage: Storage) -> None:
    """Refuse a place for a new store that is not empty."""
    if not storage.is_free:
        raise MergestreamError(f"{storage} exists already and is not empty; choose another place for the store")
    storage.check()


def examine_base(
    base: ExpertSource, config_only: bool, engine: Engine | None, progress: Progress | None, **globs: Sequence[str]
) -> BaseModel:
    """Measure the base; ``globs`` are ``linear``, ``not_linear`` and ``heads``."""
    if not isinstance(base, str | Path):
        raise UsageError("a store refers to its base by path or hub id: save the base first, or use a Merger")
    with open_base(base, config_only=config_only) as checkpoint:
        measure = checkpoint.has_weights and not config_only
        model = BaseModel.examine(checkpoint, measure=measure, engine=engine, progress=progress, **globs)
        if checkpoint.note:
            (progress or Progress()).note(checkpoint.note)
    return dataclasses.replace(model, given=str(base))


def write_first_manifest(storage: Storage, manifest: Manifest) -> None:
    """Make the store."""
    try:
        with storage.creating(), storage.writing(MANIFEST):
            check_free(storage)  # again: examining the base may have taken long
            dataclasses.replace(manifest, commit=storage.new_mark()).save(storage)
            storage.sync()
    except OSError as error:
        raise MergestreamError(f"{storage} cannot be made: {error.strerror}") from error
