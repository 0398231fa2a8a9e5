"""Simple (stochastic) weight averaging, in the continual form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from mergestream.algebra.lowrank import Value
from mergestream.methods.base import Absorbed, Context, Method, State
from mergestream.methods.scale import Scale


@dataclass(frozen=True)
class Average(Method):
    """The mean of all models.

        S_t = S_{t-1} + Δ_t,   merged_t = θ⁰ + S_t / t

    Paper, section 3 (SWA).
    """

    name = "average"
    whole = "none"
    slots = ("sum",)
    factored = True
    commutative = True
    additive = True

    @property
    def scale_rule(self) -> Scale:
        return "mean"

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        return Absorbed({"sum": delta if state is None else state["sum"] + delta})

    def absorb_all(self, deltas: Sequence[Tensor], contexts: Sequence[Context]) -> tuple[list[float | None], Tensor]:
        return [None] * len(deltas), reduce(Tensor.add_, deltas)
