"""`undo` and `remove`: take an expert out of a store."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING

from mergestream.errors import MergestreamError, UsageError
from mergestream.experts import ExpertSource
from mergestream.sizes import counted
from mergestream.store.candidate import open_candidate
from mergestream.store.manifest import Expert, Manifest
from mergestream.store.records import copy_record
from mergestream.store.transaction import clean_up_after_commit, commit, delete_unused, has_files, keep_more
from mergestream.store.watched import remember_departed

if TYPE_CHECKING:
    from mergestream.store.store import Store


def undo_last(store: Store) -> Expert:
    """Go back to before the last expert, or to before `calibrate`; returns the entry that was taken back."""
    with store.writing():
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
        _commit_without(store, undone, before)
        return undone


def remove_expert(store: Store, name: str, expert: ExpertSource | None = None) -> Expert:
    """Take any expert out; returns its entry. Where the files of the others make up the rest, only the manifest
    changes; else the ``expert`` is subtracted from the state."""
    with store.writing():
        try:
            removed = store.manifest.expert(name)
        except MergestreamError as error:
            raise UsageError(str(error)) from None
        rest = store.manifest.without(removed)
        if has_files(store, rest):
            _commit_without(store, removed, rest)
        else:
            _subtract(store, removed, expert, rest)
        return removed


def _commit_without(store: Store, removed: Expert, rest: Manifest) -> None:
    with suppress(OSError):
        delete_unused(store)  # on a full disk, an unfinished step takes the space that the manifest needs
    _tell_watch(store, removed)
    commit(store, rest)
    clean_up_after_commit(store)


def _subtract(store: Store, removed: Expert, source: ExpertSource | None, rest: Manifest) -> None:
    """Write a step in which −Δ is absorbed; it replaces the last step of those that stay."""
    method = store.method
    if not (method.additive and method.commutative):
        raise UsageError(
            f"{method.name} cannot take an expert out of its state; undo goes back step by step, and a store "
            "made with --method ledger can remove any expert"
        )
    if source is None:
        raise UsageError(f"{method.name} keeps only a sum: pass the expert to subtract, with --expert PATH")
    given = removed.options
    with open_candidate(
        store,
        source,
        removed.name,
        partial=given.get("partial", False),
        ignore=given.get("ignore", ()),
        vocab=given.get("vocab"),
        subtract=True,
    ) as candidate:
        with candidate.writing() as writer:
            candidate.absorb(writer, "subtracting")
            if candidate.digest != removed.digest:
                raise MergestreamError(f"{candidate.source} is not the expert that was added as {removed.name}")
            last = rest.history[-1]
            copy_record(store.storage, last.folder, candidate.folder)
            state = writer.finish(candidate.outcomes)
            last = dataclasses.replace(last, number=candidate.number, mark=candidate.mark, state=state)
            _tell_watch(store, removed)
            commit(store, dataclasses.replace(rest, history=(*rest.history[:-1], last)))
        clean_up_after_commit(store)


def _tell_watch(store: Store, removed: Expert) -> None:
    """Record that `watch` must not add the expert again."""
    try:
        remember_departed(store.storage, removed.source)
    except MergestreamError as error:
        store.progress.note(f"watch may add {removed.name} again: {error}")
