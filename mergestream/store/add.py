"""`add`: open an expert, check it, absorb every tensor, let the reviewers see it, commit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.errors import MergestreamError
from mergestream.experts import ExpertSource
from mergestream.experts.base_check import last_part
from mergestream.inputs.reading import Inputs, Source
from mergestream.store.calibrate import measure_inputs, read_samples
from mergestream.store.candidate import Candidate, open_candidate
from mergestream.store.inputs import write_inputs
from mergestream.store.manifest import Expert, InputsEntry
from mergestream.store.shorten import shorten_entries
from mergestream.store.transaction import clean_up_after_commit, commit

if TYPE_CHECKING:
    from mergestream.store.store import Store

Review = Callable[[Candidate], Expert]
"""Accepts a candidate and returns its entry, with what was found; refuses it by raising a MergestreamError"""


def add_expert(
    store: Store,
    expert: ExpertSource,
    name: str | None = None,
    *,
    allow_duplicate: bool = False,
    allow_other_base: bool = False,
    review: Review | None = None,
    inputs: Source | Inputs | None = None,
    **options: Any,
) -> Expert:
    """Add an expert as one transaction; ``options`` are those of `open_candidate`, ``inputs`` what it is run on.

    The step is written beside the others. It counts when the manifest that names it is committed: until then an error
    leaves the store as it was, and an interrupted step is resumed by the next call.
    """
    started = time.monotonic()
    given = None if inputs is None else Inputs.of(inputs)
    samples = read_samples(store, given) if given else []
    with store.writing(), open_candidate(store, expert, name, **options) as candidate:
        if name is None and isinstance(expert, str | Path) and candidate.name != last_part(candidate.source):
            candidate.note(
                f"{candidate.source} is called {candidate.name}, because another expert has its name already"
            )
        with candidate.writing() as writer:
            if given:
                found = measure_inputs(candidate, given, samples, candidate.cut)
                record = write_inputs(store.storage, candidate.folder, found)
                candidate.inputs = InputsEntry(candidate.number, found.count, record, candidate.mark)
            candidate.absorb(writer, "absorbing", store.engine)
            if not allow_duplicate:
                _refuse_duplicate(candidate)
            if not allow_other_base:
                _refuse_other_base(candidate)
            candidate.note_oddities()
            added = candidate.write_record(writer.finish(candidate.outcomes), started)
            shortfall = candidate.check_entries()
            if review:
                added = review(candidate)
            commit(store, dataclasses.replace(store.manifest, base=candidate.vector.model).with_expert(added))
        clean_up_after_commit(store)
        shorten_entries(store)
        if shortfall:
            store.progress.note(shortfall)
    return added


def _refuse_duplicate(candidate: Candidate) -> None:
    if candidate.duplicate_of is not None:
        raise MergestreamError(
            f"{candidate.source} has been absorbed already, as {candidate.duplicate_of}; "
            "pass --allow-duplicate to add it once more"
        )
    if candidate.totals.norm == 0:
        raise MergestreamError(
            f"{candidate.source} is identical to the base; pass --allow-duplicate to add it all the same"
        )


def _refuse_other_base(candidate: Candidate) -> None:
    if candidate.base_check.is_other:
        raise MergestreamError(f"{candidate.base_check.note}; pass --allow-other-base to add it all the same")
