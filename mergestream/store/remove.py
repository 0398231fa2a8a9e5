"""`undo` and `remove`: take an expert out of a store."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING

from mergestream.errors import MergestreamError
from mergestream.sizes import counted
from mergestream.store.manifest import Expert, Manifest
from mergestream.store.transaction import clean_up_after_commit, commit, delete_unused, has_files, keep_more

if TYPE_CHECKING:
    from mergestream.store.store import Store


def undo_last(store: Store) -> Expert:
    """Take back the last `add`, `remove` or `calibrate`; returns the entry of its expert."""
    with store.writing():
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
    with store.writing():
        store.manifest.require_ledger("can remove any expert (other stores only undo the last one)")
        removed = store.manifest.expert(name)
        _commit(store, store.manifest.without(removed))
        return removed


def _commit(store: Store, rest: Manifest) -> None:
    with suppress(OSError):
        delete_unused(store)  # on a full disk, an unfinished step takes the space that the manifest needs
    commit(store, rest)
    clean_up_after_commit(store)
