"""The model that a store stands for: θ⁰ + scale · direction, tensor by tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mergestream.algebra.bounds import matrix_shape
from mergestream.algebra.lowrank import LowRank, Value, dense, squared_norm
from mergestream.algebra.pieces import Elements, SquaredNorm, exact_sum, is_finite, ranges
from mergestream.base.model import BaseModel, base_changed
from mergestream.checkpoints import Checkpoint, torch_dtype
from mergestream.engine import Engine, ResultsByTensor
from mergestream.errors import MergestreamError
from mergestream.experts.vector import BasePieces
from mergestream.ledger.readouts.base import StateReadout
from mergestream.ledger.readouts.plain import Plain
from mergestream.merging.cost import Cost, memory_of, nbytes, reading_state, streamed_memory
from mergestream.merging.step import ReadState, overflow_explained, tensor_context
from mergestream.methods.base import Context, Method, State
from mergestream.methods.scale import parse_scale, scale_value


@dataclass(frozen=True)
class Reading(ABC):
    """What is remembered, ready to be read out."""

    model: BaseModel
    norm2: ResultsByTensor[float] = field(default_factory=ResultsByTensor, kw_only=True)
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

    @abstractmethod
    def cost(self, name: str) -> Cost:
        """Of reading out one tensor, but for what is written."""

    @property
    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes that reading out each tensor takes at its peak."""

    @property
    @abstractmethod
    def readout_name(self) -> str:
        """The name of the readout."""

    @property
    def weights(self) -> Mapping[str, float] | None:
        """The weights of the selected experts; None if the method does not keep experts apart."""
        return None

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
    copies: int = 0
    """How often the state is in memory while it is read: not at all where it is a view of a file"""

    @property
    def readout_name(self) -> str:
        return self.readout.name

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

    def cost(self, name: str) -> Cost:
        tensor, context = self.model.tensors[name], self._context(name)
        if not tensor.merges:
            return Cost(tensor.nbytes, elements=tensor.numel)
        size, rank = nbytes(self.method.layout(context)), self.rank_bound(name)
        if rank is not None:
            m, n = matrix_shape(context.shape)
            size = sum(4 * (left * m + right * n) + 8 * left * right for left, right in self.ranks[name])
        return reading_state(self.readout, context, tensor.nbytes, size, rank)

    @property
    def memory(self) -> dict[str, int]:
        sizes = {}
        for name, tensor in self.model.tensors.items():
            context = self._context(name)
            streamed = not tensor.merges or name in self.ranks
            sizes[name] = streamed_memory(context) if streamed else memory_of(self.method, context)
            if self.copies and tensor.merges:
                sizes[name] += self.copies * nbytes(self.method.layout(context))
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
