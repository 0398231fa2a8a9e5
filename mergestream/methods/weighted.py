"""A weighted sum of task vectors, each thinned to its own density."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

from torch import Tensor

from mergestream.algebra.lowrank import Value, dense
from mergestream.errors import UsageError
from mergestream.methods.base import Absorbed, Context, Method, Ranking, Slot, State, parameter
from mergestream.methods.dare import thinned
from mergestream.methods.ties import trim

_NOTHING = 1e-8


@dataclass(frozen=True)
class Weighted(Method):
    """The sum of all task vectors, with a weight and a density for each: mergekit's task arithmetic, TIES and DARE.

        D_i = w_i·s(Δ_i),   merged_t = θ⁰ + scale·(D_1 + … + D_t)

    s keeps the share d_i of the entries, the largest of each tensor or random ones, and divides them by d_i with
    ``rescale``. With ``elect`` only entries with the sign of their sum are added; with ``normalize`` the sum is
    divided by the weights of its entries.
    """

    name = "weighted"
    whole = "none"

    weights: str = parameter("1", "w of the models in their order, such as 0.5,0.3; the last is for all further models")
    densities: str = parameter("1", "d of the models, in the same form")
    thin: Literal["largest", "random"] = parameter(
        "largest", "which entries are left where the density is below 1", choices=("largest", "random")
    )
    elect: bool = parameter(False, "whether entries against the sign of their sum are left out")
    normalize: bool = parameter(False, "whether the sum is divided by the weights in it")
    rescale: bool = parameter(False, "whether the entries that are left are divided by the density")
    scale: float = parameter(1.0, "what the sum is multiplied by")
    seed: int = parameter(0, "seed of the random choice of entries", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for what, text in (("weights", self.weights), ("densities", self.densities)):
            numbers = listed(text)
            if not numbers or not all(map(math.isfinite, numbers)):
                raise UsageError(f"{self.name}: {what}={text} is no list of numbers such as 0.5,0.3")
        if not all(0 < density <= 1 for density in listed(self.densities)):
            raise UsageError(f"{self.name}: densities={self.densities} must be above 0, and at most 1")

    @property
    def commutative(self) -> bool:
        return "," not in self.weights + self.densities

    def ranking(self, t: int) -> Ranking | None:
        density = nth(self.densities, t)
        return Ranking(("delta",), density, "tensor", fewest=1) if self.thin == "largest" and density < 1 else None

    def layout(self, context: Context) -> dict[str, Slot]:
        slots = ("positive", "negative", "positive_weight", "negative_weight") if self.elect else ("sum",)
        return dict.fromkeys(slots, context.like)

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        weight, density = nth(self.weights, context.t), nth(self.densities, context.t)
        kept = self._thinned(dense(delta), density, context)
        share = kept * (weight / density if self.rescale else weight)
        new: State = {"sum": share}
        if self.elect:
            new = {
                "positive": share.clamp(min=0),
                "negative": share.clamp(max=0),
                "positive_weight": (share > 0).to(share.dtype) * weight,
                "negative_weight": (share < 0).to(share.dtype) * weight,
            }
        if state is not None:
            new = {slot: state[slot] + part for slot, part in new.items()}
        return Absorbed(new, kept)

    def _thinned(self, delta: Tensor, density: float, context: Context) -> Tensor:
        if density == 1:
            return delta
        if self.thin == "largest":
            return trim(delta, context.thresholds["delta"])
        return thinned(delta, density, self.seed, context)

    def direction(self, state: State, context: Context) -> Value:
        if not self.elect:
            total = math.fsum(nth(self.weights, t) for t in range(1, context.t + 1)) if self.normalize else 1.0
            return state["sum"] / (total if abs(total) > _NOTHING else 1.0)
        positive, negative = dense(state["positive"]), dense(state["negative"])
        up = positive + negative >= 0
        elected = positive.where(up, negative)
        if not self.normalize:
            return elected
        weight = dense(state["positive_weight"]).where(up, dense(state["negative_weight"]))
        return elected / weight.where(weight != 0, 1.0)


@cache
def listed(text: str) -> tuple[float, ...]:
    """Parse comma-separated numbers; empty where the text is something else."""
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        return ()


def nth(text: str, t: int) -> float:
    """The number for the t-th expert."""
    numbers = listed(text)
    return numbers[min(t, len(numbers)) - 1]
