"""Read a merged model out, tensor by tensor: θ⁰ + scale · direction."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mergestream.algebra.lowrank import LowRank, Value, dense, squared_norm
from mergestream.algebra.pieces import Elements, SquaredNorm, exact_sum, is_finite, ranges
from mergestream.base.model import BaseModel, base_changed
from mergestream.checkpoints import Checkpoint, torch_dtype
from mergestream.engine import Engine, ResultsByTensor
from mergestream.errors import MergestreamError
from mergestream.experts.vector import BasePieces
from mergestream.ledger.readouts.base import Plain, Readout, StateReadout
from mergestream.merging.plan import StepFiles, peak_memory, streamed_memory, tensor_contexts
from mergestream.merging.step import overflow_explained
from mergestream.methods.base import Context, Method, State
from mergestream.methods.scale import parse_scale, scale_value
from mergestream.progress import Progress

if TYPE_CHECKING:
    from mergestream.merging.interference import Interference


@dataclass(frozen=True, kw_only=True)
class Reading(ABC):
    """A merged model that can be read out: the interface of accumulators and ledgers."""

    model: BaseModel
    t: int
    """How many experts are merged"""
    readout: Readout
    weights: Mapping[str, float] | None = None
    """The weight of every merged expert by name; None where one state has absorbed all"""
    device: str = "cpu"
    norm2: ResultsByTensor[float] = field(default_factory=ResultsByTensor)
    """‖direction‖² of the tensors that have been read out completely"""

    @abstractmethod
    def elements(self, name: str) -> Elements | None:
        """A function that gives consecutive elements of the direction; None where all of them are zero."""

    @abstractmethod
    def direction(self, name: str) -> Value:
        """The direction of a whole tensor, in factors where its rank is known and not full."""

    @abstractmethod
    def rank_bound(self, name: str) -> int | None:
        """A bound of the rank of a tensor's direction; None where it is dense."""

    @abstractmethod
    def is_zero(self, name: str) -> bool:
        """Whether no expert has changed the tensor."""

    @abstractmethod
    def scale(self, given: str | float | None, engine: Engine) -> float:
        """The scale by the user's rule or the default; measures ‖direction‖ where the rule needs it."""

    @property
    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes that reading out each tensor takes at its peak."""

    @property
    def wanted_ranks(self) -> Mapping[str, tuple[int, ...]]:
        """How many directions of each tensor every expert wants; empty where there are no entries."""
        return {}

    @property
    def least_held(self) -> float:
        """The smallest share of ‖Δ‖² that an entry holds of its expert; 1 where there are no entries."""
        return 1.0

    def shortfall(self, everyone: Reading) -> str | None:
        """A warning that names the adapters whose entries hold too little, and a budget that holds more, or None.

        ``everyone`` reads all experts of the store.
        """
        return None

    def held(self) -> dict[str, dict[str, float]]:
        """By expert and tensor: the share of ‖Δ‖² that the expert's entry holds; empty where there are no entries."""
        return {}

    def damage(self, engine: Engine) -> dict[str, float]:
        """The predicted damage of every expert by name; empty where there are no entries."""
        return {}

    def interference(self, engine: Engine, progress: Progress) -> Interference | None:
        """How the merged experts interfere with each other; None where there are no entries to compare."""
        return None

    @cached_property
    def contexts(self) -> dict[str, Context]:
        """The context of every tensor; computed once."""
        return tensor_contexts(self.model, self.t)

    def pieces(self, name: str, base: Checkpoint, scale: float, dtype: str) -> Iterator[tuple[int, Tensor]]:
        """The merged tensor in order, as (first element, elements), rounded once, to ``dtype``."""
        tensor = self.model.tensors[name]
        stored = base.read(name)
        base_pieces = BasePieces(stored, self.contexts[name].dtype if tensor.merges else stored.dtype)
        direction, norm = None, SquaredNorm()
        if tensor.merges:
            with overflow_explained(name):
                direction = self.elements(name)
        for start, stop in ranges(tensor.numel):
            piece = base_pieces.at(start, stop)
            if direction is not None:
                moved = direction(start, stop)
                norm.add(moved)
                piece = moved_by(piece, moved, scale)
            yield start, cast(piece, dtype, name)
        if tensor.digest and base_pieces.digest() != tensor.digest:
            raise base_changed(name, base)
        self.norm2[name] = norm.total()

    def norm(self, engine: Engine) -> float:
        """‖direction‖ over all tensors."""
        sizes = {name: self.model.tensors[name].numel for name in self.model.merged}
        return math.sqrt(exact_sum(norm2 for _, norm2 in engine.run(sizes, self.direction_norm2, self.memory)))

    def direction_norm2(self, name: str) -> float:
        """‖direction‖² of one tensor."""
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


