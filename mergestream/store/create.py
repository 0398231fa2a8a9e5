"""`init`: make an empty store for a base model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mergestream.base.model import BaseModel, open_base
from mergestream.engine import Engine
from mergestream.errors import MergestreamError, UsageError
from mergestream.experts import ExpertSource
from mergestream.methods import as_method
from mergestream.progress import Progress
from mergestream.storage import Storage, open_storage
from mergestream.store.maintain import check_keep
from mergestream.store.manifest import MANIFEST, Manifest
from mergestream.store.transaction import clean_up_after_commit

if TYPE_CHECKING:
    from mergestream.methods.base import Method
    from mergestream.store.store import Store

AnyStore = TypeVar("AnyStore", bound="Store")


def create_store(
    kind: type[AnyStore],
    path: str | Path,
    base: ExpertSource,
    method: Method | str | None,
    globs: Mapping[str, Sequence[str]],
    kept: tuple[int, int | None],
    config_only: bool,
    engine: Engine | None,
    progress: Progress | None,
) -> AnyStore:
    """Examine the base, then write the first manifest.

    ``globs`` are ``linear``, ``not_linear`` and ``heads``; ``kept`` is ``keep`` and ``max_rank``.
    """
    storage, method, (keep, max_rank) = open_storage(path), as_method(method), kept
    if not isinstance(base, str | Path):
        raise UsageError("a store refers to its base by path or hub id: save the base first, or use a Merger")
    _check_free(storage)
    check_keep(keep)
    if max_rank is not None:
        method.check_max_rank(max_rank)
    with open_base(base, config_only=config_only) as checkpoint:
        measure = checkpoint.has_weights and not config_only
        model = BaseModel.examine(checkpoint, measure=measure, engine=engine, progress=progress, **globs)
        if checkpoint.note:
            (progress or Progress()).note(checkpoint.note)
    model = dataclasses.replace(model, given=str(base))
    manifest = Manifest(method.name, method.parameters, model, keep, max_rank, commit=storage.new_mark())
    try:
        with storage.creating(), storage.writing(MANIFEST):
            _check_free(storage)  # again: examining the base may have taken long
            store = kind(storage, engine=engine, progress=progress, manifest=manifest)
            store.manifest = manifest.save(storage)
            clean_up_after_commit(store)
    except OSError as error:
        raise MergestreamError(f"{storage} cannot be made: {error.strerror}") from error
    return store


def _check_free(storage: Storage) -> None:
    """Refuse a place for a new store that is not empty."""
    if not storage.is_free:
        raise MergestreamError(f"{storage} exists already and is not empty; choose another place for the store")
    storage.check()
