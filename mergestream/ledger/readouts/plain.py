"""plain: the direction of the method itself."""

from __future__ import annotations

from mergestream.algebra.lowrank import Value
from mergestream.ledger.readouts.base import StateReadout
from mergestream.methods.base import Method


class Plain(StateReadout):
    """The method's direction, by the method's scale."""

    name = "plain"

    def scale_of(self, method: Method) -> float | str:
        return method.scale_rule

    def linear(self, direction: Value) -> Value:
        return direction

    def other(self, direction: Value, t: int) -> Value:
        return direction
