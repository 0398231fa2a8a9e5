"""A snapshot: a manifest and the files that it names, open for reading."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mergestream.checkpoints import TensorSpec, dtype_name
from mergestream.errors import MergestreamError, UsageError
from mergestream.files import allow_open_files
from mergestream.schema import invalid_file
from mergestream.storage import Storage
from mergestream.store.expert import Expert
from mergestream.store.manifest import Manifest
from mergestream.store.records import Record, Task, open_task, read_record
from mergestream.store.steps import StepReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mergestream.engine import Engine
    from mergestream.ledger.selection import Selection
    from mergestream.merging.memory import KeptExpert
    from mergestream.merging.reading import Reading
    from mergestream.methods.base import Method
    from mergestream.store.inputs import InputsReader


@dataclass(frozen=True)
class Snapshot:
    """The state or the entries after the last expert of a history; open files stay readable even if removed."""

    storage: Storage
    manifest: Manifest
    """Its history ends with the last expert of the snapshot"""
    readers: Mapping[int, StepReader]
    """By the number of the expert: the state after the last one, or the entries of all"""

    def __repr__(self) -> str:
        return f"<Snapshot of {str(self.storage)!r} at step {self.manifest.step}: {self.manifest.summary}>"

    @classmethod
    def open(cls, storage: Storage, manifest: Manifest) -> Snapshot:
        """Open the files that a manifest names."""
        allow_open_files(len(manifest.needed))
        readers: dict[int, StepReader] = {}
        snapshot = cls(storage, manifest, readers)
        try:
            for entry in manifest.needed:
                readers[entry.number] = StepReader(storage, entry)
            snapshot._check_layout()
        except BaseException as error:
            snapshot.close()
            if isinstance(error, UsageError) or not isinstance(error, MergestreamError | OSError):
                raise
            raise MergestreamError(f"the state of step {manifest.step} cannot be read: {error}") from error
        return snapshot

    def _check_layout(self) -> None:
        """Refuse a step that does not hold what the method lays out for the tensors of the base."""
        from mergestream.merging.plan import tensor_contexts

        method, base = self.method, self.manifest.base
        contexts = tensor_contexts(base, self.manifest.step)
        for name in base.merged:
            context = contexts[name]
            for reader in self.readers.values():
                found = reader.forms.get(name, {})
                shapes = {slot: form.shape for slot, form in found.items()}
                layout = method.layout_as_stored(context, shapes)
                expected = {slot: TensorSpec(dtype_name(form.dtype), form.shape) for slot, form in layout.items()}
                if found != expected:
                    raise invalid_file(reader.where, f"{name} is not as {method.name} lays it out")

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for reader in [*self.readers.values(), *self.__dict__.get("inputs", {}).values()]:
            reader.close()

    @property
    def last(self) -> Expert:
        return self.manifest.history[-1]

    @property
    def state(self) -> StepReader:
        """The state after the last expert, for methods that keep one."""
        return self.readers[self.last.number]

    @cached_property
    def method(self) -> Method:
        return self.manifest.make_method()

    @cached_property
    def inputs(self) -> dict[int, InputsReader]:
        """What is known of the inputs of experts, by their number; closed with the snapshot."""
        from mergestream.store.inputs import InputsReader

        base, known = self.manifest.base, {entry.number: entry.inputs for entry in self.manifest.history}
        return {number: InputsReader(self.storage, inputs, base) for number, inputs in known.items() if inputs}

    @cached_property
    def records(self) -> dict[str, Record]:
        """By expert: its settings, its tokens, its heads and its adapter's configuration."""
        return {entry.name: read_record(self.storage, entry) for entry in self.manifest.history}

    @property
    def kept(self) -> list[KeptExpert]:
        """The experts that `Manifest.needed` names, with their open files."""
        from mergestream.merging.plan import KeptExpert

        return [
            KeptExpert(
                name=entry.name,
                norm=entry.norm,
                mean_norm=entry.mean_norm,
                direction_norm=entry.direction_norm,
                cut=entry.cut,
                is_adapter=entry.is_adapter,
                files=self.readers[entry.number],
                inputs=self.inputs.get(entry.number),
            )
            for entry in self.manifest.needed
        ]

    def reading(self, engine: Engine | None = None, selection: Selection | None = None) -> Reading:
        """The merged model of all experts, or of those that were selected, on the engine's device."""
        from mergestream.ledger.selection import Selection
        from mergestream.merging.entries import read_out

        base, chosen = self.manifest.base, selection or Selection()
        return read_out(base, self.method, self.manifest.step, self.kept, chosen, engine.device if engine else "cpu")

    def shortfall(self, reading: Reading | None = None) -> str | None:
        """A warning that names the adapters of a reading (by default all) whose entries hold too little, or None."""
        everyone = self.reading()
        return (reading or everyone).shortfall(everyone)

    @property
    def tasks(self) -> list[str]:
        """The experts with heads of their own."""
        history = [entry for entry in self.manifest.history if entry.fates.get("head")]
        return [entry.name for entry in history if self.records[entry.name].heads]

    def open_task(self, name: str) -> Task:
        """The heads that were kept for one expert."""
        task = open_task(self.storage, self.manifest.expert(name))
        if task is None:
            others = f"these have: {', '.join(self.tasks)}" if self.tasks else "--heads GLOB at init keeps them"
            raise MergestreamError(f"expert {name} has no head of its own; {others}")
        return task
