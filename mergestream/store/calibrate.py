"""`calibrate`: run an expert of a ledger on a few inputs, and keep statistics of them, as one commit."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch import nn

from mergestream.errors import MergestreamError, UsageError
from mergestream.experts import ExpertSource
from mergestream.inputs.reading import Inputs, Sample, Source, read_inputs
from mergestream.inputs.statistics import InputStatistics, measure_statistics
from mergestream.ledger.method import FEWEST
from mergestream.store.candidate import Candidate, open_candidate
from mergestream.store.inputs import InputsReader, write_inputs
from mergestream.store.manifest import Expert, InputsEntry, Manifest, folder_name
from mergestream.store.records import drop_record
from mergestream.store.step_storage import StepStorage
from mergestream.store.transaction import clean_up_after_commit, commit

if TYPE_CHECKING:
    from mergestream.store.store import Store


def calibrate_expert(store: Store, name: str, inputs: Source | Inputs, expert: ExpertSource | None) -> Expert:
    """Measure and commit the statistics of an expert's inputs; returns its new entry."""
    inputs = Inputs.of(inputs)
    samples = read_samples(store, inputs)
    with store.writing():
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
        number, mark = manifest.next_number, store.storage.new_mark()
        folder = folder_name(number, mark)
        files = StepStorage(store.storage, folder)
        files.begin({"commit": manifest.commit}, resumable=False)  # its plan keeps the files from being cleaned up
        try:
            record = write_inputs(store.storage, folder, found)
            before = dataclasses.replace(entry.inputs, before=None) if entry.inputs else None
            kept = InputsEntry(number, found.count, record, mark, manifest.history[-1].name, before)
            calibrated = dataclasses.replace(entry, inputs=kept)
            commit(store, manifest.replacing(entry, calibrated).forgetting())
        except BaseException:
            if store.manifest is manifest:
                files.remove()
                drop_record(store.storage, folder)
            raise
        clean_up_after_commit(store)
        return store.manifest.expert(name)


def read_samples(store: Store, inputs: Inputs) -> list[Sample]:
    """Read the inputs; only a ledger has a place for what is measured on them."""
    if not store.manifest.is_ledger:
        raise UsageError(
            f"{store.manifest.method} keeps nothing of a single expert, and takes no inputs; make a store with "
            "--method ledger"
        )
    return read_inputs(inputs.source, inputs.count, store.progress)


def measure_inputs(candidate: Candidate, inputs: Inputs, samples: Sequence[Sample], cut: int) -> InputStatistics:
    """Run the expert and its base on the samples, and cut the moments like entries for so many experts."""
    store, vector = candidate.store, candidate.vector
    if inputs.model is None and isinstance(candidate.given_expert, nn.Module):
        inputs = dataclasses.replace(inputs, model=candidate.given_expert)
    manifest = dataclasses.replace(store.manifest, base=vector.model)
    weights = [name for name, action in vector.actions.items() if action == "merged" and name in vector.model.tensors]
    return measure_statistics(
        vector,
        candidate.opened,
        directions(manifest, weights, cut),
        samples,
        inputs,
        dtype=getattr(torch, str(manifest.parameters["entries"])),
        engine=store.engine,
        progress=store.progress,
    )


def directions(manifest: Manifest, weights: Sequence[str], cut: int) -> dict[str, int]:
    """How many directions a moment keeps for each linear weight: ⌊β·r/cut⌋, as the entry of a full fine-tune."""
    found, budget = {}, float(manifest.parameters["budget"] or 1)
    for name in weights:
        tensor = manifest.base.tensors[name]
        if tensor.role == "linear" and len(tensor.shape) == 2:
            rank = min(tensor.shape)
            share = max(1, math.floor(budget * rank / max(cut, FEWEST)))
            found[name] = min(rank, share) if budget * rank >= FEWEST else rank
    return found


def shorten_inputs(store: Store, manifest: Manifest, entry: InputsEntry, folder: str, cut: int) -> str:
    """Write the statistics with moments cut like entries for so many experts; returns the digest of their index."""
    with closing(InputsReader(store.storage, entry)) as reader:
        found = reader.statistics()
        kept = directions(manifest, list(found.layers.shared), cut)
        longest: dict[str, int] = {}
        for weight, stored in found.layers.shared.items():
            longest[stored] = max(kept[weight], longest.get(stored, 0))
        moments = {stored: moment.cut(longest[stored]) for stored, moment in found.layers.moments.items()}
        layers = dataclasses.replace(found.layers, moments=moments)
        return write_inputs(store.storage, folder, dataclasses.replace(found, layers=layers))


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
