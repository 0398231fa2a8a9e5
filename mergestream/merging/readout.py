"""The model that a state stands for: θ⁰ + scale · direction(state), tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mergestream.algebra.lowrank import LowRank, Value, dense, squared_norm
from mergestream.algebra.pieces import Elements, SquaredNorm, ranges
from mergestream.base.model import BaseModel, base_changed
from mergestream.checkpoints import Checkpoint, torch_dtype
from mergestream.engine import Engine
from mergestream.errors import MergestreamError
from mergestream.experts.vector import BasePieces
from mergestream.merging.step import ReadState, memory_of, streamed_memory, tensor_context
from mergestream.methods.base import Context, Method, State
from mergestream.methods.scale import parse_scale, scale_value


@dataclass(frozen=True)
class Readout:
    """A method's state after t models, ready to be read out."""

    model: BaseModel
    method: Method
    t: int
    read_state: ReadState
    device: str = "cpu"
    factored: Collection[str] = ()
    """The tensors whose state is in factors"""
    norm2: dict[str, float] = field(default_factory=dict)
    """‖direction‖² of the tensors that have been read out to their end"""

    def pieces(self, name: str, base: Checkpoint, scale: float, dtype: str) -> Iterator[tuple[int, Tensor]]:
        """The merged tensor in order, as (first element, elements), rounded once, to ``dtype``."""
        tensor = self.model.tensors[name]
        theirs = BasePieces(base.read(name), torch_dtype(tensor.state_dtype if tensor.merges else tensor.dtype))
        direction, norm = self.elements(name) if tensor.merges else None, SquaredNorm()
        for start, stop in ranges(tensor.numel):
            piece = theirs.at(start, stop)
            if direction is not None:
                moved = direction(start, stop)
                norm.add(moved)
                piece = torch.add(piece, moved, alpha=scale)
            yield start, cast(piece, dtype, name)
        if tensor.digest and theirs.digest() != tensor.digest:
            raise base_changed(name, base)
        self.norm2[name] = norm.total()

    def elements(self, name: str) -> Elements | None:
        """A function that gives consecutive elements of the direction; None where all of them are zero."""
        context, state = self._context(name), self._state(name)
        if _in_factors(state) or self.method.is_whole(context):
            direction = self._direction(state, context)
            if isinstance(direction, LowRank):
                return direction.elements() if direction.any() else None
            whole = direction.reshape(-1)
            return lambda start, stop: whole[start:stop]
        flat = {slot: dense(value).reshape(-1) for slot, value in state.items()}

        def between(start: int, stop: int) -> Tensor:
            cut: State = {slot: value[start:stop].to(self.device) for slot, value in flat.items()}
            return dense(self.method.direction(cut, context)).cpu()

        return between

    def direction(self, name: str) -> Value:
        """The direction of a whole tensor, in factors where the state is."""
        return self._direction(self._state(name), self._context(name))

    def scale(self, given: str | float | None, mean_norm: float, direction_norm: float | None, engine: Engine) -> float:
        """By a user's rule or the method's own; ‖direction‖ is measured where it needs that and nobody has yet."""
        rule = self.method.scale_rule if given is None else parse_scale(given)
        self.method.check_scale(rule)
        return scale_value(
            rule, self.t, mean_norm, lambda: self.norm(engine) if direction_norm is None else direction_norm
        )

    def norm(self, engine: Engine) -> float:
        """‖direction‖ over all tensors."""
        sizes = {name: self.model.tensors[name].numel for name in self.model.merged}
        return math.sqrt(math.fsum(norm2 for _, norm2 in engine.run(sizes, self._norm2, self.memory)))

    def _norm2(self, name: str) -> float:
        state = self._state(name)
        if _in_factors(state):  # the norm of the core: nothing is multiplied out
            return squared_norm(self._direction(state, self._context(name)))
        elements, norm = self.elements(name), SquaredNorm()
        assert elements is not None
        for start, stop in ranges(self.model.tensors[name].numel):
            norm.add(elements(start, stop))
        return norm.total()

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that reading out each tensor takes at its peak."""
        sizes = {}
        for name, tensor in self.model.tensors.items():
            context = self._context(name)
            streamed = not tensor.merges or name in self.factored
            sizes[name] = streamed_memory(context) if streamed else memory_of(self.method, context)
        return sizes

    def _context(self, name: str) -> Context:
        return tensor_context(self.model.tensors[name], self.t)

    def _state(self, name: str) -> State:
        return {slot: self.read_state(slot, name) for slot in self.method.layout(self._context(name))}

    def _direction(self, state: State, context: Context) -> Value:
        if _in_factors(state):
            return self.method.direction(state, context)
        on_device: State = {slot: dense(value).to(self.device) for slot, value in state.items()}
        return dense(self.method.direction(on_device, context)).cpu()


def _in_factors(state: State) -> bool:
    return any(isinstance(value, LowRank) for value in state.values())


def cast(piece: Tensor, dtype: str, name: str) -> Tensor:
    """Round to the output's type; float16 ends at 65504, and an overflow is refused. Integers stay what they are."""
    if not piece.is_floating_point():
        return piece
    rounded = piece.to(torch_dtype(dtype))
    if dtype == "F16" and piece.dtype != torch.float16 and not bool(rounded.isfinite().all()):
        raise MergestreamError(
            f"tensor {name} has values that float16 cannot hold; export with --dtype bfloat16 or float32"
        )
    return rounded
