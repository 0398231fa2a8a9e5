"""Exponential moving average of the models."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.algebra.lowrank import Value
from mergestream.methods.base import Absorbed, Context, Method, State, parameter


@dataclass(frozen=True)
class EMA(Method):
    """Every new model takes the share 1 − β.

        M_1 = Δ_1,   M_t = β·M_{t-1} + (1 − β)·Δ_t,   merged_t = θ⁰ + M_t

    Paper, section 3 (EMA).
    """

    name = "ema"
    whole = "none"
    slots = ("mean",)
    factored = True

    beta: float = parameter(0.9, "β, the weight of the models merged so far", at_least=0, at_most=1)

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        return Absorbed({"mean": delta if state is None else state["mean"] * self.beta + delta * (1 - self.beta)})
