"""Latest weight averaging."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add

from mergestream.algebra.lowrank import Value
from mergestream.methods.base import Absorbed, Context, Method, Slot, State, parameter


@dataclass(frozen=True)
class LAWA(Method):
    """The mean of the last k models.

        merged_t = θ⁰ + (Δ_{t-k+1} + … + Δ_t) / k        (over all t models while t < k)

    Paper, section 3 (LAWA). The state holds k task vectors, the oldest in ``delta0``.
    """

    name = "lawa"
    whole = "none"
    factored = True

    window: int = parameter(5, "k, how many of the latest models are averaged", at_least=1)

    def layout(self, context: Context) -> dict[str, Slot]:
        return {f"delta{i}": context.like for i in range(min(context.t, self.window))}

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        latest = [*(state or {}).values(), delta][-self.window :]
        return Absorbed({f"delta{i}": value for i, value in enumerate(latest)})

    def direction(self, state: State, context: Context) -> Value:
        return reduce(add, state.values()) / len(state)
