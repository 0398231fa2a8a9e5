"""Entries of a ledger that hold more than is read of them, written anew under another number."""

from __future__ import annotations

import dataclasses
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.checkpoints import SafetensorsWriter, TensorSpec, dtype_name
from mergestream.digest import combined_digest, tensor_digest
from mergestream.files import remove, sync_directory, write_json
from mergestream.ledger.method import Ledger, cut_entry
from mergestream.merging.step import tensor_context
from mergestream.store.manifest import Expert, Manifest
from mergestream.store.records import copy_record, record_directory
from mergestream.store.steps import DIGESTS, StepReader, slot_name, step_directory

if TYPE_CHECKING:
    from torch import Tensor


def shorten(store: Path, manifest: Manifest, expert: Expert, cut: int) -> Expert:
    """Write an expert's entry as it is read where ``cut`` experts share the room; returns it with its new number.

    One that has nothing to cut, as an adapter's, stays where it is."""
    number = manifest.next_number
    target = step_directory(store, number)
    remove(target)
    try:
        digests = _write(store, target, manifest, expert, cut)
        if digests is None:
            return dataclasses.replace(expert, cut=cut)
        copy_record(record_directory(store, expert.number), record_directory(store, number))
    except BaseException:  # it would take room for nothing
        with suppress(OSError):
            remove(target)
            remove(record_directory(store, number))
        raise
    return dataclasses.replace(expert, number=number, cut=cut, state=combined_digest(digests))


def _write(store: Path, target: Path, manifest: Manifest, expert: Expert, cut: int) -> dict[str, str] | None:
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
        with SafetensorsWriter(target, layout) as writer:
            for name in manifest.base.merged:
                for key, value in shorter(name).items():
                    writer.write(key, value)
                    digests[key] = tensor_digest(value)
    write_json(target / DIGESTS, digests)
    sync_directory(target.parent)
    return digests
