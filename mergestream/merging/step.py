"""One step: a task vector is absorbed into the state of a method, tensor by tensor.

    Δ (pieces, whole, or in factors) ──► method.absorb ──► writer,     norms ──► totals

A store and an in-memory `Merger` both run their steps here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mergestream.algebra.lowrank import LowRank, dense, squared_norm
from mergestream.algebra.pieces import LARGEST_NORM, SquaredNorm, exact_sum, is_finite
from mergestream.digest import TensorHasher, tensor_digest
from mergestream.engine import Engine
from mergestream.errors import MergestreamError
from mergestream.experts.vector import TaskVector
from mergestream.merging.plan import (
    StepFiles,
    TensorPlan,
    factor_bounds,
    streamed_memory,
    tensor_contexts,
    whole_memory,
    with_base,
)
from mergestream.merging.thresholds import Thresholds, find_thresholds
from mergestream.methods.base import Absorbed, Context, Method, State
from mergestream.methods.scale import scale_value


class StateWriter(Protocol):
    """Takes the state after a step."""

    def write(self, name: str, start: int, slots: Mapping[str, Tensor]) -> None:
        """Take consecutive elements of the dense slots of a tensor, from ``start`` on."""

    def write_factors(self, name: str, state: Mapping[str, LowRank]) -> dict[str, Any]:
        """Take all slots of a tensor in factors; returns what the step must record of them."""


class Discard:
    """A writer for dry runs: it drops the state."""

    def write(self, name: str, start: int, slots: Mapping[str, Tensor]) -> None:
        pass

    def write_factors(self, name: str, state: Mapping[str, LowRank]) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Outcome:
    """The result of absorbing one tensor."""

    norm2: float
    kept2: float
    direction2: float | None
    """‖direction‖², where it was measured"""
    protected: int | None
    slots: dict[str, str] = field(default_factory=dict)
    """The digest of every dense slot of the new state"""
    factors: dict[str, Any] | None = None
    """What the writer must record of slots in factors"""

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.norm2, self.kept2, self.direction2 or 0.0))):
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
    """‖S_t‖ for the methods that sum; None where it was not measured"""
    scale: float
    """By the method's own rule; 1/λ_t of OPCM"""
    kept: float
    """The share of ‖Δ_t‖² that entered the state"""

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
    return Totals(t, norm, mean_norm, direction_norm, scale, kept2 / norm2 if norm2 else 1.0)


@contextmanager
def overflow_explained(name: str) -> Iterator[None]:
    """Turn what arithmetic raises where numbers become too large into an error that names the tensor."""
    try:
        yield
    except (ArithmeticError, torch.linalg.LinAlgError) as error:
        raise MergestreamError(
            f"tensor {name} cannot be merged: its numbers become too large on the way; nothing was written"
        ) from error


def refuse_overflow(value: Tensor) -> None:
    """Raise OverflowError where a tensor holds NaN or Inf."""
    if not is_finite(value):
        raise OverflowError


