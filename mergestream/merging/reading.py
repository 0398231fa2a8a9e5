"""The model that a store stands for: θ⁰ + scale · direction, tensor by tensor."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mergestream.algebra.bounds import matrix_shape
from mergestream.algebra.lowrank import LowRank, Value, dense, squared_norm
from mergestream.algebra.pieces import Elements, SquaredNorm, exact_sum, is_finite, ranges
from mergestream.base.model import BaseModel, base_changed
from mergestream.checkpoints import Checkpoint, torch_dtype
from mergestream.engine import Engine, Findings
from mergestream.errors import MergestreamError, UsageError
from mergestream.experts.vector import BasePieces
from mergestream.ledger.merge import merge_entries
from mergestream.ledger.method import Ledger, cut_entry, stack_of
from mergestream.ledger.readouts.base import EntriesReadout, StateReadout
from mergestream.ledger.readouts.plain import Plain
from mergestream.ledger.room import sharing
from mergestream.ledger.span import Entry, Span
from mergestream.merging.step import ReadState, memory_of, overflow_explained, streamed_memory, tensor_context
from mergestream.methods.base import Context, Method, State
from mergestream.methods.scale import NAMED, Scale, parse_scale, scale_value
from mergestream.progress import Progress

BALANCING_ROUNDS = 3
Measured = TypeVar("Measured")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Reading(ABC):
    """What is remembered, ready to be read out."""

    model: BaseModel
    norm2: Findings[float] = field(default_factory=Findings, kw_only=True)
    """‖direction‖² of the tensors that have been read out to their end"""

    @abstractmethod
    def elements(self, name: str) -> Elements | None:
        """A function that gives consecutive elements of the direction; None where all of them are zero."""

    @abstractmethod
    def direction(self, name: str) -> Value:
        """The direction of a whole tensor, in factors where it has a rank that is known and less than full."""

    @abstractmethod
    def rank_bound(self, name: str) -> int | None:
        """A bound of the rank of a tensor's direction; None where it is dense."""

    @abstractmethod
    def is_zero(self, name: str) -> bool:
        """Whether no expert has moved the tensor."""

    @abstractmethod
    def scale(self, given: str | float | None, engine: Engine) -> float:
        """By a user's rule or its own; ‖direction‖ is measured where the rule needs it and nobody has yet."""

    @property
    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes that reading out each tensor takes at its peak."""

    def pieces(self, name: str, base: Checkpoint, scale: float, dtype: str) -> Iterator[tuple[int, Tensor]]:
        """The merged tensor in order, as (first element, elements), rounded once, to ``dtype``."""
        tensor = self.model.tensors[name]
        theirs = BasePieces(base.read(name), torch_dtype(tensor.state_dtype if tensor.merges else tensor.dtype))
        with overflow_explained(name):
            direction, norm = self.elements(name) if tensor.merges else None, SquaredNorm()
        for start, stop in ranges(tensor.numel):
            piece = theirs.at(start, stop)
            if direction is not None:
                moved = direction(start, stop)
                norm.add(moved)
                piece = moved_by(piece, moved, scale)
            yield start, cast(piece, dtype, name)
        if tensor.digest and theirs.digest() != tensor.digest:
            raise base_changed(name, base)
        self.norm2[name] = norm.total()

    def norm(self, engine: Engine) -> float:
        """‖direction‖ over all tensors."""
        sizes = {name: self.model.tensors[name].numel for name in self.model.merged}
        return math.sqrt(exact_sum(norm2 for _, norm2 in engine.run(sizes, self._finite_norm2, self.memory)))

    def _finite_norm2(self, name: str) -> float:
        with overflow_explained(name):
            if not math.isfinite(norm2 := self._norm2(name)):
                raise OverflowError
        return norm2

    def _norm2(self, name: str) -> float:
        elements, norm = self.elements(name), SquaredNorm()
        for start, stop in ranges(self.model.tensors[name].numel) if elements else ():
            assert elements is not None
            norm.add(elements(start, stop))
        return norm.total()


@dataclass(frozen=True)
class StateReading(Reading):
    """A method's state after t models."""

    method: Method
    t: int
    read_state: ReadState
    mean_norm: float
    direction_norm: float | None = None
    """By the method itself, where it was measured"""
    device: str = "cpu"
    ranks: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """Of the left and the right basis of every slot, of the tensors whose state is in factors"""
    readout: StateReadout = field(default_factory=Plain)

    def elements(self, name: str) -> Elements | None:
        context, state = self._context(name), self._state(name)
        if _in_factors(state) or self.method.is_whole(context) or (context.linear and not self._plain):
            direction = self._direction(state, context)
            if isinstance(direction, LowRank):
                return direction.elements() if direction.any() else None
            whole = direction.reshape(-1)
            return lambda start, stop: whole[start:stop]
        flat = {slot: dense(value).reshape(-1) for slot, value in state.items()}

        def between(start: int, stop: int) -> Tensor:
            cut: State = {slot: value[start:stop].to(self.device) for slot, value in flat.items()}
            return dense(self._speak(self.method.direction(cut, context), context)).cpu()

        return between

    def direction(self, name: str) -> Value:
        return self._direction(self._state(name), self._context(name))

    def rank_bound(self, name: str) -> int | None:
        ranks = self.ranks.get(name)
        return None if ranks is None else min(sum(left for left, _ in ranks), sum(right for _, right in ranks))

    def is_zero(self, name: str) -> bool:
        return not any(value.any() for value in self._state(name).values())

    def scale(self, given: str | float | None, engine: Engine) -> float:
        rule = parse_scale(self.readout.scale_of(self.method) if given is None else given)
        if given is not None:
            self.method.check_scale(rule)
        known = self.direction_norm if self._plain else None
        return scale_value(rule, self.t, self.mean_norm, lambda: self.norm(engine) if known is None else known)

    def _norm2(self, name: str) -> float:
        state = self._state(name)
        if _in_factors(state):  # the norm of the core: nothing is multiplied out
            return squared_norm(self._direction(state, self._context(name)))
        return super()._norm2(name)

    @property
    def memory(self) -> dict[str, int]:
        sizes = {}
        for name, tensor in self.model.tensors.items():
            context = self._context(name)
            streamed = not tensor.merges or name in self.ranks
            sizes[name] = streamed_memory(context) if streamed else memory_of(self.method, context)
        return sizes

    @property
    def _plain(self) -> bool:
        return isinstance(self.readout, Plain)

    def _context(self, name: str) -> Context:
        return tensor_context(self.model, name, self.t)

    def _state(self, name: str) -> State:
        return {slot: self.read_state(slot, name) for slot in self.method.layout(self._context(name))}

    def _direction(self, state: State, context: Context) -> Value:
        if _in_factors(state):
            return self._speak(self.method.direction(state, context), context)
        on_device: State = {slot: dense(value).to(self.device) for slot, value in state.items()}
        return dense(self._speak(self.method.direction(on_device, context), context)).cpu()

    def _speak(self, direction: Value, context: Context) -> Value:
        if not context.linear:
            return self.readout.other(direction, self.t)
        if direction.ndim != 3:
            return self.readout.linear(direction)
        return torch.stack([dense(self.readout.linear(matrix)) for matrix in dense(direction)])


