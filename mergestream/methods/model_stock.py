"""Model Stock: as far from the base as the experts agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mergestream.algebra.lowrank import Value, dense, squared_norm
from mergestream.methods.base import Absorbed, Context, Method, Slot, State

_SINGULAR = 1e-6


@dataclass(frozen=True)
class ModelStock(Method):
    """The mean of all experts; each tensor is pulled back to the base as far as the experts disagree there.

        S_t = S_{t-1} + Δ_t,   c_t = c_{t-1} + ⟨N_{t-1}, Δ_t/‖Δ_t‖⟩,   N_t = N_{t-1} + Δ_t/‖Δ_t‖
        merged_t = θ⁰ + r·S_t/t   with   r = t·cos θ / (1 + (t − 1)·cos θ),   cos θ = c_t / (t·(t − 1)/2)

    Jang et al. 2024 (arXiv 2403.19522), for each tensor by itself; c_t is the sum of the cosines of all pairs. A
    single model stays as it is; where the models cancel out, the result is the base.
    """

    name = "model_stock"
    whole = "all"
    commutative = True

    def layout(self, context: Context) -> dict[str, Slot]:
        return {"sum": context.like, "units": context.like, "cosines": Slot((1,), torch.float64)}

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        delta = dense(delta)
        norm = math.sqrt(squared_norm(delta))
        unit = delta / norm if norm else delta
        if state is None:
            return Absorbed({"sum": delta, "units": unit, "cosines": delta.new_zeros(1, dtype=torch.float64)})
        units = dense(state["units"])
        cosines = dense(state["cosines"]) + (units * unit).sum(dtype=torch.float64)
        return Absorbed({"sum": state["sum"] + delta, "units": units + unit, "cosines": cosines})

    def direction(self, state: State, context: Context) -> Value:
        return state["sum"] * (ratio(float(dense(state["cosines"])), context.t) / context.t)


def ratio(cosines: float, t: int) -> float:
    """How far to follow the mean of t experts, from the sum of the cosines of all pairs."""
    if t == 1:
        return 1.0
    cosine = cosines / (t * (t - 1) / 2)
    agreement = 1 + (t - 1) * cosine
    return t * cosine / agreement if agreement > _SINGULAR else 0.0
