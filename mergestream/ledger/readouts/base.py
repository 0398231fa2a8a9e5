"""The contract of a readout: from the entries or the state of one tensor to the merged task vector.

    merged = θ⁰ + scale · readout

A readout is a pure function of tensors: it knows nothing of files, devices or threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from mergestream.algebra.lowrank import Value
from mergestream.ledger.span import Coefficients, Span
from mergestream.methods.base import Method


class Readout(ABC):
    """Base class of all readouts. Subclass `EntriesReadout`, `StateReadout` or both."""

    name: ClassVar[str]
    tells_adapters: ClassVar[bool] = False
    """Whether it merges an adapter and the full model with the same weights differently"""


class EntriesReadout(Readout):
    """A readout of the entries of all experts."""

    scale: ClassVar[float] = 1.0
    """The default scale"""
    additive: ClassVar[bool] = False
    """Whether it is Σ c_i Δ_i: then any scale rule can be chosen"""
    uses_inputs: ClassVar[bool] = False
    """Whether it reads the moments of the layers' inputs, where there are any"""

    @abstractmethod
    def coefficients(self, span: Span) -> Coefficients:
        """Z of M = U Z Vᵀ for a linear weight: a κ×κ matrix, or a vector of κ numbers for a diagonal one.

        A readout that responds to other inputs than the experts do returns the right factor Y of M = U Y instead.
        """

    def share(self, weight: float, total: float) -> float:
        """The factor of an expert with this weight in a tensor that is no linear weight; ``total`` sums all weights."""
        return weight / total


class StateReadout(Readout):
    """A readout of one state that has absorbed all experts."""

    @abstractmethod
    def scale_of(self, method: Method) -> float | str:
        """The default scale."""

    @abstractmethod
    def linear(self, direction: Value) -> Value:
        """Read out a linear weight, a matrix, from the method's direction."""

    @abstractmethod
    def other(self, direction: Value, t: int) -> Value:
        """Read out any other tensor, or a piece of it, from the method's direction after t experts."""


class Plain(StateReadout):
    """The method's direction, by the method's scale."""

    name = "plain"

    def scale_of(self, method: Method) -> float | str:
        return method.scale_rule

    def linear(self, direction: Value) -> Value:
        return direction

    def other(self, direction: Value, t: int) -> Value:
        return direction
