"""`init`, `undo`, `remove`, `keep`, `gc`, `verify`, and a base that has moved."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.base.model import BaseModel, match_names, open_base
from mergestream.checkpoints import open_checkpoint
from mergestream.engine import Engine
from mergestream.errors import MergestreamError, UsageError
from mergestream.experts import ExpertSource
from mergestream.progress import Progress
from mergestream.sizes import counted
from mergestream.storage import Storage, total_bytes
from mergestream.store.expert import Expert
from mergestream.store.inputs import InputsReader
from mergestream.store.manifest import MANIFEST, Manifest
from mergestream.store.records import open_task
from mergestream.store.snapshot import Snapshot
from mergestream.store.steps import StepReader
from mergestream.store.transaction import clean_up_after_commit, commit, delete_unused, has_files, keep_more, writing

if TYPE_CHECKING:
    from mergestream.methods.base import Method
    from mergestream.store.store import Store


def create_store(
    storage: Storage,
    method: Method,
    base: ExpertSource,
    keep: int,
    config_only: bool,
    engine: Engine | None,
    progress: Progress | None,
    **globs: Sequence[str],
) -> Manifest:
    """Measure the base and write the first manifest; ``globs`` are ``linear``, ``not_linear`` and ``heads``."""
    _check_free(storage)
    _check_keep(keep)
    if not isinstance(base, str | Path):
        raise UsageError("a store refers to its base by path or hub id: save the base first, or use a Merger")
    with open_base(base, config_only=config_only) as checkpoint:
        measure = checkpoint.has_weights and not config_only
        model = BaseModel.examine(checkpoint, measure=measure, engine=engine, progress=progress, **globs)
        if checkpoint.note:
            (progress or Progress()).note(checkpoint.note)
    model = dataclasses.replace(model, given=str(base))
    try:
        with storage.writing(MANIFEST):
            _check_free(storage)  # again: examining the base may have taken long
            new = Manifest(method.name, method.parameters, model, keep, commit=storage.new_mark())
            manifest = new.save(storage)
            try:
                storage.sync()
            except OSError:  # an error means that no store was made
                storage.delete([MANIFEST])
                raise
            return manifest
    except OSError as error:
        raise MergestreamError(f"{storage} cannot be made: {error.strerror}") from error


def _check_free(storage: Storage) -> None:
    """Refuse a place for a new store that is not empty."""
    if not storage.is_free:
        raise MergestreamError(f"{storage} exists already and is not empty; choose another place for the store")
    storage.check()


def _check_keep(steps: int) -> None:
    """Refuse a negative number of steps."""
    if steps < 0:
        raise UsageError(f"keep={steps} must be at least 0")


def keep_steps(store: Store, steps: int) -> None:
    """Change how many earlier steps are kept."""
    _check_keep(steps)
    with writing(store):
        commit(store, dataclasses.replace(store.manifest, keep=steps).forgetting())
        clean_up_after_commit(store, resumable=True)


def collect_garbage(store: Store) -> int:
    """Delete everything that the manifest does not need; returns the bytes."""
    before = total_bytes(store.storage.files())
    with writing(store):
        commit(store, store.manifest)  # a concurrent writer cannot win any more
        delete_unused(store)
    return before - total_bytes(store.storage.files())


def undo_last(store: Store) -> Expert:
    """Take back the last `add`, `remove` or `calibrate`; returns the entry of its expert."""
    with writing(store):
        removal = store.manifest.last_removal
        if removal and has_files(store, store.manifest.restoring(removal)):  # a pulled store lacks them
            _commit(store, store.manifest.restoring(removal))
            return removal.expert
        if not store.history:
            raise MergestreamError(f"{store.storage} has absorbed nothing, there is nothing to undo")
        if (calibrated := store.manifest.calibrated) and calibrated.inputs:
            earlier = dataclasses.replace(calibrated, inputs=calibrated.inputs.before)
            commit(store, store.manifest.replacing(calibrated, earlier))
            clean_up_after_commit(store)
            return calibrated
        undone, before = store.history[-1], store.manifest.at(store.manifest.step - 1)
        if not has_files(store, before):
            kept = counted(store.manifest.keep, "earlier step")
            raise MergestreamError(f"the {kept} that {store.storage} keeps are used up; {keep_more(store)}")
        _commit(store, before)
        return undone


def remove_expert(store: Store, name: str) -> Expert:
    """Take any expert out of a ledger; returns its entry. The entries of the others stay as they are."""
    with writing(store):
        store.manifest.require_ledger("can remove any expert (other stores only undo the last one)")
        removed = store.manifest.expert(name)
        _commit(store, store.manifest.without(removed))
        return removed


def _commit(store: Store, rest: Manifest) -> None:
    with suppress(OSError):
        delete_unused(store)  # on a full disk, an unfinished step takes the space that the manifest needs
    commit(store, rest)
    clean_up_after_commit(store)


def verify_files(store: Store, with_base: bool) -> None:
    """Recompute the digests of the base, the kept steps and the records, and check the entries of a ledger."""
    manifest = store.manifest
    if with_base and manifest.base.measured:
        with store.manifest.open_base() as base:
            manifest.base.check_digest(base, store.engine, store.progress)
    # Others may be half removed after a power cut; the next command removes them.
    folders = manifest.kept_folders.intersection(store.storage.folders("steps"))
    if manifest.entries and {entry.folder for entry in manifest.entries}.issubset(folders):
        Snapshot.open(store.storage, manifest).close()  # checks the shapes of all entries
    for entry in manifest.history:
        if entry.state and entry.folder in folders:
            reader = StepReader(store.storage, entry)
            with closing(reader), store.progress.task(f"verifying {entry.name}", reader.nbytes) as advance:
                for size in reader.verify(store.engine):
                    advance(size)
        elif entry in manifest.needed:
            raise MergestreamError(f"{store.storage}/steps/{entry.folder} is missing; restore the store from a backup")
        if task := open_task(store.storage, entry):
            with task.heads:
                deque(task.heads.verify(store.engine), maxlen=0)
        if entry.inputs:
            with closing(InputsReader(store.storage, entry.inputs, manifest.base)) as inputs:
                inputs.verify(store.engine)


def relocate_base(store: Store, base: str | Path) -> None:
    """Refer to the base at another path; in memory only where the store is read-only."""
    if not store.storage.is_writable:
        store.moved_base = _found_base(store, base)
        store.refresh()
        return
    with writing(store):
        commit(store, dataclasses.replace(store.manifest, base=_found_base(store, base)))
        clean_up_after_commit(store, resumable=True)


def _found_base(store: Store, base: str | Path) -> BaseModel:
    """The base at another path, once its digest is checked, or measured for the first time."""
    model = store.manifest.base
    with open_checkpoint(base) as found:
        checkpoint = match_names(found, model.tensors)
        if model.measured:
            model.check_digest(checkpoint, store.engine, store.progress)
        else:
            model = model.with_weights(checkpoint, store.engine, store.progress)
        return dataclasses.replace(model, source=checkpoint.source, given=str(base))
