"""Shorten the entries of a ledger that hold twice what is read of them, so that the store does not grow."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING

from mergestream.checkpoints import TensorSpec, dtype_name
from mergestream.digest import combined_digest, tensor_digest
from mergestream.merging.plan import tensor_context
from mergestream.store.calibrate import shorten_inputs
from mergestream.store.manifest import Expert, Manifest
from mergestream.store.records import copy_record, drop_record
from mergestream.store.step_storage import StepStorage
from mergestream.store.steps import DIGESTS, StepReader, slot_name
from mergestream.store.transaction import clean_up_after_commit, commit

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.store.store import Store


def shorten_entries(store: Store) -> None:
    """Shorten the entries that are too long, as a transaction of its own after a step.

    The step counts whatever happens here: an entry that cannot be shortened only takes more space than it needs.
    """
    before = shortened = store.manifest
    try:
        try:
            for entry in before.history:
                if entry.cut and before.step >= 2 * entry.cut:
                    shortened = shortened.replacing(entry, _shorten(store, shortened, entry, before.step))
        finally:  # where there is no space for all of them, some are shortened
            if shortened is not before:
                commit(store, shortened)
    except Exception as error:
        store.progress.note(f"older entries take more space than they need until the next add: {error}")
    if shortened is not before:
        clean_up_after_commit(store)


def _shorten(store: Store, manifest: Manifest, expert: Expert, cut: int) -> Expert:
    """Write an entry as it is read with ``cut`` experts, under a new number; an entry that is short enough stays."""
    shorter = dataclasses.replace(expert, number=manifest.next_number, mark=store.storage.new_mark(), cut=cut)
    files = StepStorage(store.storage, shorter.folder)
    files.begin({"commit": manifest.commit}, resumable=False)
    try:
        if expert.inputs:
            record = shorten_inputs(store, manifest, expert.inputs, shorter.folder, cut)
            inputs = dataclasses.replace(expert.inputs, number=shorter.number, mark=shorter.mark, record=record)
            expert, shorter = dataclasses.replace(expert, inputs=inputs), dataclasses.replace(shorter, inputs=inputs)
        digests = _write(store, files, manifest, expert, cut)
        if digests is None:
            if not expert.inputs:
                files.remove()
            return dataclasses.replace(expert, cut=cut)
        copy_record(store.storage, expert.folder, shorter.folder)
    except BaseException:
        files.remove()
        drop_record(store.storage, shorter.folder)
        raise
    return dataclasses.replace(shorter, state=combined_digest(digests))


def _write(store: Store, files: StepStorage, manifest: Manifest, expert: Expert, cut: int) -> dict[str, str] | None:
    """Write the shorter entry; returns its digests, or None where there is nothing to cut."""
    with closing(StepReader(store.storage, expert)) as reader:

        def shorter(name: str) -> dict[str, Tensor]:
            context = tensor_context(manifest.base, name, cut)
            slots = store.method.shortened(reader.entry(name), context)
            return {slot_name(slot, name): value for slot, value in slots.items()}

        layout = {
            key: TensorSpec(dtype_name(value.dtype), tuple(value.shape))
            for name in manifest.base.merged
            for key, value in shorter(name).items()
        }
        if sum(spec.nbytes for spec in layout.values()) == reader.nbytes:
            return None
        digests = {}
        with files.open_writer(layout) as writer:
            for name in manifest.base.merged:
                for key, value in shorter(name).items():
                    writer.write(key, value)
                    digests[key] = tensor_digest(value)
    files.save(DIGESTS, digests)
    files.finish()
    return digests
