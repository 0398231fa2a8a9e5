"""Rewrite entries of a ledger that hold more directions than are read, so that the store does not grow."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING

from mergestream.checkpoints import TensorSpec, dtype_name
from mergestream.digest import combined_digest, tensor_digest
from mergestream.ledger.method import cut_entry
from mergestream.merging.entries import EntriesReading
from mergestream.store.expert import Expert
from mergestream.store.inputs import shorten_inputs
from mergestream.store.manifest import Manifest
from mergestream.store.records import copy_record, drop_record
from mergestream.store.snapshot import Snapshot
from mergestream.store.steps import DIGESTS, StepReader, StepStorage, slot_name
from mergestream.store.transaction import clean_up_after_commit, commit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from mergestream.store.store import Store


def shorten_entries(store: Store) -> None:
    """Shorten the entries that are too long, in a second commit after that of a step.

    The step stays committed if this fails: an entry that is not shortened only takes more space than it needs.
    """
    before = shortened = store.manifest
    try:
        try:
            found, levels = _find_long(store, before)
            for entry in found:
                shortened = shortened.replacing(entry, _shorten(store, shortened, entry, before.step, levels))
        finally:  # where there is no space for all of them, some are shortened
            if shortened is not before:
                commit(store, shortened)
    except Exception as error:
        store.progress.note(f"older entries take more space than they need until the next add: {error}")
    if shortened is not before:
        clean_up_after_commit(store)


def _find_long(store: Store, manifest: Manifest) -> tuple[list[Expert], Mapping[str, int]]:
    """The entries to shorten, and how many directions are read of each tensor.

    An entry is shortened once there are twice as many experts as when it was written, and every entry that is too long
    once the entries of adapters take more than twice the budget.
    """
    found = [entry for entry in manifest.entries if manifest.step >= 2 * entry.cut]
    if not found and not manifest.adapters:
        return [], {}
    with Snapshot.open(store.storage, manifest) as snapshot:
        reading = snapshot.reading(store.engine)
        assert isinstance(reading, EntriesReading)
        if manifest.adapters and reading.is_over(2):
            found = [entry for entry in manifest.entries if entry in found or reading.is_long(entry.name)]
        return found, reading.directions


def _shorten(store: Store, manifest: Manifest, expert: Expert, cut: int, levels: Mapping[str, int]) -> Expert:
    """Write an entry as it is read with ``cut`` experts, under a new number; an entry that is short enough stays."""
    shorter = dataclasses.replace(expert, number=manifest.next_number, mark=store.storage.new_mark(), cut=cut)
    files = StepStorage(store.storage, shorter.folder)
    files.begin({"commit": manifest.commit}, resumable=False)
    try:
        if expert.inputs:
            record = shorten_inputs(store, manifest, expert.inputs, shorter.folder, cut)
            inputs = dataclasses.replace(expert.inputs, number=shorter.number, mark=shorter.mark, record=record)
            expert, shorter = dataclasses.replace(expert, inputs=inputs), dataclasses.replace(shorter, inputs=inputs)
        digests = _write(store, files, manifest, expert, levels)
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


def _write(
    store: Store, files: StepStorage, manifest: Manifest, expert: Expert, levels: Mapping[str, int]
) -> dict[str, str] | None:
    """Write the shorter entry with all singular values; returns its digests, or None where there is nothing to cut."""
    with closing(StepReader(store.storage, expert)) as reader:

        def shorter(name: str) -> dict[str, Tensor]:
            slots = cut_entry(reader.read(name))
            cut = {**cut_entry(slots, levels.get(name, 0)), "sigma": slots["sigma"]} if "sigma" in slots else slots
            return {slot_name(slot, name): cut[slot] for slot in slots}

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
