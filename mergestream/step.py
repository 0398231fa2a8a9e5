"""One step: every tensor of a task vector is absorbed, and the norms of all tensors are summed up.

Δ (pieces) ──► method.absorb ──► state (pieces) ──► norms ──► λ
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from mergestream.checkpoints import torch_dtype
from mergestream.deltas import TaskVector
from mergestream.digest import TensorHasher
from mergestream.engine import LocalEngine
from mergestream.engine.selection import Bracket, Tally, blocks, kth_magnitude, tally
from mergestream.methods.base import Context, Method, Ranking, State
from mergestream.pieces import PIECE, squared_norm

ReadState = Callable[[str, str], Tensor]
"""Slot and tensor name to the state before this step."""
WriteState = Callable[[str, str, int, Tensor], None]
"""Slot, tensor name, first element and the piece of the state after this step."""


@dataclass(frozen=True)
class Outcome:
    """What absorbing one tensor gave."""

    norm2: float
    kept2: float
    direction2: float
    protected: int | None
    slots: dict[str, str] = field(default_factory=dict)
    """The digest of every slot of the new state."""


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
    return Totals(t, norm, mean_norm, direction_norm, scale, kept2 / norm2 if norm2 else 1.0)


@dataclass(frozen=True)
class Step:
    """The t-th task vector meets the state of a method, on a device."""

    method: Method
    t: int
    vector: TaskVector
    read_state: ReadState
    device: str = "cpu"

    def absorb(self, name: str, thresholds: Mapping[str, float], write: WriteState) -> Outcome:
        """Absorb one tensor and hand the new state to ``write``, piece by piece."""
        tensor = self.vector.model.tensors[name]
        linear = tensor.role == "linear"
        context = Context(self.t, linear, thresholds)
        slots = self.method.slots(self.t)
        before = self._state(name)
        dtype = torch_dtype(tensor.state_dtype)
        hashers = {slot: TensorHasher(dtype, tensor.shape) for slot in slots}
        norms, kept, directions, protected = [], [], [], None
        for piece in self.vector.pieces(name, whole=linear and self.method.whole_linear):
            state = _cut(before, piece.start, piece.delta, self.device)
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
                write(slot, name, piece.start, value.reshape(-1))
        return Outcome(
            math.fsum(norms),
            math.fsum(kept),
            math.fsum(directions),
            protected,
            {slot: hasher.hexdigest() for slot, hasher in hashers.items()},
        )

    def thresholds(self, engine: LocalEngine) -> Callable[[str], dict[str, float]]:
        """What the method asks to be ranked beforehand, per tensor name."""
        ranking = self.method.ranking(self.t)
        if ranking is None:
            return lambda name: {}
        if ranking.over == "model":
            common = {which: self._threshold(engine, ranking, which) for which in ranking.names}
            return lambda name: common
        alone = LocalEngine(workers=1)
        return lambda name: {which: self._threshold(alone, ranking, which, (name,)) for which in ranking.names}

    def _threshold(
        self, engine: LocalEngine, ranking: Ranking, which: str, names: tuple[str, ...] | None = None
    ) -> float:
        names = names or self.vector.names
        sizes = {name: self.vector.numel(name) for name in names}
        total = sum(sizes.values())

        def sample(stride: int) -> Iterator[Tensor]:
            for name in names:
                for start, stop in blocks(sizes[name], stride):
                    yield self._ranked(which, name, start, stop)

        def tally_tensor(bracket: Bracket) -> Callable[[str], list[Tally]]:
            return lambda name: [
                tally(self._ranked(which, name, start, min(start + PIECE, sizes[name])), bracket)
                for start in range(0, sizes[name], PIECE)
            ]

        def tallies(bracket: Bracket) -> Iterable[Tally]:
            for _, results in engine.run(sizes, tally_tensor(bracket)):
                yield from results

        return kth_magnitude(int(ranking.density * total), total, sample, tallies)

    def _ranked(self, which: str, name: str, start: int, stop: int) -> Tensor:
        if which == "delta":
            return self.vector.slice(name, start, stop)
        return self.read_state(which, name).reshape(-1)[start:stop]

    def _state(self, name: str) -> State | None:
        if self.t == 1:
            return None
        return {slot: self.read_state(slot, name) for slot in self.method.slots(self.t - 1)}


def memory_of(method: Method, vector: TaskVector) -> dict[str, int]:
    """Bytes that absorbing each tensor takes at its peak: matrices are held whole, with workspace
    for their decomposition; everything else goes by in small pieces."""
    sizes = {}
    for name in vector.names:
        tensor = vector.model.tensors[name]
        whole = tensor.role == "linear" and method.whole_linear
        held = tensor.numel if whole else min(PIECE, tensor.numel)
        sizes[name] = WORKSPACE * held * (8 if tensor.state_dtype == "F64" else 4)
    return sizes


WORKSPACE = 6
"""Copies of a matrix that live at the same time while it is projected."""


def _cut(state: State | None, start: int, like: Tensor, device: str) -> State | None:
    """The part of the state that belongs to a piece."""
    if state is None:
        return None
    return {
        slot: value.reshape(-1)[start : start + like.numel()].view(like.shape).to(device)
        for slot, value in state.items()
    }
