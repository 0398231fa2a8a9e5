"""The model that the entries of a ledger stand for, and what its experts do to each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from mergestream.algebra.bounds import matrix_shape
from mergestream.algebra.lowrank import LowRank, Value
from mergestream.algebra.pieces import Elements
from mergestream.checkpoints import TensorSpec
from mergestream.engine import Engine
from mergestream.errors import UsageError
from mergestream.ledger.merge import merge_entries
from mergestream.ledger.method import Ledger, cut_entry, stack_of
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.ledger.room import sharing
from mergestream.ledger.span import Entry, Span
from mergestream.merging.cost import Cost, reading_entries, streamed_memory
from mergestream.merging.reading import Reading
from mergestream.merging.step import overflow_explained, tensor_context
from mergestream.methods.base import Context
from mergestream.methods.scale import NAMED, Scale, parse_scale, scale_value
from mergestream.progress import Progress

BALANCING_ROUNDS = 3
Measured = TypeVar("Measured")
Key = TypeVar("Key", bound=Hashable)


class Entries(Protocol):
    """What is remembered of one expert."""

    def entry(self, name: str) -> Mapping[str, Tensor]:
        """All slots of a tensor; none where it was left alone."""

    def forms(self, name: str) -> Mapping[str, TensorSpec]:
        """The same without reading them."""


@dataclass(frozen=True)
class WeightedExpert:
    """An expert that is heard: its weight, how far its entry is cut, its norm, and the entry of each tensor."""

    name: str
    weight: float
    cut: int
    norm: float
    remembered: Entries


class MatrixInterference(NamedTuple):
    """What experts do to each other in one matrix, by their numbers among the experts."""

    damage: Mapping[int, float]
    overlap: Tensor
    cosines: Tensor


@dataclass(frozen=True)
class EntriesReading(Reading):
    """The entries of the experts that are heard."""

    method: Ledger
    readout: EntriesReadout
    experts: Sequence[WeightedExpert]
    device: str = "cpu"

    @property
    def readout_name(self) -> str:
        return self.readout.name

    @property
    def weights(self) -> dict[str, float]:
        return {expert.name: expert.weight for expert in self.experts}

    @property
    def cut(self) -> int:
        """Entries are read as if so many experts shared the room."""
        return sharing([expert.cut for expert in self.experts])

    def entries(self, name: str) -> list[Entry]:
        kept = self.method.directions(self.context(name), self.cut)
        return [Entry(cut_entry(expert.remembered.entry(name), kept), expert.weight) for expert in self.experts]

    def elements(self, name: str) -> Elements | None:
        direction = merge_entries(self.readout, self.entries(name), self.context(name), device=self.device)
        if isinstance(direction, LowRank):
            return None
        whole = direction.reshape(-1)
        return lambda start, stop: whole[start:stop]

    def direction(self, name: str) -> Value:
        context = self.context(name)
        return merge_entries(self.readout, self.entries(name), context, in_factors=True, device=self.device)

    def rank_bound(self, name: str) -> int | None:
        entries = [entry for entry in self.entries(name) if entry.slots]
        context = self.context(name)
        if not entries:
            return 0
        if len(context.shape) < 2 or stack_of(context)[0] or ("delta" in entries[0].slots and not context.linear):
            return None
        most = min(matrix_shape(context.shape))
        return min(most, sum(len(entry.slots.get("sigma", range(most))) for entry in entries))

    def is_zero(self, name: str) -> bool:
        return not any(
            bool(entry.slots["delta" if "delta" in entry.slots else "sigma"].any())
            for entry in self.entries(name)
            if entry.slots
        )

    def scale(self, given: str | float | None, engine: Engine) -> float:
        rule: Scale = self.readout.scale if given is None else parse_scale(given)
        if rule in NAMED and not self.readout.additive:
            raise UsageError(
                f"{self.readout.name} does not add up task vectors, so {rule} is no scale of its own; pass a number"
            )
        mean_norm = math.fsum(expert.norm for expert in self.experts) / len(self.experts)
        return scale_value(rule, len(self.experts), mean_norm, lambda: self.norm(engine))

    def cost(self, name: str) -> Cost:
        tensor, context = self.model.tensors[name], self.context(name)
        if not tensor.merges:
            return Cost(tensor.nbytes, elements=tensor.numel)
        forms = [expert.remembered.forms(name) for expert in self.experts]
        size = sum(form.nbytes for slots in forms for form in slots.values())
        whole = min(matrix_shape(context.shape)) if context.linear else 0  # others that are kept whole are summed up
        kept = self.method.directions(context, self.cut) or whole
        directions = sum(min(kept, slots["sigma"].shape[-1]) if "sigma" in slots else kept for slots in forms if slots)
        return reading_entries(self.readout, context, tensor.nbytes, size, directions)

    @property
    def memory(self) -> dict[str, int]:
        """The merged matrix, all directions of both sides twice, and a dozen matrices of coefficients."""
        sizes = {}
        for name, tensor in self.model.tensors.items():
            context = self.context(name)
            _, m, n = stack_of(context)
            kept = self.method.directions(context, self.cut) or 1
            together = min(kept * len(self.experts), 8 * min(m, n))
            elements = 2 * math.prod(context.shape) + 2 * together * (m + n)
            whole = context.dtype.itemsize * elements + 12 * 8 * together**2
            sizes[name] = whole if tensor.merges else streamed_memory(context)
        return sizes

    def context(self, name: str) -> Context:
        return tensor_context(self.model, name, len(self.experts))

    @cached_property
    def linear(self) -> dict[str, int]:
        """The linear weights, with their sizes."""
        return {name: tensor.numel for name, tensor in self.model.tensors.items() if tensor.role == "linear"}

    def spans(self, name: str) -> Iterator[Span]:
        context = self.context(name)
        yield from Span.of(self.entries(name), context.dtype, context.transposed, self.device)

    def measured(self, engine: Engine, measure: Callable[[Span], Measured]) -> Iterator[tuple[str, list[Measured]]]:
        """What is measured of each matrix of every linear weight, as they finish."""

        def of_tensor(name: str) -> list[Measured]:
            with overflow_explained(name):
                return [measure(span) for span in self.spans(name) if len(span.sigma)]

        yield from engine.run(self.linear, of_tensor, self.memory)

    def matrices(self, engine: Engine) -> Iterator[tuple[str, list[MatrixInterference]]]:
        """Of each matrix of every linear weight, all from one span: its products are what costs."""
        count = len(self.experts)
        return self.measured(
            engine, lambda span: MatrixInterference(self._damage(span), span.overlap(count), span.cosines(count))
        )

    def _damage(self, span: Span) -> dict[int, float]:
        return span.damage(self.readout.coefficients(span))

    def damage(self, engine: Engine, advance: Callable[[int], None] = lambda done: None) -> dict[str, float]:
        """What is done to each expert's own inputs, in the mean over all linear weights, by name; nothing of an expert
        that has moved none of them. ``advance`` is told how many elements are done."""
        found = []
        for name, matrices in self.measured(engine, self._damage):
            found += matrices
            advance(self.linear[name])
        return {self.experts[number].name: damage for number, damage in means(found).items()}

    def balanced(self, engine: Engine, progress: Progress) -> EntriesReading:
        """With weights by which every expert's own directions are served alike: c_i ← c_i · damage_i / mean."""
        reading = self
        for number in range(1, BALANCING_ROUNDS + 1):
            with progress.task(
                f"balancing, round {number} of {BALANCING_ROUNDS}", sum(self.linear.values())
            ) as advance:
                damage = reading.damage(engine, advance)
            mean = math.fsum(damage.values()) / max(len(damage), 1)
            if not mean:
                break
            experts = [
                dataclasses.replace(expert, weight=expert.weight * damage.get(expert.name, mean) / mean)
                for expert in reading.experts
            ]
            reading = dataclasses.replace(reading, experts=experts)
        return reading


def means(found: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    """The mean of each key over those that have it, exactly, so that their order makes no difference."""
    values: dict[Key, list[float]] = {}
    for one in found:
        for key, value in one.items():
            values.setdefault(key, []).append(value)
    return {key: math.fsum(known) / len(known) for key, known in values.items()}
