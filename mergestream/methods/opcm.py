"""OPCM: orthogonal projection-based continual merging (the paper's Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mergestream.algebra.lowrank import dense
from mergestream.algebra.svd import project, protected_directions, thin_svd
from mergestream.methods.base import Absorbed, Context, Method, State, parameter


@dataclass(frozen=True)
class OPCM(Method):
    """Project each task vector away from what is merged, keep the distance to the base constant.

        S_1 = Δ_1,   S_t = S_{t-1} + P_t(Δ_t),   merged_t = θ⁰ + S_t / λ_t
        λ_t = ‖S_t‖ / n_t  with  n_t = mean of ‖Δ_1‖ … ‖Δ_t‖   (adaptive),   or √t

    P_t is the identity but for linear weights. There, with S_{t-1} = U Σ Vᵀ and q directions that
    hold the share alpha of Σσ, it removes from Δ the terms u_i v_jᵀ with i = j and with i, j ≤ q
    (``reference``: the authors' code), with i ≤ q or j ≤ q (``paper``: the printed formula), or
    only those with i, j ≤ q, the diagonal staying (``block``). Paper, section 4.
    """

    name = "opcm"

    alpha: float = parameter(0.5, "share of the singular values that is protected", at_least=0, at_most=1)
    projection: Literal["reference", "paper", "block"] = parameter(
        "reference", "which terms the projection removes", choices=("reference", "paper", "block")
    )
    scaling: Literal["adaptive", "sqrt"] = parameter("adaptive", "λ_t = ‖S_t‖/n_t or √t", choices=("adaptive", "sqrt"))

    @property
    def whole_linear(self) -> bool:
        return True

    @property
    def factored(self) -> bool:
        return True

    @property
    def one_pass(self) -> bool:
        return False  # λ needs the norm of the whole S

    def slots(self, t: int) -> tuple[str, ...]:
        return ("sum",)

    def absorb(self, state: State | None, delta: Tensor, context: Context) -> Absorbed:
        if state is None:
            return Absorbed({"sum": delta}, kept=delta)
        S = state["sum"]
        if not context.linear:
            return Absorbed({"sum": S + delta}, kept=delta)
        if not delta.any():
            return Absorbed({"sum": S}, kept=delta, protected=0)
        if delta.ndim == 3:
            S, delta = dense(S), dense(delta)
            parts = [self._project(s, d) for s, d in zip(S, delta, strict=True)]
            kept = torch.stack([part for part, _ in parts])
            protected = sum(q for _, q in parts)
        else:
            kept, protected = self._project(S, delta)
        return Absorbed({"sum": S + kept}, kept, protected)

    def _project(self, S: Tensor, delta: Tensor) -> tuple[Tensor, int]:
        protected = partial(protected_directions, alpha=self.alpha)
        svd = thin_svd(S, leading=protected) if self.projection == "block" else thin_svd(S)
        q = protected(svd.s)
        return project(delta, svd, q, self.projection), q

    def direction(self, state: State, t: int) -> Tensor:
        return state["sum"]

    def readout_scale(self, t: int, mean_norm: float, direction_norm: float) -> float:
        if self.scaling == "sqrt":
            return 1 / math.sqrt(t)
        return mean_norm / direction_norm if direction_norm else 1.0