@dataclass(frozen=True)
class Voice:
    """An expert that is heard: its weight, how far its entry is cut, its norm, and the entry of each tensor."""

    name: str
    weight: float
    cut: int
    norm: float
    read: Callable[[str], Mapping[str, Tensor]]


class Clash(NamedTuple):
    """What experts do to each other in one matrix, by their numbers among the voices."""

    damage: Mapping[int, float]
    overlap: Tensor
    cosines: Tensor


@dataclass(frozen=True)
class EntriesReading(Reading):
    """The entries of the experts that are heard."""

    method: Ledger
    readout: EntriesReadout
    voices: Sequence[Voice]
    device: str = "cpu"

    @property
    def cut(self) -> int:
        """Entries are read as if so many experts shared the room."""
        return sharing([voice.cut for voice in self.voices])

    def entries(self, name: str) -> list[Entry]:
        kept = self.method.directions(self.context(name), self.cut)
        return [Entry(cut_entry(voice.read(name), kept), voice.weight) for voice in self.voices]

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
        mean_norm = math.fsum(voice.norm for voice in self.voices) / len(self.voices)
        return scale_value(rule, len(self.voices), mean_norm, lambda: self.norm(engine))

    @property
    def memory(self) -> dict[str, int]:
        """The merged matrix, all directions of both sides twice, and a dozen matrices of coefficients."""
        sizes = {}
        for name, tensor in self.model.tensors.items():
            context = self.context(name)
            _, m, n = stack_of(context)
            kept = self.method.directions(context, self.cut) or 1
            together = min(kept * len(self.voices), 8 * min(m, n))
            elements = 2 * math.prod(context.shape) + 2 * together * (m + n)
            whole = context.dtype.itemsize * elements + 12 * 8 * together**2
            sizes[name] = whole if tensor.merges else streamed_memory(context)
        return sizes

    def context(self, name: str) -> Context:
        return tensor_context(self.model, name, len(self.voices))

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

    def clashes(self, engine: Engine) -> Iterator[tuple[str, list[Clash]]]:
        """Of each matrix of every linear weight, all from one span: its products are what costs."""
        count = len(self.voices)
        return self.measured(engine, lambda span: Clash(self._damage(span), span.overlap(count), span.cosines(count)))

    def _damage(self, span: Span) -> dict[int, float]:
        return span.damage(self.readout.coefficients(span))

    def damage(self, engine: Engine, advance: Callable[[int], None] = lambda done: None) -> dict[str, float]:
        """What is done to each expert's own inputs, in the mean over all linear weights, by name; nothing of an expert
        that has moved none of them. ``advance`` is told how many elements are done."""
        found = []
        for name, matrices in self.measured(engine, self._damage):
            found += matrices
            advance(self.linear[name])
        return {self.voices[number].name: damage for number, damage in means(found).items()}

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
            voices = [
                dataclasses.replace(voice, weight=voice.weight * damage.get(voice.name, mean) / mean)
                for voice in reading.voices
            ]
            reading = dataclasses.replace(reading, voices=voices)
        return reading


