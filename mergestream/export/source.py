"""Sources of merged tensors: what a store remembers, or experts that are merged in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from mergestream.algebra.pieces import SquaredNorm
from mergestream.base.model import BaseModel
from mergestream.checkpoints import Checkpoint, TensorSpec
from mergestream.digest import tensor_digest
from mergestream.engine import ResultsByTensor
from mergestream.experts.vocabulary import ROWS
from mergestream.merging.carry import Carry
from mergestream.merging.reading import Reading, cast, moved_by
from mergestream.merging.step import Outcome, Totals, overflow_explained, total
from mergestream.merging.thresholds import Thresholds
from mergestream.methods.scale import scale_value
from mergestream.store.records import Task


@dataclass(frozen=True)
class StateSource:
    """Reads tensors out of a store: θ⁰ + scale · direction.

    With a ``task`` it has the head of that expert, and the tensor names of the expert's class.
    """

    reading: Reading
    base: Checkpoint
    scale: float
    task: Task | None = None

    @property
    def model(self) -> BaseModel:
        return self.reading.model

    @cached_property
    def _heads(self) -> dict[str, TensorSpec]:
        kept = self.task.heads.tensors if self.task else {}
        return {name: spec for name, spec in kept.items() if not name.startswith(ROWS)}

    @cached_property
    def names(self) -> dict[str, str]:
        """Every tensor by the name it is written under, with its name in the base or the expert."""
        tensors = self.model.tensors
        if self.task is None:
            return {name: name for name in tensors}
        # The task's class has no place for a head of the base, and for tensors that it does not have.
        absent = {name for name in tensors if tensors[name].role == "head"} - self._heads.keys()
        placed = [name for name in tensors if name not in absent.union(self.task.absent)]
        names = {self.task.prefix.name_in_task(name): name for name in placed}
        return {**names, **{name: name for name in self._heads if name not in tensors}}

    @cached_property
    def layout(self) -> dict[str, TensorSpec]:
        """Every tensor that is written, in the base's dtype."""
        tensors = {**self.model.tensors, **self._heads}
        return {written: tensors[name] for written, name in self.names.items()}

    @property
    def memory(self) -> Mapping[str, int]:
        """Peak bytes per tensor."""
        memory, tensors, copies = self.reading.memory, self.model.tensors, self.base.copies
        known = {written: name for written, name in self.names.items() if name in memory}
        return {written: memory[name] + copies * tensors[name].nbytes for written, name in known.items()}

    def pieces(self, name: str, dtype: str) -> Iterator[tuple[int, Tensor]]:
        """Consecutive pieces of a tensor, each with its first element, rounded once to ``dtype``."""
        name = self.names[name]
        if self.task and name in self._heads:
            return iter([(0, cast(self.task.heads.read(name).reshape(-1), dtype, name))])
        stored = self.model.tensors[name].tied_to or name
        return self.reading.pieces(stored, self.base, self.scale, dtype)

    @property
    def distance(self) -> float:
        """‖merged − θ⁰‖, after all tensors were read."""
        return abs(self.scale) * math.sqrt(math.fsum(self.reading.norm2.values()))


@dataclass(frozen=True)
class ExpertsSource:
    """Merges each tensor of all experts in one pass: every file is read once, and no state is kept."""

    step: Carry
    base: Checkpoint
    thresholds: Thresholds
    kept2: ResultsByTensor[list[float | None]] = field(default_factory=ResultsByTensor)
    """‖kept‖² of each expert by tensor; None where all of Δ is kept"""
    direction2: ResultsByTensor[float] = field(default_factory=ResultsByTensor)
    """‖direction‖² by tensor"""
    base_digests: ResultsByTensor[str] = field(default_factory=ResultsByTensor)

    @property
    def model(self) -> BaseModel:
        return self.step.vectors[0].model

    @cached_property
    def names(self) -> dict[str, str]:
        return {name: name for name in self.model.tensors}

    @property
    def layout(self) -> Mapping[str, TensorSpec]:
        return self.model.tensors

    @property
    def memory(self) -> Mapping[str, int]:
        return self.step.memory

    @cached_property
    def scale(self) -> float:
        """The method's scale, which depends on no norm: such methods pass through a temporary store instead."""
        return scale_value(self.step.method.scale_rule, self.step.counts[-1], math.nan, lambda: math.nan)

    def pieces(self, name: str, dtype: str) -> Iterator[tuple[int, Tensor]]:
        """Consecutive pieces of a tensor, each with its first element, rounded once to ``dtype``."""
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

    def totals(self) -> list[Totals]:
        """The scalars of the model after each expert, after all tensors were read."""
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
        """‖merged − θ⁰‖, after all tensors were read."""
        return abs(self.scale) * math.sqrt(math.fsum(self.direction2.values()))


Source = StateSource | ExpertsSource


def _sum(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return math.fsum(known) if known else None
