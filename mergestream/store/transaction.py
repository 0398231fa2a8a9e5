"""Transactions of a store: write under a lock, commit by compare-and-swap, clean up."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from mergestream.errors import MergestreamError, UsageError
from mergestream.interrupts import uninterrupted
from mergestream.sizes import counted
from mergestream.storage import Storage
from mergestream.store.expert import folder_name
from mergestream.store.manifest import MANIFEST, Manifest
from mergestream.store.snapshot import Snapshot
from mergestream.store.steps import JOURNAL, PLAN, read_plan

if TYPE_CHECKING:
    from mergestream.store.store import Store

Result = TypeVar("Result")
_FOLDER = re.compile(r"\d{4,}(-[0-9a-f]+)?")


def open_snapshot(store: Store, step: int | None, *, whole: bool = False) -> Snapshot:
    """The store after a step (None: the last one), by the manifest that was read; it must be kept.

    A ``whole`` snapshot has opened everything that an export reads, so that a writer may remove it.
    """
    manifest = store.manifest
    number = manifest.step if step is None else step
    if not manifest.history:
        raise MergestreamError(f"{store.storage} has absorbed nothing yet; add an expert first")
    if number > manifest.step:
        taken = counted(manifest.step, "step")
        raise MergestreamError(f"{store.storage} has taken {taken}, there is no step {number}")
    if number < manifest.step and not has_files(store, manifest.at(number)):
        raise MergestreamError(f"{store.storage} no longer keeps step {number}; {keep_more(store)}")
    with ExitStack() as files:
        snapshot = files.enter_context(Snapshot.open(store.storage, manifest.at(number)))
        if whole:
            _ = snapshot.records, snapshot.inputs  # both are cached
        files.pop_all()
    return snapshot


def keep_more(store: Store) -> str:
    """The command that keeps one more step."""
    return f"to go back further in future: mergestream keep {store.storage} {store.manifest.keep + 1}"


def has_files(store: Store, manifest: Manifest) -> bool:
    """Whether all files that another manifest needs are there, and stay."""
    there = store.manifest.kept_folders & set(store.storage.folders("steps"))
    return all(entry.state and entry.folder in there for entry in manifest.needed)


def retried(store: Store, read: Callable[[], Result]) -> Result:
    """The result of ``read``, which reads the store by one manifest.

    It is called again if a writer has committed meanwhile, and may have removed what was read.
    """
    store.refresh()
    while True:
        manifest = store.manifest
        try:
            found = read()
            if store.manifest == manifest:  # else `read` has opened a snapshot of a newer one
                return found
        except UsageError:
            raise
        except (MergestreamError, OSError):
            met = store.manifest
            store.refresh()
            if met == manifest == store.manifest:  # a manifest that `read` has met may be gone again
                raise


@contextmanager
def writing(store: Store) -> Iterator[None]:
    """Be the only writer, with the manifest as it is now. An interrupted step is left to be resumed."""
    with store.storage.writing(MANIFEST):
        store.storage.check()
        store.refresh()
        found = store.manifest
        with suppress(OSError, MergestreamError):
            delete_unused(store, resumable=True)
        try:
            yield
        except KeyboardInterrupt as interrupt:
            if store.manifest == found:
                raise
            done = f"the command was complete, {store.storage} is at step {store.manifest.step}"
            raise type(interrupt)(done) from None


def commit(store: Store, manifest: Manifest) -> None:
    """Replace the manifest by compare-and-swap; the loser gets StoreBusyError and can retry.

    If this fails, nothing has changed. If it returns, or is interrupted afterwards, the new manifest counts.
    """
    with uninterrupted():
        manifest = dataclasses.replace(manifest, commit=store.storage.new_mark(), version=store.manifest.version)
        store.manifest = manifest.save(store.storage)


def delete_unused(store: Store, *, resumable: bool = False) -> None:
    """Make the manifest durable, then delete all folders that it does not need; a ``resumable`` step stays.

    In a bucket the steps of other writers stay as long as they can be committed: while they have read this manifest.
    """
    storage, manifest = store.storage, store.manifest
    storage.sync()  # first: after a power cut the previous manifest may be back, and needs its steps
    kept = manifest.kept_folders
    left = {folder: read_plan(storage, folder) for folder in _numbered(storage, "steps") if folder not in kept}
    if storage.has_lock:  # nobody else is writing
        following = folder_name(manifest.next_number, "")
        plan = left.get(following)
        spared = {following} if resumable and plan and "after" in plan else set()
    else:
        spared = {folder for folder, plan in left.items() if plan and plan.get("commit") == manifest.commit}
        if not storage.is_current(manifest.version):  # checked last: whoever has read this manifest has a plan by now
            return
    for folder in left.keys() - spared:
        storage.remove(f"steps/{folder}")
    for folder in kept:
        names = [name for name in storage.files(f"steps/{folder}") if name.startswith((PLAN, JOURNAL))]
        storage.delete(f"steps/{folder}/{name}" for name in names)
    for kind, entries in (("experts", manifest.recorded), ("inputs", manifest.inputs)):
        named = {entry.folder for entry in entries} | spared
        for folder in _numbered(storage, kind):
            if folder not in named:
                storage.remove(f"{kind}/{folder}")
    storage.clean_scratch()


def _numbered(storage: Storage, kind: str) -> list[str]:
    return [folder for folder in storage.folders(kind) if _FOLDER.fullmatch(folder)]


def clean_up_after_commit(store: Store, *, resumable: bool = False) -> None:
    """`delete_unused`; the commit counts without it, so an error is only a note."""
    try:
        delete_unused(store, resumable=resumable)
    except (OSError, MergestreamError) as error:
        where, why = "files that are no longer needed", str(error)
        if isinstance(error, OSError):
            where, why = error.filename or where, error.strerror or why
        store.progress.note(
            f"{store.storage} is at step {store.manifest.step}, but {where} could not be deleted: {why}; "
            "the next command that writes does it"
        )