def means(found: Iterable[Mapping[Key, float]]) -> dict[Key, float]:
    """The mean of each key over those that have it, exactly, so that their order makes no difference."""
    values: dict[Key, list[float]] = {}
    for one in found:
        for key, value in one.items():
            values.setdefault(key, []).append(value)
    return {key: math.fsum(known) / len(known) for key, known in values.items()}


def _in_factors(state: State) -> bool:
    return any(isinstance(value, LowRank) for value in state.values())


def moved_by(base: Tensor, direction: Tensor, scale: float) -> Tensor:
    """θ⁰ + scale · direction; not finite where it is too large for its type."""
    if abs(scale) > torch.finfo(base.dtype).max:  # which torch refuses as a factor of its own
        return base + direction * scale
    return torch.add(base, direction, alpha=scale)


def cast(piece: Tensor, dtype: str, name: str) -> Tensor:
    """Round to the output's type, and refuse what it cannot hold. Integers stay what they are."""
    if not piece.is_floating_point():
        return piece
    rounded = piece.to(torch_dtype(dtype))
    if is_finite(rounded):
        return rounded
    if not is_finite(piece):
        raise MergestreamError(f"tensor {name} becomes too large for {_called(piece.dtype)} when it is merged")
    wider = "bfloat16 or float32" if dtype == "F16" else "float32" if dtype == "BF16" else "float64"
    raise MergestreamError(
        f"tensor {name} has values that {_called(rounded.dtype)} cannot hold; export with --dtype {wider}"
    )


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
