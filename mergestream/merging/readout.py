"""The model that a state stands for: θ⁰ + scale · direction(state), tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast as cast_type

import torch
from torch import Tensor

from mergestream.algebra.lowrank import LowRank, Value, dense
from mergestream.algebra.pieces import PIECE, Elements
from mergestream.base.model import BaseModel, base_changed
from mergestream.checkpoints import Checkpoint, torch_dtype
from mergestream.digest import TensorHasher
from mergestream.errors import MergestreamError
from mergestream.merging.step import ReadState
from mergestream.methods.base import Method, State


@dataclass(frozen=True)
class Readout:
    """A method's state after t models, ready to be read out."""

    model: BaseModel
    base: Checkpoint
    method: Method
    t: int
    scale: float
    read_state: ReadState

    def pieces(self, name: str, dtype: str) -> Iterator[tuple[int, Tensor]]:
        """The merged tensor in order, as (first element, elements), rounded once, to ``dtype``."""
        tensor = self.model.tensors[name]
        base = self.base.read(name)
        hasher = TensorHasher(base.dtype, base.shape)
        base = base.reshape(-1)
        direction_of = self.direction(name) if tensor.merges else None
        for start in range(0, tensor.numel, PIECE):
            piece = base[start : start + PIECE]
            hasher.update(piece)
            if direction_of is not None:
                direction = direction_of(start, start + piece.numel())
                piece = torch.add(piece.to(direction.dtype), direction, alpha=self.scale)
            if piece.is_floating_point():
                piece = cast(piece, dtype, name)
            yield start, piece
        if tensor.digest and hasher.hexdigest() != tensor.digest:
            raise base_changed(name, self.base)

    def direction(self, name: str) -> Elements | None:
        """A function that gives consecutive elements of the direction; None where all of them are zero."""
        values = self._state(name)
        if any(isinstance(value, LowRank) for value in values.values()):
            factors = cast_type(LowRank, self.direction_of(name))
            return factors.elements() if factors.any() else None
        flat = {slot: dense(value).reshape(-1) for slot, value in values.items()}
        return lambda start, stop: self.method.direction({s: v[start:stop] for s, v in flat.items()}, self.t)

    def direction_of(self, name: str) -> Value:
        """The direction of a whole tensor, in factors where the state is."""
        return self.method.direction(cast_type(State, self._state(name)), self.t)

    def _state(self, name: str) -> dict[str, Value]:
        return {slot: self.read_state(slot, name) for slot in self.method.slots(self.t)}


def cast(piece: Tensor, dtype: str, name: str) -> Tensor:
    """Round to the output's type; float16 ends at 65504, and an overflow is refused."""
    rounded = piece.to(torch_dtype(dtype))
    if dtype == "F16" and piece.dtype != torch.float16 and not bool(rounded.isfinite().all()):
        raise MergestreamError(
            f"tensor {name} has values that float16 cannot hold; export with --dtype bfloat16 or float32"
        )
    return rounded
