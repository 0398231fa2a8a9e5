"""The model that a state stands for: θ⁰ + scale · direction(state), tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mergestream.base_model import BaseModel, base_changed
from mergestream.checkpoints import Checkpoint, torch_dtype
from mergestream.digest import TensorHasher
from mergestream.errors import MergestreamError
from mergestream.methods.base import Method
from mergestream.pieces import PIECE
from mergestream.step import ReadState


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
        state = {}
        if tensor.merges:
            state = {slot: self.read_state(slot, name).reshape(-1) for slot in self.method.slots(self.t)}
        for start in range(0, tensor.numel, PIECE):
            piece = base[start : start + PIECE]
            hasher.update(piece)
            if state:
                direction = self.method.direction(
                    {slot: value[start : start + PIECE] for slot, value in state.items()}, self.t
                )
                piece = torch.add(piece.to(direction.dtype), direction, alpha=self.scale)
            if piece.is_floating_point():
                piece = cast(piece, dtype, name)
            yield start, piece
        if hasher.hexdigest() != tensor.digest:
            raise base_changed(name, self.base)


def cast(piece: Tensor, dtype: str, name: str) -> Tensor:
    """Round to the output's type; float16 ends at 65504, and an overflow is refused."""
    rounded = piece.to(torch_dtype(dtype))
    if dtype == "F16" and piece.dtype != torch.float16 and not bool(rounded.isfinite().all()):
        raise MergestreamError(
            f"tensor {name} has values that float16 cannot hold; export with --dtype bfloat16 or float32"
        )
    return rounded
