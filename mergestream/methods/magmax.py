"""MagMax: selection by magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mergestream.methods.base import Absorbed, Context, Method, State, parameter


@dataclass(frozen=True)
class MagMax(Method):
    """Elementwise the entry of largest magnitude among all task vectors.

    M_t = whichever of M_{t-1} and Δ_t is larger in magnitude,   merged_t = θ⁰ + λ·M_t
    """

    name = "magmax"

    scale: float = parameter(0.5, "λ, the weight of the selected entries")

    @property
    def commutative(self) -> bool:
        return True

    def slots(self, t: int) -> tuple[str, ...]:
        return ("largest",)

    def absorb(self, state: State | None, delta: Tensor, context: Context) -> Absorbed:
        if state is None:
            return Absorbed({"largest": delta}, kept=delta)
        largest = state["largest"]
        magnitude, old = delta.abs(), largest.abs()
        # Entries of equal magnitude and opposite sign: the positive one, so that order does not matter.
        wins = (magnitude > old) | ((magnitude == old) & (delta > largest))
        return Absorbed({"largest": delta.where(wins, largest)}, kept=delta * wins)

    def direction(self, state: State, t: int) -> Tensor:
        return state["largest"]

    def readout_scale(self, t: int, mean_norm: float, direction_norm: float) -> float:
        return self.scale
