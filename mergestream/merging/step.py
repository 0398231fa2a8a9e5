"""One step: every tensor of a task vector is absorbed, and the norms of all tensors are summed up.

Δ (pieces) ──► method.absorb ──► state (pieces) ──► norms ──► λ
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from torch import Tensor

from mergestream.algebra.bounds import Room
from mergestream.algebra.lowrank import LowRank, Value, dense, squared_norm
from mergestream.algebra.pieces import PIECE, Elements
from mergestream.algebra.selection import Search, Tally, sample_ranges, sample_stride, tally
from mergestream.checkpoints import torch_dtype
from mergestream.digest import TensorHasher
from mergestream.engine import LocalEngine
from mergestream.experts.sketch import Sketch
from mergestream.experts.vector import TaskVector
from mergestream.methods.base import Absorbed, Context, Method, State

ReadState = Callable[[str, str], Value]
"""Slot and tensor name to the state before this step."""


class StateWriter(Protocol):
    """Takes the state after this step."""

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
    direction2: float
    protected: int | None
    slots: dict[str, str] = field(default_factory=dict)
    """The digest of every dense slot of the new state."""
    factors: dict[str, Any] | None = None
    """Where the slots are kept in factors: what the writer must remember of them."""
    lost2: float = 0.0
    """The energy that was cut off to bound the rank"""

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
    direction_norm: float
    """‖S_t‖ for the methods that sum"""
    scale: float
    """1/λ_t"""
    kept: float
    """The share of ‖Δ_t‖² that entered the state"""
    lost: float = 0.0
    """The share of the state's energy that was cut off to bound its rank"""

    @property
    def distance(self) -> float:
        """‖merged − θ⁰‖"""
        return self.scale * self.direction_norm


def total(method: Method, t: int, previous_mean: float, outcomes: Mapping[str, Outcome]) -> Totals:
    """Sum up a step: n_t = ((t−1)·n_{t−1} + ‖Δ_t‖)/t and the method's scale.

    The sums are exact (fsum), so they do not depend on the order in which tensors finished.
    """
    norm2 = math.fsum(outcome.norm2 for outcome in outcomes.values())
    kept2 = math.fsum(outcome.kept2 for outcome in outcomes.values())
    norm = math.sqrt(norm2)
    mean_norm = ((t - 1) * previous_mean + norm) / t
    direction_norm = math.sqrt(math.fsum(outcome.direction2 for outcome in outcomes.values()))
    scale = method.readout_scale(t, mean_norm, direction_norm)
    lost2 = math.fsum(outcome.lost2 for outcome in outcomes.values())
    lost = lost2 / (lost2 + direction_norm**2) if lost2 else 0.0
    return Totals(t, norm, mean_norm, direction_norm, scale, kept2 / norm2 if norm2 else 1.0, lost)


@dataclass(frozen=True)
class Step:
    """The t-th task vector meets the state of a method, on a device."""

    method: Method
    t: int
    vector: TaskVector
    read_state: ReadState
    device: str = "cpu"
    rooms: Mapping[str, Room] = field(default_factory=dict)
    """The tensors whose state is kept in factors, and how much space there is for them."""
    max_rank: int | None = None
    sketch: Sketch | None = None
    """Takes the task vector as it goes by, where it is to be remembered."""

    def absorb(self, name: str, thresholds: Mapping[str, float], writer: StateWriter) -> Outcome:
        """Absorb one tensor and hand the new state to ``writer``, piece by piece."""
        tensor = self.vector.model.tensors[name]
        linear = tensor.role == "linear"
        context = Context(self.t, linear, thresholds)
        if name in self.rooms:
            return self._absorb_factors(name, context, writer)
        slots = self.method.slots(self.t)
        values = self._state(name)
        before = {slot: dense(value) for slot, value in values.items()} if values else None
        dtype = torch_dtype(tensor.state_dtype)
        hashers = {slot: TensorHasher(dtype, tensor.shape) for slot in slots}
        norms, kept, directions, protected = [], [], [], None
        sketched = self.sketch.tensor(name) if self.sketch else None
        for piece in self.vector.pieces(name, whole=linear and self.method.whole_linear):
            state = _cut(before, piece.start, piece.delta, self.device)
            if sketched:
                sketched.update(piece.start, piece.delta)
            delta = piece.delta.to(self.device)
            absorbed = self.method.absorb(state, delta, context)
            norms.append(piece.norm2)
            kept.append(piece.norm2 if absorbed.kept is delta else squared_norm(absorbed.kept))
            direction = self.method.direction(absorbed.state, self.t)
            directions.append(piece.norm2 if direction is delta else squared_norm(direction))
            protected = absorbed.protected
            for slot in slots:
                value = absorbed.state[slot].cpu().contiguous()
                hashers[slot].update(value)
                writer.write(slot, name, piece.start, value.reshape(-1))
        if self.sketch and sketched:
            self.sketch.add(sketched)
        return Outcome(
            math.fsum(norms),
            math.fsum(kept),
            math.fsum(directions),
            protected,
            {slot: hasher.hexdigest() for slot, hasher in hashers.items()},
        )

    def _absorb_factors(self, name: str, context: Context, writer: StateWriter) -> Outcome:
        """The same in factors, which are small: always on the CPU and in one piece."""
        delta = self.vector.factors(name)
        if self.sketch and delta.any():
            self.sketch.add_elements(name, delta.elements())
        state = self._state(name)
        absorbed = self.method.absorb(cast(State | None, state), cast(Tensor, delta), context)
        slots, lost2 = self._bounded(absorbed)
        direction = self.method.direction(cast(State, slots), self.t)
        return Outcome(
            squared_norm(delta),
            squared_norm(absorbed.kept),
            squared_norm(direction),
            absorbed.protected,
            factors=writer.write_factors(name, slots),
            lost2=lost2,
        )

    def _bounded(self, absorbed: Absorbed) -> tuple[dict[str, LowRank], float]:
        """The new slots, cut down to the rank that they may have, and the energy that this costs."""
        slots, lost2 = {}, 0.0
        for slot in self.method.slots(self.t):
            value = cast(LowRank, absorbed.state[slot])
            if self.max_rank is not None and max(value.left.rank, value.right.rank) > self.max_rank:
                value, lost = value.truncate(self.max_rank)
                lost2 += lost
            slots[slot] = value
        return slots, lost2

    def ranked(self, which: str, name: str, base: Elements) -> Elements:
        """Any range of the magnitudes that are to be ranked."""
        if which == "delta":
            fresh = self.vector.elements(name, base)
        else:
            state = self.read_state(which, name)
            if isinstance(state, Tensor):
                flat = state.reshape(-1)
                return lambda start, stop: flat[start:stop].abs()
            fresh = state.elements()
        return lambda start, stop: fresh(start, stop).abs_()

    def _state(self, name: str) -> dict[str, Value] | None:
        if self.t == 1:
            return None
        return {slot: self.read_state(slot, name) for slot in self.method.slots(self.t - 1)}


