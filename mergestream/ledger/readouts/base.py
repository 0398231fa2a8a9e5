"""The contract of a readout: from what is remembered of one tensor to the merged task vector.

    merged = θ⁰ + scale · readout

It is a pure function of tensors: it knows nothing of files, devices or threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from mergestream.algebra.lowrank import Value
from mergestream.algebra.work import Work
from mergestream.ledger.span import Span
from mergestream.methods.base import Method


class Readout(ABC):
    """Base class of all readouts; what it can be made of says which of the two below it is, or both."""

    name: ClassVar[str]


class EntriesReadout(Readout):
    """Made of the entries of all experts."""

    scale: ClassVar[float] = 1.0
    """Its own, where the user gives none"""
    additive: ClassVar[bool] = False
    """Whether it is Σ c_i Δ_i: then it may be scaled as the methods that add up are"""

    @abstractmethod
    def coefficients(self, span: Span) -> Tensor:
        """Z of M = U Z Vᵀ, for a linear weight: κ×κ, or κ numbers that are its diagonal."""

    def operations(self, outputs: int, inputs: int, directions: int) -> Sequence[Work]:
        """The linear algebra of the coefficients, and of Z Vᵀ where they are a matrix, by which time is predicted
        (docs/scale.md): none by default."""
        return ()

    def share(self, weight: float, total: float) -> float:
        """What of an expert with this weight goes into a tensor that is no linear weight; ``total`` is all weights'."""
        return weight / total


class StateReadout(Readout):
    """Made of one state that has absorbed all experts."""

    @abstractmethod
    def scale_of(self, method: Method) -> float | str:
        """Its own scale, where the user gives none."""

    @abstractmethod
    def linear(self, direction: Value) -> Value:
        """Of the method's direction for a linear weight, a matrix."""

    def linear_operations(self, m: int, n: int) -> Sequence[Work]:
        """The linear algebra of `linear`, by which time is predicted: none by default."""
        return ()

    @abstractmethod
    def other(self, direction: Value, t: int) -> Value:
        """Of the method's direction for all else, or a piece of it, after t models."""