@dataclass(frozen=True, kw_only=True)
class Step:
    """One task vector, and the state that absorbs it."""

    method: Method
    vector: TaskVector
    expert: str = ""
    """The expert's name"""
    absorbed: int = 0
    """How many experts were absorbed before this one"""
    state: StepFiles | None = None
    """The state after these; None before the first expert, and where an expert becomes an entry of its own"""
    wanted_ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For an entry: how many directions of each tensor every expert before this one wants"""
    device: str = "cpu"
    measure_direction: bool = False
    """Whether to measure ‖direction‖ even where the method's scale does not need it"""

    @property
    def t(self) -> int:
        """How many experts there are after the step."""
        return self.absorbed + 1

    @cached_property
    def plans(self) -> dict[str, TensorPlan]:
        """What happens to each tensor, known from the headers; computed once."""
        method, vector = self.method, self.vector
        contexts = tensor_contexts(vector.model, self.t, self.expert)
        copies, plans = vector.copies, {}
        for name in vector.names:
            context, rank, bounds = contexts[name], vector.rank(name), None
            if method.keeps_entries:
                context = dataclasses.replace(context, rank=rank, others=self.wanted_ranks.get(name, ()))
            elif method.factored:
                bounds = factor_bounds(context, rank, self.state)
            layout, is_whole = method.layout(context), method.is_whole(context)
            if bounds:
                memory = bounds.workspace
            else:
                memory = whole_memory(context, layout) if is_whole else streamed_memory(context)
            memory += copies * math.prod(context.shape) * context.dtype.itemsize
            memory += self.state.memory(name) if self.state is not None else 0
            in_factors = bounds is not None or context.rank is not None
            plans[name] = TensorPlan(context, layout, is_whole, in_factors, bounds, memory)
        return plans

    @cached_property
    def measures_direction(self) -> bool:
        """Whether ‖direction‖ is measured: for the scale, or on demand."""
        return not self.method.keeps_entries and (self.measure_direction or self.method.scale_rule == "adaptive")

    def run(self, engine: Engine, writer: StateWriter, *, done: Collection[str] = ()) -> Iterator[tuple[str, Outcome]]:
        """Absorb all tensors that are not done, the largest first; yields their outcomes as they finish."""
        waiting = {name: self.vector.model.tensors[name].numel for name in self.vector.names if name not in done}
        if not waiting:
            return iter(())
        found = find_thresholds(self.method, [self.vector], [self.t], self.state, engine)
        memory = {name: self.plans[name].memory for name in waiting}
        return engine.run(waiting, partial(self.absorb, found, writer), memory)

    def absorb(self, found: Thresholds, writer: StateWriter, name: str) -> Outcome:
        """Absorb one tensor and hand its new state to the writer."""
        plan, thresholds = self.plans[name], found(name)[0]
        context = dataclasses.replace(plan.context, thresholds=thresholds) if thresholds else plan.context
        state = self.state.read(name) if self.state is not None else None
        with overflow_explained(name):
            if not plan.is_whole and not plan.bounds:
                return self._absorb_pieces(plan, context, state, writer)
            delta = self.vector.factors(name) if plan.in_factors else self.vector.whole(name)
            if not plan.bounds:  # factors are small, and stay on the CPU
                delta = delta.to(self.device) if isinstance(delta, Tensor) else delta
                state = {slot: dense(value).to(self.device) for slot, value in state.items()} if state else None
            if self.method.needs_base:
                context = with_base(context, self.vector, self.device)
            absorbed, direction2 = self.method.absorb(state, delta, context), None
            kept2 = None if absorbed.kept is None else squared_norm(absorbed.kept)
            if self.measures_direction:
                direction2 = squared_norm(self.method.direction(absorbed.state, context))
            if plan.bounds:
                factors = writer.write_factors(name, self._checked_factors(absorbed))
                return self._outcome(name, absorbed, kept2, direction2, {}, factors)
            slots = self._checked(absorbed, plan)
            digests = {slot: tensor_digest(value) for slot, value in slots.items()}
            writer.write(name, 0, slots)
            return self._outcome(name, absorbed, kept2, direction2, digests)

    def _absorb_pieces(self, plan: TensorPlan, context: Context, state: State | None, writer: StateWriter) -> Outcome:
        name = context.tensor
        flat = {slot: dense(value).reshape(-1) for slot, value in state.items()} if state is not None else None
        hashers = {slot: TensorHasher(form.dtype, form.shape) for slot, form in plan.layout.items()}
        kept, direction = SquaredNorm(), SquaredNorm()
        absorbed: Absorbed | None = None
        for start, piece in self.vector.pieces(name):
            stop, before = start + piece.numel(), None
            if flat is not None:
                before = {slot: x[start:stop].to(self.device) for slot, x in flat.items()}
            delta = piece.to(self.device)
            place = dataclasses.replace(context, start=start)
            absorbed = self.method.absorb({**before} if before else None, delta, place)
            if absorbed.kept is not None:
                kept.add(dense(absorbed.kept))
            if self.measures_direction:
                direction.add(dense(self.method.direction(absorbed.state, context)))
            slots = self._checked(absorbed, plan, piece.shape)
            for slot, value in slots.items():
                hashers[slot].update(value)
            writer.write(name, start, slots)
        kept2 = None if absorbed is None or absorbed.kept is None else kept.total()
        direction2 = direction.total() if self.measures_direction else None
        digests = {slot: hasher.hexdigest() for slot, hasher in hashers.items()}
        return self._outcome(name, absorbed, kept2, direction2, digests)

    def _checked_factors(self, absorbed: Absorbed) -> dict[str, LowRank]:
        """The slots in factors; raises OverflowError where one holds NaN or Inf."""
        slots = {}
        for slot, value in absorbed.state.items():
            assert isinstance(value, LowRank), f"{self.method.name} does not keep {slot} in factors"
            refuse_overflow(value.core)
            slots[slot] = value
        return slots

    def _checked(self, absorbed: Absorbed, plan: TensorPlan, piece: tuple[int, ...] | None = None) -> dict[str, Tensor]:
        """The dense slots on the CPU, with the shapes that the method has laid out, or that of a ``piece``."""
        slots = {}
        for slot, form in plan.layout.items():
            slots[slot] = value = dense(absorbed.state[slot]).cpu().contiguous()
            shape = tuple(form.shape if piece is None else piece)
            assert tuple(value.shape) == shape, f"{self.method.name}: the slot {slot} is not as laid out"
        if not all(map(is_finite, slots.values())):
            raise OverflowError
        return slots

    def _outcome(
        self,
        name: str,
        absorbed: Absorbed | None,
        kept2: float | None,
        direction2: float | None,
        digests: dict[str, str],
        factors: dict[str, Any] | None = None,
    ) -> Outcome:
        norm2 = self.vector.norm2[name]
        protected = absorbed.protected if absorbed else None
        return Outcome(norm2, norm2 if kept2 is None else kept2, direction2, protected, digests, factors)
