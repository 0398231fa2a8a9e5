"""A store as it is after some step: the manifest and what is remembered that belong together, open for reading."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mergestream.checkpoints import TensorSpec, dtype_name
from mergestream.errors import MergestreamError
from mergestream.files import allow_open_files
from mergestream.progress import Progress
from mergestream.schema import invalid_file
from mergestream.store.manifest import Expert, Manifest
from mergestream.store.mirror import Place
from mergestream.store.records import Task, has_task, open_task, read_record
from mergestream.store.steps import StepReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mergestream.engine import Engine
    from mergestream.experts.vocabulary import Token
    from mergestream.ledger.selection import Selection
    from mergestream.merging.reading import Reading
    from mergestream.methods.base import Method


@dataclass(frozen=True)
class Snapshot:
    """What is remembered after the last model of a history; files stay readable while it is open, even if removed."""

    place: Place
    manifest: Manifest
    """Its history ends with the step whose state this is."""
    readers: Mapping[int, StepReader]
    """By the number of the expert: the state after the last, or the entry of every one"""

    def __repr__(self) -> str:
        return f"<Snapshot of {str(self.place)!r} at step {self.manifest.step}: {self.manifest.told}>"

    @classmethod
    def open(cls, place: Place, manifest: Manifest) -> Snapshot:
        entries = manifest.readable
        allow_open_files(len(entries))
        with ExitStack() as opened:
            readers: dict[int, StepReader] = {}
            snapshot = cls(place, manifest, readers)
            for entry in entries:
                readers[entry.number] = StepReader(place, entry)
                opened.callback(readers[entry.number].close)
                snapshot._check_forms(readers[entry.number])
            opened.pop_all()
        return snapshot

    def _check_forms(self, reader: StepReader) -> None:
        """Refuse a step that does not hold what the method lays out for the tensors of the base."""
        from mergestream.ledger.method import Ledger
        from mergestream.merging.step import tensor_context

        for name in self.manifest.base.merged:
            found, context = reader.forms(name), tensor_context(self.manifest.base, name, self.manifest.step)
            if not isinstance(self.method, Ledger):
                layout = self.method.layout(context)
            elif not found:  # an adapter leaves most tensors alone
                continue
            else:
                sigma, whole = found.get("sigma"), self.method.directions(context, self.manifest.step) is None
                layout = self.method.slots(context, None if whole or not sigma else sigma.shape[-1:][0])
            expected = {slot: TensorSpec(dtype_name(form.dtype), form.shape) for slot, form in layout.items()}
            if found != expected:
                raise invalid_file(reader.directory, f"{name} is not as {self.method.name} lays it out")

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for reader in self.readers.values():
            reader.close()

    @property
    def last(self) -> Expert:
        return self.manifest.history[-1]

    @property
    def state(self) -> StepReader:
        """That after the last model, where there is one for all."""
        return self.readers[self.last.number]

    @cached_property
    def method(self) -> Method:
        return self.manifest.make_method()

    def reading(self, engine: Engine, selection: Selection | None = None, progress: Progress | None = None) -> Reading:
        """All that is remembered, or what was chosen of it, ready to be read out."""
        from mergestream.ledger.method import Ledger
        from mergestream.ledger.selection import Selection
        from mergestream.merging.entries import EntriesReading, WeightedExpert
        from mergestream.merging.reading import StateReading

        model, method, selection = self.manifest.base, self.method, selection or Selection()
        if not isinstance(method, Ledger):
            ranks = {name: found for name in model.merged if (found := self.ranks(name)) is not None}
            norms = self.last.mean_norm, self.last.direction_norm
            readout = selection.of_state(method)
            state, step = self.state, self.manifest.step
            return StateReading(model, method, step, state.read, *norms, engine.device, ranks, readout, state.copies)
        chosen, weights = selection.of_entries(self.manifest.names, self.manifest.adapters)
        experts = [
            WeightedExpert(entry.name, weights[entry.name], entry.cut, entry.norm, self.readers[entry.number])
            for entry in self.manifest.history
            if entry.name in weights
        ]
        reading = EntriesReading(model, method, chosen, experts, engine.device)
        return reading.balanced(engine, progress or Progress()) if selection.balance else reading

    def held(self) -> dict[str, dict[str, float]]:
        """Of a ledger, by expert and tensor: the share of ‖Δ‖² that its entry holds as it is read now.

        Little more than the singular values is read for it.
        """
        from mergestream.ledger.method import Ledger, cut_entry
        from mergestream.ledger.span import ENERGIES, Entry
        from mergestream.merging.step import tensor_context

        method, model, cut = self.method, self.manifest.base, self.manifest.sharing
        assert isinstance(method, Ledger)
        directions = {name: method.directions(tensor_context(model, name, cut), cut) for name in model.merged}

        def share(expert: Expert, name: str) -> float:
            slots = self.readers[expert.number].entry(name, ENERGIES)
            return Entry(cut_entry(slots, directions[name])).held

        return {entry.name: {name: share(entry, name) for name in model.merged} for entry in self.manifest.history}

    def ranks(self, name: str) -> list[tuple[int, int]] | None:
        """The ranks of the left and the right basis of every slot of a tensor's state; None where they are dense."""
        from mergestream.merging.step import tensor_context

        slots = list(self.method.layout(tensor_context(self.manifest.base, name, self.manifest.step)))
        return self.state.ranks(slots, name)

    @property
    def tasks(self) -> list[str]:
        """The experts with heads of their own."""
        return [entry.name for entry in self.manifest.history if has_task(self.place, entry)]

    def open_task(self, name: str) -> Task:
        """What was kept for one expert."""
        task = open_task(self.place, self.manifest.expert(name))
        if task is None:
            others = f"these have: {', '.join(self.tasks)}" if self.tasks else "--heads GLOB at init keeps them"
            raise MergestreamError(f"expert {name} has no head of its own; {others}")
        return task

    def tokens(self, expert: Expert) -> list[Token]:
        """The tokens whose rows were kept for an expert, in the order of these."""
        if expert.options.get("vocab") not in ("union", "grow"):
            return []
        return read_record(self.place, expert)["tokens"]
