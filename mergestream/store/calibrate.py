"""`calibrate`: run an expert of a ledger on a few inputs, and keep statistics of them, as one commit."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING

from mergestream.errors import MergestreamError
from mergestream.experts import ExpertSource
from mergestream.inputs.reading import Inputs, Source
from mergestream.store.add import Candidate, open_candidate
from mergestream.store.expert import Expert, InputsEntry
from mergestream.store.inputs import measure_inputs, read_samples, write_inputs
from mergestream.store.records import drop_record
from mergestream.store.steps import StepStorage
from mergestream.store.transaction import clean_up_after_commit, commit, writing

if TYPE_CHECKING:
    from mergestream.store.store import Store


def calibrate_expert(store: Store, name: str, inputs: Source | Inputs, expert: ExpertSource | None) -> Expert:
    """Measure and commit the statistics of an expert's inputs; returns its new entry."""
    inputs = Inputs.of(inputs)
    samples = read_samples(store, inputs)
    with writing(store):
        manifest = store.manifest
        entry = manifest.expert(name)
        given = entry.options
        with open_candidate(
            store,
            entry.source if expert is None else expert,
            partial=given.get("partial", False),
            ignore=given.get("ignore", ()),
            vocab=given.get("vocab"),
        ) as candidate:
            _check_same(candidate, entry)
            found = measure_inputs(candidate, inputs, samples, entry.cut)
        folder = candidate.folder
        files = StepStorage(store.storage, folder)
        files.begin({"commit": manifest.commit}, resumable=False)  # its plan keeps the files from being cleaned up
        try:
            record = write_inputs(store.storage, folder, found)
            before = dataclasses.replace(entry.inputs, before=None) if entry.inputs else None
            last = manifest.history[-1].name
            kept = InputsEntry(candidate.number, found.count, record, candidate.mark, last, before)
            calibrated = dataclasses.replace(entry, inputs=kept)
            commit(store, manifest.replacing(entry, calibrated).forgetting())
        except BaseException:
            if store.manifest is manifest:
                files.remove()
                drop_record(store.storage, folder)
            raise
        clean_up_after_commit(store)
        return store.manifest.expert(name)


def _check_same(candidate: Candidate, entry: Expert) -> None:
    """Refuse another expert than the one that was added, by the digest of all its tensors."""
    vector = candidate.vector
    for name in vector.names:
        deque(vector.pieces(name), maxlen=0)
    for name in vector.heads:
        vector.head(name)
    candidate.digests = {**vector.digests}
    if candidate.digest != entry.digest:
        raise MergestreamError(f"{candidate.source} is not the expert that was added as {entry.name}")