def thresholds(steps: Sequence[Step], engine: LocalEngine) -> Callable[[str], list[dict[str, float]]]:
    """What the method asks to be ranked before each of the steps, by the name of the tensor.

    Steps that are taken at once share their passes over the base.
    """
    wanted = []
    over, density = "model", 1.0
    for number, step in enumerate(steps):
        ranking = step.method.ranking(step.t)
        if ranking is not None:
            wanted += [(number, which) for which in ranking.names]
            over, density = ranking.over, ranking.density
    if not wanted:
        return lambda name: [{} for _ in steps]

    def search(engine: LocalEngine, names: Sequence[str]) -> list[dict[str, float]]:
        found: list[dict[str, float]] = [{} for _ in steps]
        for (number, which), value in zip(wanted, _search(steps, wanted, density, engine, names), strict=True):
            found[number][which] = value
        return found

    if over == "tensor":
        alone = LocalEngine(workers=1)
        return lambda name: search(alone, (name,))
    common = search(engine, steps[0].vector.names)
    return lambda name: common


def _search(
    steps: Sequence[Step], wanted: Sequence[tuple[int, str]], density: float, engine: LocalEngine, names: Sequence[str]
) -> list[float]:
    """The magnitude that the ``density`` largest entries of all these tensors reach, for everything that is wanted."""
    vector = steps[0].vector
    sizes = {name: vector.numel(name) for name in names}
    total = sum(sizes.values())

    def elements(name: str) -> list[Elements]:
        base = vector.base_elements(name)
        return [steps[number].ranked(which, name, base) for number, which in wanted]

    blocks: list[list[Tensor]] = [[] for _ in wanted]
    for name in names:
        ranked = elements(name)
        for start, stop in sample_ranges(sizes[name], sample_stride(total)):
            for sample, part in zip(blocks, ranked, strict=True):
                sample.append(part(start, stop))
    searches = [Search(int(density * total), total, sample) for sample in blocks]
    while any(search.found is None for search in searches):
        open_ones = [number for number, search in enumerate(searches) if search.found is None]

        def tallies(name: str, numbers: Sequence[int] = open_ones) -> list[list[Tally]]:
            ranked, size = elements(name), sizes[name]
            return [
                [tally(ranked[number](i, min(i + PIECE, size)), searches[number].bracket) for number in numbers]
                for i in range(0, size, PIECE)
            ]

        pieces = [piece for _, results in engine.run(sizes, tallies) for piece in results]
        for place, number in enumerate(open_ones):
            searches[number].narrow([piece[place] for piece in pieces])
    return [search.found for search in searches if search.found is not None]


def memory_of(method: Method, vector: TaskVector, rooms: Mapping[str, Room]) -> dict[str, int]:
    """Bytes that absorbing each tensor takes at its peak: matrices are held whole, with workspace
    for their decomposition; everything else goes by in small pieces."""
    sizes = {}
    for name in vector.names:
        tensor = vector.model.tensors[name]
        if name in rooms:
            sizes[name] = rooms[name].workspace
            continue
        whole = tensor.role == "linear" and method.whole_linear
        held = tensor.numel if whole else min(PIECE, tensor.numel)
        sizes[name] = WORKSPACE * held * (8 if tensor.state_dtype == "F64" else 4)
    return sizes


WORKSPACE = 6
"""Copies of a matrix that live at the same time while it is projected."""


def _cut(state: Mapping[str, Tensor] | None, start: int, like: Tensor, device: str) -> State | None:
    """The part of the state that belongs to a piece."""
    if state is None:
        return None
    return {
        slot: value.reshape(-1)[start : start + like.numel()].view(like.shape).to(device)
        for slot, value in state.items()
    }
