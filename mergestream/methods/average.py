"""Simple (stochastic) weight averaging, in the continual form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from mergestream.methods.base import Absorbed, Context, Method, State


@dataclass(frozen=True)
class Average(Method):
    """The mean of all models.

        S_t = S_{t-1} + Δ_t,   merged_t = θ⁰ + S_t / t

    Paper, section 3 (SWA).
    """

    name = "average"

    @property
    def factored(self) -> bool:
        return True

    @property
    def commutative(self) -> bool:
        return True

    def slots(self, t: int) -> tuple[str, ...]:
        return ("sum",)

    def absorb(self, state: State | None, delta: Tensor, context: Context) -> Absorbed:
        return Absorbed({"sum": delta if state is None else state["sum"] + delta}, kept=delta)

    def direction(self, state: State, t: int) -> Tensor:
        return state["sum"]

    def absorb_all(self, deltas: Sequence[Tensor], contexts: Sequence[Context]) -> tuple[list[float | None], Tensor]:
        return [None] * len(deltas), reduce(Tensor.add_, deltas)

    def readout_scale(self, t: int, mean_norm: float, direction_norm: float) -> float:
        return 1 / t