@dataclass(frozen=True, kw_only=True)
class StateReading(Reading):
    """The state of an accumulator after t experts."""

    method: Method
    state: StepFiles
    mean_norm: float
    direction_norm: float | None
    """‖direction‖ of the method itself, where it was measured"""
    readout: StateReadout

    def elements(self, name: str) -> Elements | None:
        context = self.contexts[name]
        if name in self._ranks or self.method.is_whole(context) or (context.linear and not self._is_plain):
            direction = self.direction(name)
            if isinstance(direction, LowRank):
                return direction.elements() if direction.any() else None
            whole = direction.reshape(-1)
            return lambda start, stop: whole[start:stop]
        flat = {slot: dense(value).reshape(-1) for slot, value in self.state.read(name).items()}

        def between(start: int, stop: int) -> Tensor:
            cut: State = {slot: value[start:stop].to(self.device) for slot, value in flat.items()}
            return dense(self._apply_readout(self.method.direction(cut, context), context)).cpu()

        return between

    def direction(self, name: str) -> Value:
        context, state = self.contexts[name], self.state.read(name)
        for slot, value in state.items():
            if isinstance(value, Tensor):  # factors are small, and stay on the CPU
                state[slot] = value.to(self.device)
        direction = self._apply_readout(self.method.direction(state, context), context)
        return direction.cpu() if isinstance(direction, Tensor) else direction

    def rank_bound(self, name: str) -> int | None:
        ranks = self._ranks.get(name)
        return None if ranks is None else min(sum(left for left, _ in ranks), sum(right for _, right in ranks))

    def is_zero(self, name: str) -> bool:
        return not any(value.any() for value in self.state.read(name).values())

    def scale(self, given: str | float | None, engine: Engine) -> float:
        rule = parse_scale(self.readout.scale_of(self.method) if given is None else given)
        if given is not None:
            self.method.check_scale(rule)
        known = self.direction_norm if self._is_plain else None
        return scale_value(rule, self.t, self.mean_norm, lambda: self.norm(engine) if known is None else known)

    @cached_property
    def memory(self) -> dict[str, int]:
        sizes = {name: self.state.memory(name) for name in self.model.merged}
        for name, tensor in self.model.tensors.items():
            context = self.contexts[name]
            is_streamed = not tensor.merges or name in self._ranks
            needed = streamed_memory(context) if is_streamed else peak_memory(self.method, context)
            sizes[name] = sizes.get(name, 0) + needed
        return sizes

    def _norm2(self, name: str) -> float:
        if name in self._ranks:  # the norm of the core: nothing is multiplied out
            return squared_norm(self.direction(name))
        return super()._norm2(name)

    @property
    def _is_plain(self) -> bool:
        return isinstance(self.readout, Plain)

    @cached_property
    def _ranks(self) -> dict[str, list[tuple[int, int]]]:
        """The ranks of both bases of every slot, for the tensors whose state is in factors."""
        ranks = {name: self.state.ranks(name) for name in self.model.merged}
        return {name: found for name, found in ranks.items() if found is not None}

    def _apply_readout(self, direction: Value, context: Context) -> Value:
        if not context.linear:
            return self.readout.other(direction, self.t)
        if direction.ndim != 3:
            return self.readout.linear(direction)
        return torch.stack([dense(self.readout.linear(matrix)) for matrix in dense(direction)])


def moved_by(base: Tensor, direction: Tensor, scale: float) -> Tensor:
    """θ⁰ + scale · direction; not finite where it is too large for its type."""
    if abs(scale) > torch.finfo(base.dtype).max:  # torch refuses such a factor
        return base + direction * scale
    return torch.add(base, direction, alpha=scale)


def cast(piece: Tensor, dtype: str, name: str) -> Tensor:
    """Round to the output's type, and refuse what that type cannot hold. Integers stay as they are."""
    if not piece.is_floating_point():
        return piece
    rounded = piece.to(torch_dtype(dtype))
    if is_finite(rounded):
        return rounded
    if not is_finite(piece):
        raise MergestreamError(f"tensor {name} becomes too large for {_dtype_text(piece.dtype)} when it is merged")
    wider = "bfloat16 or float32" if dtype == "F16" else "float32" if dtype == "BF16" else "float64"
    raise MergestreamError(
        f"tensor {name} has values that {_dtype_text(rounded.dtype)} cannot hold; export with --dtype {wider}"
    )


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
