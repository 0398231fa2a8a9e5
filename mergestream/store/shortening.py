"""Entries of a ledger that hold more than is read of them, written anew under another number."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import TYPE_CHECKING

from mergestream.checkpoints import TensorSpec, dtype_name
from mergestream.digest import combined_digest, tensor_digest
from mergestream.ledger.method import Ledger, cut_entry
from mergestream.merging.plan import tensor_context
from mergestream.storage import Storage
from mergestream.store.manifest import Expert, Manifest
from mergestream.store.records import copy_record, drop_record
from mergestream.store.step_storage import StepStorage
from mergestream.store.steps import DIGESTS, StepReader, slot_name

if TYPE_CHECKING:
    from torch import Tensor


def shorten(store: Storage, manifest: Manifest, expert: Expert, cut: int) -> Expert:
    """Write an expert's entry as it is read where ``cut`` experts share the room; returns it with its new number.

    One that has nothing to cut, as an adapter's, stays where it is."""
    shorter = dataclasses.replace(expert, number=manifest.next_number, mark=store.new_mark(), cut=cut)
    files = StepStorage(store, shorter.folder)
    files.claim(manifest.commit)
    try:
        digests = _write(store, files, manifest, expert, cut)
        if digests is None:
            files.remove()
            return dataclasses.replace(expert, cut=cut)
        copy_record(store, expert.folder, shorter.folder)
    except BaseException:  # it would take room for nothing
        files.remove()
        drop_record(store, shorter.folder)
        raise
    return dataclasses.replace(shorter, state=combined_digest(digests))


def _write(store: Storage, files: StepStorage, manifest: Manifest, expert: Expert, cut: int) -> dict[str, str] | None:
    """The digests of what was written; None where there is nothing to cut."""
    method = manifest.make_method()
    assert isinstance(method, Ledger)
    with closing(StepReader(store, expert)) as reader:

        def shorter(name: str) -> dict[str, Tensor]:
            kept = method.directions(tensor_context(manifest.base, name, cut), cut)
            return {slot_name(slot, name): value for slot, value in cut_entry(reader.entry(name), kept).items()}

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
