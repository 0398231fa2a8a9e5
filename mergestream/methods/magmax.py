"""MagMax: selection by magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from mergestream.algebra.lowrank import Value, dense
from mergestream.methods.base import Absorbed, Context, Method, State, parameter


@dataclass(frozen=True)
class MagMax(Method):
    """Elementwise the entry of largest magnitude among all task vectors.

    M_t = whichever of M_{t-1} and Δ_t is larger in magnitude,   merged_t = θ⁰ + scale·M_t
    """

    name = "magmax"
    whole = "none"
    slots = ("largest",)
    commutative = True

    scale: float = parameter(0.5, "what the selected entries are multiplied by")

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        delta = dense(delta)
        if state is None:
            return Absorbed({"largest": delta})
        largest = dense(state["largest"])
        magnitude, old = delta.abs(), largest.abs()
        # Entries of equal magnitude and opposite sign: the positive one, so that order does not matter.
        wins = (magnitude > old) | ((magnitude == old) & (delta > largest))
        return Absorbed({"largest": delta.where(wins, largest)}, kept=delta * wins)
