"""Latest weight averaging."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add

from torch import Tensor

from mergestream.methods.base import Absorbed, Context, Method, State, parameter


@dataclass(frozen=True)
class LAWA(Method):
    """The mean of the last k models.

        merged_t = θ⁰ + (Δ_{t-k+1} + … + Δ_t) / k        (over all t models while t < k)

    Paper, section 3 (LAWA). The state holds k task vectors, the oldest in ``delta0``.
    """

    name = "lawa"

    window: int = parameter(5, "k, how many of the latest models are averaged", at_least=1)

    @property
    def factored(self) -> bool:
        return True

    def slots(self, t: int) -> tuple[str, ...]:
        return tuple(f"delta{i}" for i in range(min(t, self.window)))

    def absorb(self, state: State | None, delta: Tensor, context: Context) -> Absorbed:
        latest = [*(state or {}).values(), delta][-self.window :]
        return Absorbed(dict(zip(self.slots(context.t), latest, strict=True)), kept=delta)

    def direction(self, state: State, t: int) -> Tensor:
        return reduce(add, state.values()) / len(state)
