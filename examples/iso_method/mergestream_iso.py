from dataclasses import dataclass

import torch

from mergestream.methods.base import Absorbed, Context, Method, Slot, State, Value, dense, parameter


@dataclass(frozen=True)
class Iso(Method):
    """Iso-C: the sum of all task vectors, all singular values of a linear weight at their mean.

    S_t = S_{t-1} + Δ_t = U Σ Vᵀ,   merged_t = θ⁰ + α·mean(σ)·U Vᵀ   (θ⁰ + α·S_t/t for other tensors)
    """

    name = "iso"
    commutative = True

    alpha: float = parameter(1.0, "α, the weight of the merged task vector", at_least=0)

    @property
    def scale_rule(self) -> float:
        return self.alpha

    def layout(self, context: Context) -> dict[str, Slot]:
        return {"sum": context.like}

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        return Absorbed({"sum": delta if state is None else state["sum"] + delta})

    def direction(self, state: State, context: Context) -> Value:
        S = dense(state["sum"])
        if not context.linear:
            return S / context.t
        U, sigma, Vh = torch.linalg.svd(S, full_matrices=False)
        held = sigma > 1e-6 * sigma[..., :1]  # beyond the rank, singular vectors are arbitrary
        direction: torch.Tensor = sigma.mean(-1)[..., None, None] * (U * held[..., None, :]) @ Vh
        return direction
