"""One step: task vectors meet the state of a method, tensor by tensor.

    Δ (pieces, or whole) ──► method.absorb ──► state ──► writer,     norms ──► totals

A store's step and an in-memory `Merger`'s have one task vector and a state before it. A one-shot merge has all task
vectors at once and no state: then the direction after the last of them comes out, and nothing is kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mergestream.algebra.bounds import FactorBounds
from mergestream.algebra.lowrank import LowRank, Value, dense, squared_norm
from mergestream.algebra.pieces import LARGEST_NORM, SquaredNorm, exact_sum, is_finite, ranges
from mergestream.base.model import BaseModel
from mergestream.checkpoints import torch_dtype
from mergestream.digest import TensorHasher
from mergestream.engine import Engine
from mergestream.errors import MergestreamError
from mergestream.experts.sketch import Sketch
from mergestream.experts.vector import BasePieces, TaskVector
from mergestream.ledger.merge import merge_entries
from mergestream.ledger.readouts.agree import Agree
from mergestream.ledger.span import Entry
from mergestream.merging.cost import Cost, absorbing, absorbing_factors, carrying, memory_of, nbytes
from mergestream.merging.thresholds import find_thresholds
from mergestream.methods.base import Absorbed, Context, Method, State, absorb_in_turn
from mergestream.methods.scale import scale_value

ReadState = Callable[[str, str], Value]
"""Slot and tensor name to the state before a step."""


class StateWriter(Protocol):
    """Takes the state after a step."""

    def write(self, slot: str, name: str, start: int, piece: Tensor) -> None:
        """Consecutive elements of a dense slot, from ``start`` on."""

    def write_factors(self, name: str, state: Mapping[str, LowRank]) -> dict[str, Any]:
        """All slots of a tensor in factors; returns what must be remembered of them."""


class Discard:
    """A writer for those who only want to know."""

    def write(self, slot: str, name: str, start: int, piece: Tensor) -> None:
        pass

    def write_factors(self, name: str, state: Mapping[str, LowRank]) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Outcome:
    """What absorbing one tensor gave."""

    norm2: float
    kept2: float
    direction2: float | None
    """‖direction‖², where it was measured"""
    protected: int | None
    slots: dict[str, str] = field(default_factory=dict)
    """The digest of every dense slot of the new state."""
    factors: dict[str, Any] | None = None
    """Where the slots are kept in factors: what the writer must remember of them."""
    lost2: float = 0.0
    """The energy that was cut off to bound the rank"""

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.norm2, self.kept2, self.direction2 or 0.0, self.lost2))):
            raise OverflowError

    @property
    def kept(self) -> float:
        """The share of ‖Δ‖² that entered the state"""
        return self.kept2 / self.norm2 if self.norm2 else 1.0


@dataclass(frozen=True)
class Totals:
    """The scalars of the whole model after a step, all in float64."""

    t: int
    norm: float
    """‖Δ_t‖"""
    mean_norm: float
    """n_t, the mean of ‖Δ_1‖ … ‖Δ_t‖"""
    direction_norm: float | None
    """‖S_t‖ for the methods that sum; None where nobody asked for it"""
    scale: float
    """By the method's own rule; 1/λ_t of OPCM"""
    kept: float
    """The share of ‖Δ_t‖² that entered the state"""
    lost: float = 0.0
    """The share of the state's energy that was cut off to bound its rank"""

    @property
    def distance(self) -> float | None:
        """‖merged − θ⁰‖"""
        return None if self.direction_norm is None else abs(self.scale) * self.direction_norm


def total(method: Method, t: int, previous_mean: float, outcomes: Collection[Outcome]) -> Totals:
    """Sum up a step: n_t = ((t−1)·n_{t−1} + ‖Δ_t‖)/t and the method's scale.

    The sums are exact (fsum), so they do not depend on the order in which tensors finished.
    """
    norm2 = exact_sum(outcome.norm2 for outcome in outcomes)
    kept2 = exact_sum(outcome.kept2 for outcome in outcomes)
    norm = math.sqrt(norm2)
    if norm2 and not 1 / LARGEST_NORM <= norm <= LARGEST_NORM:
        place = "close to" if norm < 1 else "far from"
        raise MergestreamError(f"the expert is too {place} the base to be merged: float64 cannot hold its norm squared")
    mean_norm = ((t - 1) * previous_mean + norm) / t
    measured = [outcome.direction2 for outcome in outcomes if outcome.direction2 is not None]
    direction_norm = math.sqrt(math.fsum(measured)) if len(measured) == len(outcomes) else None
    scale = scale_value(method.scale_rule, t, mean_norm, lambda: direction_norm or 0.0)
    lost2 = math.fsum(outcome.lost2 for outcome in outcomes)
    lost = lost2 / (lost2 + (direction_norm or 0.0) ** 2) if lost2 else 0.0
    return Totals(t, norm, mean_norm, direction_norm, scale, kept2 / norm2 if norm2 else 1.0, lost)


