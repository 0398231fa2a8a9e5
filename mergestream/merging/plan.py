"""What a step does to each tensor, known from the headers alone: context, layout, factors, memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from mergestream.algebra.lowrank import FactorBounds
from mergestream.algebra.pieces import PIECE
from mergestream.base.model import BaseModel
from mergestream.experts.vector import TaskVector
from mergestream.ledger.moment import Moment
from mergestream.methods.base import Context, Method, Slot, State

WORKSPACE = 6
"""Copies of a matrix that are in memory at the same time while it is projected"""


class StepFiles(Protocol):
    """Reads what one step has written: the state after it, or the entry of its expert."""

    def memory(self, name: str) -> int:
        """Bytes that reading the slots of a tensor takes; 0 where they are views of a file."""

    def read(self, name: str, only: Collection[str] | None = None) -> State:
        """The slots of a tensor, all or ``only`` some: dense, or in factors. An entry has none where its expert has not
        changed the tensor."""

    def ranks(self, name: str) -> list[tuple[int, int]] | None:
        """The ranks of the left and the right basis of every slot; None where the slots are dense."""

    def shapes(self, name: str) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the slots of a tensor."""


class InputFiles(Protocol):
    """Reads what is known of the inputs of one expert."""

    def moment(self, weight: str) -> Moment | None:
        """The second moment of the inputs of a linear weight; None where it is not known."""


@dataclass(frozen=True)
class KeptExpert:
    """What a store or a `Merger` keeps of an expert, with the scalars after its step."""

    name: str
    norm: float
    mean_norm: float
    direction_norm: float | None
    cut: int
    """Among how many experts the budget was divided when its entry was written"""
    is_adapter: bool
    files: StepFiles
    """The expert's entry, or the state after it"""
    inputs: InputFiles | None = None


@dataclass(frozen=True)
class TensorPlan:
    """What a step does to one tensor."""

    context: Context
    layout: Mapping[str, Slot]
    """The slots after the step"""
    is_whole: bool
    """Whether the tensor is absorbed in one piece"""
    in_factors: bool
    """Whether Δ arrives as `LowRank`"""
    bounds: FactorBounds | None
    """Where the state stays in factors: how much space they may take"""
    memory: int
    """Bytes at the peak"""

    @property
    def rank(self) -> int:
        """The largest rank that the factors of the state, or of an entry's Δ, may have; 0 where they are dense."""
        return max(self.bounds.core) if self.bounds else self.context.rank or 0


def factor_bounds(context: Context, rank: int | None, state: StepFiles | None) -> FactorBounds | None:
    """The space that a tensor's factors may take with Δ of this rank absorbed; None where the tensor becomes dense.

    So adapters are absorbed into an accumulator exactly, without multiplying them out. A tensor stays in factors while
    every Δ arrives in factors, and the factors take less space than the dense tensor.
    """
    if rank is None:
        return None
    ranks = state.ranks(context.tensor) if state is not None else []
    return None if ranks is None else FactorBounds.after(context.shape, ranks, rank)


def tensor_contexts(model: BaseModel, t: int, expert: str = "") -> dict[str, Context]:
    """What a method may know of every tensor of the base after t experts."""
    input_first = model.input_first
    return {
        name: Context(
            t,
            tensor.role == "linear",
            tensor.shape,
            torch.float64 if tensor.dtype == "F64" else torch.float32,
            transposed=name in input_first,
            tensor=name,
            expert=expert,
        )
        for name, tensor in model.tensors.items()
    }


def with_base(context: Context, vector: TaskVector, device: str) -> Context:
    """Add θ⁰ of the tensor, for a method that needs it."""
    base = vector.base_elements(context.tensor)(0, math.prod(context.shape)).reshape(context.shape)
    return dataclasses.replace(context, base=base.to(device))


def whole_memory(context: Context, layout: Mapping[str, Slot]) -> int:
    """Bytes at the peak of a tensor that is absorbed whole, with workspace for its decomposition."""
    sizes = [math.prod(slot.shape) * slot.dtype.itemsize for slot in layout.values()]
    return WORKSPACE * max(math.prod(context.shape) * context.dtype.itemsize, *sizes, 0)


def streamed_memory(context: Context, vectors: int = 1) -> int:
    """Bytes at the peak of a tensor that is processed in pieces, those of all ``vectors`` side by side."""
    return (WORKSPACE + vectors - 1) * min(PIECE, math.prod(context.shape)) * context.dtype.itemsize


def peak_memory(method: Method, context: Context, vectors: int = 1) -> int:
    """Bytes at the peak of a tensor, absorbed whole or in pieces as the method needs it."""
    if method.is_whole(context):
        return whole_memory(context, method.layout(context))
    return streamed_memory(context, vectors)
