"""Where merged tensors come from, piece by piece: a store's state, or experts that are all at hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from mergestream.algebra.pieces import SquaredNorm
from mergestream.base.model import BaseModel
from mergestream.checkpoints import Checkpoint, TensorSpec
from mergestream.digest import combined_digest, tensor_digest
from mergestream.engine import ResultsByTensor
from mergestream.experts.vocabulary import ROWS
from mergestream.merging.reading import Reading, cast, moved_by
from mergestream.merging.step import Outcome, Step, Totals, overflow_explained, total
from mergestream.merging.thresholds import Thresholds
from mergestream.methods.scale import scale_value
from mergestream.store.records import Task


@dataclass(frozen=True)
class StateSource:
    """A state that is read out, as the model of a task where one is given: with its head in place of the base's, and
    under the names that its class has for the tensors."""

    reading: Reading
    base: Checkpoint
    scale: float
    task: Task | None = None

    @property
    def model(self) -> BaseModel:
        return self.reading.model

    @property
    def forms(self) -> Mapping[str, TensorSpec]:
        """Every tensor that is written, in the types of the base."""
        tensors = {**self.model.tensors, **self._heads}
        return {written: tensors[name] for written, name in self._names.items()}

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes that each takes at its peak."""
        memory, tensors = self.reading.memory, self.reading.model.tensors
        return {
            written: memory[name] + self.base.copies * tensors[name].nbytes
            for written, name in self._names.items()
            if name in memory
        }

    @property
    def _heads(self) -> Mapping[str, TensorSpec]:
        kept = self.task.heads.tensors if self.task else {}
        return {name: form for name, form in kept.items() if not name.startswith(ROWS)}

    def original(self, name: str) -> str:
        """What the base, or the expert whose head it is, calls a tensor that is written."""
        return self._names[name]

    @cached_property
    def _names(self) -> dict[str, str]:
        """What is written, by the name that it gets."""
        tensors = self.model.tensors
        if self.task is None:
            return {name: name for name in tensors}
        # A head of the base has no place in another class.
        placed = [name for name in tensors if tensors[name].role != "head" or name in self._heads]
        names = {self.task.prefix.name_in_task(name): name for name in placed}
        return {**names, **{name: name for name in self._heads if name not in tensors}}

    def pieces(self, name: str, dtype: str) -> Iterator[tuple[int, Tensor]]:
        """A tensor in order, each piece with the number of its first element, rounded once, to ``dtype``."""
        name = self._names[name]
        if self.task and name in self._heads:
            yield 0, cast(self.task.heads.read(name).reshape(-1), dtype, name)
        else:
            stored = self.model.tensors[name].tied_to or name
            yield from self.reading.pieces(stored, self.base, self.scale, dtype)

    @property
    def distance(self) -> float:
        """‖merged − θ⁰‖, once all has been read."""
        return abs(self.scale) * math.sqrt(math.fsum(self.reading.norm2.values()))


@dataclass(frozen=True)
class ExpertsSource:
    """Carries each tensor through all task vectors at once: every file is read once, and no state is kept."""

    step: Step
    base: Checkpoint
    thresholds: Thresholds
    kept2: ResultsByTensor[list[float | None]] = field(default_factory=ResultsByTensor)
    """‖kept‖² of each task vector, None where all is kept, of the tensors that have been merged"""
    direction2: ResultsByTensor[float] = field(default_factory=ResultsByTensor)
    base_digests: ResultsByTensor[str] = field(default_factory=ResultsByTensor)
    """Of the tensors of the base that have been read"""

    @property
    def model(self) -> BaseModel:
        return self.step.vectors[0].model

    @property
    def forms(self) -> Mapping[str, TensorSpec]:
        return self.model.tensors

    def original(self, name: str) -> str:
        return name

    @property
    def memory(self) -> Mapping[str, int]:
        return self.step.memory

    @cached_property
    def scale(self) -> float:
        """No norm decides it: else the method could not be carried through."""
        return scale_value(self.step.method.scale_rule, self.step.counts[-1], math.nan, lambda: math.nan)

    def pieces(self, name: str, dtype: str) -> Iterator[tuple[int, Tensor]]:
        name = self.model.tensors[name].tied_to or name
        if not self.model.tensors[name].merges:
            tensor = self.base.read(name)
            self.base_digests[name] = tensor_digest(tensor)
            yield 0, cast(tensor.reshape(-1), dtype, name)
            return
        base, norm = self.step.vectors[0].base_pieces(name), SquaredNorm()
        kept: list[list[float | None]] = []
        with overflow_explained(name):
            for start, direction, kept2 in self.step.directions(name, self.thresholds(name), base):
                norm.add(direction)
                kept.append(kept2)
                merged = moved_by(base.at(start, start + direction.numel()), direction, self.scale)
                yield start, cast(merged, dtype, name)
        self.base_digests[name], self.direction2[name] = base.digest(), norm.total()
        self.kept2[name] = [_sum(parts) for parts in zip(*kept, strict=True)] or [None] * len(self.step.vectors)

    @property
    def base_digest(self) -> str:
        """As a store has it, once all has been read."""
        tensors = self.model.tensors.items()
        return combined_digest({name: self.base_digests[tensor.tied_to or name] for name, tensor in tensors})

    def totals(self) -> list[Totals]:
        """What each model adds to the merge, once all has been read."""
        found: list[Totals] = []
        for number, (t, vector) in enumerate(zip(self.step.counts, self.step.vectors, strict=True)):
            outcomes = []
            for name in self.step.names:
                norm2, kept2 = vector.norm2[name], self.kept2[name][number]
                with overflow_explained(name):
                    outcomes.append(Outcome(norm2, norm2 if kept2 is None else kept2, None, None))
            found.append(total(self.step.method, t, found[-1].mean_norm if found else 0.0, outcomes))
        return found

    @property
    def distance(self) -> float:
        return abs(self.scale) * math.sqrt(math.fsum(self.direction2.values()))


Source = StateSource | ExpertsSource
"""The tensors of a merged model."""


def _sum(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return math.fsum(known) if known else None