@contextmanager
def overflow_explained(name: str) -> Iterator[None]:
    """Numbers that became too large on the way, told with the name of their tensor."""
    try:
        yield
    except (ArithmeticError, torch.linalg.LinAlgError) as error:
        raise MergestreamError(
            f"tensor {name} cannot be merged: its numbers become too large on the way; nothing was written"
        ) from error


def refuse_overflow(value: Tensor) -> None:
    if not is_finite(value):
        raise OverflowError


def no_state(slot: str, name: str) -> Value:
    raise AssertionError("there is no state before the first model")


@dataclass(frozen=True)
class Step:
    """Task vectors that meet the state of a method, on a device."""

    method: Method
    vectors: Sequence[TaskVector]
    before: int = 0
    """How many models have been absorbed already"""
    read_state: ReadState = no_state
    device: str = "cpu"
    bounds: Mapping[str, FactorBounds] = field(default_factory=dict)
    """The tensors whose state is kept in factors, and how much space there is for them."""
    max_rank: int | None = None
    sketch: Sketch | None = None
    """Takes the task vector as it goes by, where it is to be remembered."""
    measured: bool = False
    """Whether ‖direction‖ is measured even where the method's scale does not need it"""
    withdrawn: bool = False
    """Whether the model is taken out of the state of a method that adds up: −Δ is absorbed"""
    experts: Sequence[str] = ()
    """What each of the task vectors is called, where it has a name"""
    state_copies: int = 0
    """How often the state before is in memory while it is read: not at all where it is a view of a file"""

    @property
    def names(self) -> tuple[str, ...]:
        return self.vectors[0].names

    @property
    def counts(self) -> range:
        """t for each of the task vectors."""
        return range(self.before + 1, self.before + len(self.vectors) + 1)

    def context(self, name: str, t: int, thresholds: Mapping[str, float] | None = None, vector: int = 0) -> Context:
        rank = self.vectors[vector].rank(name) if self.method.remembers_experts else None
        expert = self.experts[vector] if self.experts else ""
        return tensor_context(self.vectors[0].model, name, t, thresholds, rank, expert)

    def run(self, engine: Engine, writer: StateWriter, *, done: Collection[str] = ()) -> Iterator[tuple[str, Outcome]]:
        """Absorb the one task vector, all tensors but those that are done; yields the outcomes as they come."""
        waiting = {name: self.cost(name).weight for name in self.names if name not in done}
        if waiting:
            found = find_thresholds(self, engine)
            yield from engine.run(waiting, lambda name: self.absorb(name, found(name)[0], writer), self.memory)

    def absorb(self, name: str, thresholds: Mapping[str, float], writer: StateWriter) -> Outcome:
        """Absorb one tensor of the one task vector and hand its new state to the writer."""
        (vector,) = self.vectors
        context = self.context(name, self.counts[-1], thresholds)
        with overflow_explained(name):
            absorb = self._absorb_factors if name in self.bounds else self._absorb_dense
            return absorb(vector, name, context, writer)

    def _absorb_dense(self, vector: TaskVector, name: str, context: Context, writer: StateWriter) -> Outcome:
        layout, whole = self.method.layout(context), self.method.is_whole(context)
        before = self._state_before(name)
        held = {slot: dense(value) for slot, value in before.items()} if before is not None else None
        sketched = self.sketch.tensor(name) if self.sketch and context.rank is None else None
        hashers = {slot: TensorHasher(form.dtype, form.shape) for slot, form in layout.items()}
        kept, directions = SquaredNorm(), SquaredNorm()
        absorbed: Absorbed | None = None
        for start, piece in self._arriving(vector, name, context):
            if sketched and isinstance(piece, Tensor):
                sketched.update(start, piece)
            state: State | None = None
            if held is not None:
                stop = start + piece.shape.numel()
                cut = held if whole else {slot: x.reshape(-1)[start:stop] for slot, x in held.items()}
                state = {slot: value.to(self.device) for slot, value in cut.items()}
            arriving = piece.to(self.device) if isinstance(piece, Tensor) else piece  # factors are small
            place = dataclasses.replace(context, start=start)
            absorbed = self.method.absorb(state, -arriving if self.withdrawn else arriving, place)
            if absorbed.kept is not None:
                kept.add(absorbed.kept.core if isinstance(absorbed.kept, LowRank) else absorbed.kept)
            if self.measures_direction:
                directions.add(dense(self.method.direction(absorbed.state, context)))
            for slot, form in layout.items():
                value = dense(absorbed.state[slot]).cpu().contiguous()
                expected = form.shape if whole else piece.shape
                assert tuple(value.shape) == tuple(expected), f"{self.method.name}: the slot {slot} is not as laid out"
                refuse_overflow(value)
                hashers[slot].update(value)
                writer.write(slot, name, start, value.reshape(-1))
        if self.sketch and sketched:
            self.sketch.add(sketched)
        norm2 = vector.norm2[name]
        kept2 = norm2 if absorbed is None or absorbed.kept is None else kept.total()
        direction2 = directions.total() if self.measures_direction else None
        digests = {slot: hasher.hexdigest() for slot, hasher in hashers.items()}
        return Outcome(norm2, kept2, direction2, absorbed.protected if absorbed else None, digests)

    def _arriving(self, vector: TaskVector, name: str, context: Context) -> Iterator[tuple[int, Value]]:
        """Δ as the method takes it: in pieces, whole, or in factors where it comes so and the method remembers it."""
        if context.rank is not None:
            delta = vector.factors(name)
            if self.sketch and delta.any():
                self.sketch.add_elements(name, delta.elements())
            yield 0, delta
        elif self.method.is_whole(context):
            yield 0, vector.whole(name)
        else:
            yield from vector.pieces(name)

    def _absorb_factors(self, vector: TaskVector, name: str, context: Context, writer: StateWriter) -> Outcome:
        """The same in factors, which are small: always on the CPU and in one piece."""
        delta = vector.factors(name)
        if self.sketch and delta.any():
            self.sketch.add_elements(name, delta.elements())
        absorbed = self.method.absorb(self._state_before(name), -delta if self.withdrawn else delta, context)
        slots: dict[str, LowRank] = {}
        lost2 = 0.0
        for slot, value in absorbed.state.items():
            assert isinstance(value, LowRank), f"{self.method.name} does not keep {slot} in factors"
            if self.max_rank is not None and max(value.left.rank, value.right.rank) > self.max_rank:
                value, lost = value.truncate(self.max_rank)
                lost2 += lost
            refuse_overflow(value.core)
            slots[slot] = value
        direction2 = squared_norm(self.method.direction({**slots}, context)) if self.measures_direction else None
        norm2 = vector.norm2[name]
        kept2 = norm2 if absorbed.kept is None else squared_norm(absorbed.kept)
        factors = writer.write_factors(name, slots)
        return Outcome(norm2, kept2, direction2, absorbed.protected, factors=factors, lost2=lost2)

    def directions(
        self, name: str, thresholds: Sequence[Mapping[str, float]], base: BasePieces
    ) -> Iterator[tuple[int, Tensor, list[float | None]]]:
        """Carry one tensor through all task vectors, without a state before or after: consecutive elements of the
        direction at the end, and what they add to ‖kept‖² of each (None where all is kept).

        Pieces go side by side and share those of the ``base``; of whole tensors only one is held at a time.
        """
        if self.method.remembers_experts:
            kept2, direction = self._merged_entries(name)
            yield from _in_pieces(direction, kept2)
            return
        contexts = [
            self.context(name, t, found, number)
            for number, (t, found) in enumerate(zip(self.counts, thresholds, strict=True))
        ]
        if not self.method.is_whole(contexts[0]):
            for arriving in zip(*(vector.pieces(name, base) for vector in self.vectors), strict=True):
                start = arriving[0][0]
                places = [dataclasses.replace(context, start=start) for context in contexts]
                kept2, direction = self.method.absorb_all([delta.to(self.device) for _, delta in arriving], places)
                yield start, direction.cpu(), kept2
            return
        arriving_whole = (vector.whole(name).to(self.device) for vector in self.vectors)
        kept2, direction = absorb_in_turn(self.method, arriving_whole, contexts)
        yield from _in_pieces(direction, kept2)

    def _merged_entries(self, name: str) -> tuple[list[float | None], Tensor]:
        """All experts' entries of one tensor as they are when all have come, and what is read out of them."""
        entries: list[Entry] = []
        kept2: list[float | None] = []
        for vector, model in enumerate(self.vectors):
            context = self.context(name, self.counts[-1], vector=vector)
            ((_, delta),) = self._arriving(model, name, context)
            absorbed = self.method.absorb(None, delta.to(self.device) if isinstance(delta, Tensor) else delta, context)
            entries.append(Entry({slot: dense(value).cpu() for slot, value in absorbed.state.items()}))
            kept2.append(None if absorbed.kept is None else squared_norm(absorbed.kept))
        return kept2, dense(merge_entries(Agree(), entries, context, device=self.device))

    @property
    def measures_direction(self) -> bool:
        """Where the scale needs it, where the share that bounding the rank costs does, or where it was asked for."""
        wanted = self.measured or self.method.scale_rule == "adaptive" or self.max_rank is not None
        return wanted and not self.method.remembers_experts  # whose direction is decided when it is read out

    def cost(self, name: str) -> Cost:
        """Of absorbing one tensor of the one task vector."""
        (vector,), context = self.vectors, self.context(name, self.counts[-1])
        if name not in self.bounds and context.rank is None:
            return absorbing(self.method, context, vector.stored(name), vector.numel(name))
        multiplied = round(vector.numel(name) * self.sketch.share(name)) if self.sketch and vector.rank(name) else 0
        if name not in self.bounds:
            return absorbing(self.method, context, vector.stored(name), multiplied)
        slots = len(self.method.layout(context))
        return absorbing_factors(self.bounds[name], slots, vector.stored(name), multiplied)

    def carrying_cost(self, name: str) -> Cost:
        """Of carrying one tensor of the base through all task vectors and writing it."""
        model, base = self.vectors[0].model, self.vectors[0].base
        stored = model.tensors[name].tied_to or name
        size, written = base.tensors[stored].nbytes, model.tensors[name].nbytes
        if not model.tensors[stored].merges:
            return Cost(size, written, model.tensors[name].numel)
        contexts = [self.context(stored, t, vector=number) for number, t in enumerate(self.counts)]
        experts = sum(vector.stored(stored) for vector in self.vectors) - len(self.vectors) * size
        return carrying(self.method, contexts, size, experts, written)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that each tensor takes at its peak."""
        copies = sum(file.copies for file in (self.vectors[0].base, *(vector.expert for vector in self.vectors)))
        return {
            name: (
                self.bounds[name].workspace
                if name in self.bounds
                else memory_of(self.method, self.context(name, self.counts[-1]), len(self.vectors))
            )
            + copies * self.vectors[0].numel(name) * self.vectors[0].dtype(name).itemsize
            + (self.state_copies and self.state_copies * nbytes(self.method.layout(self.context(name, self.before))))
            for name in self.names
        }

    def _state_before(self, name: str) -> State | None:
        if not self.before or self.method.remembers_experts:
            return None
        layout = self.method.layout(self.context(name, self.before))
        return {slot: self.read_state(slot, name) for slot in layout}


def tensor_context(
    model: BaseModel,
    name: str,
    t: int,
    thresholds: Mapping[str, float] | None = None,
    rank: int | None = None,
    expert: str = "",
) -> Context:
    """What a method may know of a tensor of the base after t models."""
    tensor = model.tensors[name]
    dtype, transposed = torch_dtype(tensor.state_dtype), name in model.conv1d
    return Context(t, tensor.role == "linear", tensor.shape, dtype, thresholds or {}, rank, transposed, name, expert)


def _in_pieces(direction: Tensor, kept2: list[float | None]) -> Iterator[tuple[int, Tensor, list[float | None]]]:
    """A whole tensor as `Step.directions` gives it; what it adds to ‖kept‖² comes with the first piece."""
    flat = direction.cpu().reshape(-1)
    for start, stop in ranges(flat.numel()):
        yield start, flat[start:stop], kept2
        kept2 = [None if part is None else 0.0 for part in kept2]


def carries_through(method: Method, count: int) -> bool:
    """Whether a tensor can be carried through so many models and read out without the other tensors: then a one-shot
    merge needs no store."""
    rankings = [ranking for t in range(1, count + 1) if (ranking := method.ranking(t))]
    return method.scale_rule != "adaptive" and all(ranking.names == ("delta",) for ranking in rankings)
