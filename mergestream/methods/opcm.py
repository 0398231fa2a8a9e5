"""OPCM: orthogonal projection-based continual merging (the paper's Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from mergestream.algebra.lowrank import Value, dense
from mergestream.algebra.projection import project, protected_directions
from mergestream.algebra.svd import thin_svd
from mergestream.methods.base import Absorbed, Context, Method, State, parameter
from mergestream.methods.scale import Scale


@dataclass(frozen=True)
class OPCM(Method):
    """Project each task vector away from what is merged, keep the distance to the base constant.

        S_1 = Δ_1,   S_t = S_{t-1} + P_t(Δ_t),   merged_t = θ⁰ + S_t / λ_t
        λ_t = ‖S_t‖ / n_t  with  n_t = mean of ‖Δ_1‖ … ‖Δ_t‖   (adaptive),   or √t

    P_t changes linear weights only. There, with S_{t-1} = U Σ Vᵀ and q directions that hold the share alpha of Σσ,
    it removes terms u_i v_jᵀ from Δ: those with i = j, and those with i, j ≤ q (``reference``: the authors' code) or
    with i ≤ q or j ≤ q (``paper``: the printed formula). ``block`` removes those with i, j ≤ q and keeps the diagonal.
    Paper, section 4.
    """

    name = "opcm"
    slots = ("sum",)
    factored = True
    additive = True

    alpha: float = parameter(0.5, "share of the singular values that is protected", at_least=0, at_most=1)
    projection: Literal["reference", "paper", "block"] = parameter(
        "reference", "which terms the projection removes", choices=("reference", "paper", "block")
    )
    scaling: Literal["adaptive", "sqrt"] = parameter(
        "adaptive", "what the sum S_t is divided by: λ_t = ‖S_t‖/n_t, or √t", choices=("adaptive", "sqrt")
    )

    @property
    def scale_rule(self) -> Scale:
        return self.scaling

    def absorb(self, state: State | None, delta: Value, context: Context) -> Absorbed:
        if state is None:
            return Absorbed({"sum": delta})
        S = state["sum"]
        if not context.linear:
            return Absorbed({"sum": S + delta})
        if not delta.any():
            return Absorbed({"sum": S}, protected=0)
        kept: Value
        if delta.ndim == 3:
            S, delta = dense(S), dense(delta)
            parts = [self._project(s, d) for s, d in zip(S, delta, strict=True)]
            kept = torch.stack([dense(part) for part, _ in parts])
            protected = sum(q for _, q in parts)
        else:
            kept, protected = self._project(S, delta)
        return Absorbed({"sum": S + kept}, kept, protected)

    def _project(self, S: Value, delta: Value) -> tuple[Value, int]:
        protected = partial(protected_directions, alpha=self.alpha)
        # σ descend, so that at most the share α of all directions is protected: beyond half, all vectors cost no more.
        few = self.projection == "block" and self.alpha <= 0.5
        svd = thin_svd(S, leading=protected if few else None)
        q = protected(svd.s)
        return project(delta, svd, q, self.projection), q
