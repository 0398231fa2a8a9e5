"""Iso-C: the sum of all experts with equal singular values."""

from __future__ import annotations

import torch

from mergestream.algebra.lowrank import LowRank, Value
from mergestream.algebra.products import gram, multiply
from mergestream.algebra.svd import FactoredSVD, thin_svd
from mergestream.algebra.symmetric import leading_eigenvectors
from mergestream.ledger.readouts.base import EntriesReadout, StateReadout
from mergestream.ledger.span import RightFactor, Span
from mergestream.methods.base import Method


class Iso(EntriesReadout, StateReadout):
    """The sum of all experts, with every singular value set to their mean.

        mean(σ) · P Qᵀ  with S = P diag(σ) Qᵀ,  S = Σ c_i Δ_i or the state of a method that adds up

    Marczak et al., No Task Left Behind (2025), Iso-C; its α is the scale, 1.5.

    S = U Y with Y = D Vᵀ, and SᵀS = W Σ² Wᵀ, so that P Qᵀ = U · Y W Σ⁻¹ · Wᵀ. Fewer directions than inputs are first
    brought into as many dimensions: Yᵀ = Q R, and Rᵀ takes the place of Y. Float32 would do for neither SᵀS nor W: the
    least singular values count as much as the largest.
    """

    name = "iso"
    scale = 1.5

    def coefficients(self, span: Span) -> RightFactor:
        rows, Q = span.weighted[:, None] * span.inputs, None
        if len(rows) < rows.shape[1]:
            Q, R = torch.linalg.qr(rows.T.to(span.inputs))
            rows = R.T.double()
        squares, W = leading_eigenvectors(gram(span.outputs.T.double() @ rows))
        sigma = squares.sqrt()
        left = (rows @ (W * (sigma.sum() / sigma / max(len(sigma), 1)))).to(span.inputs)
        right = W.to(left) if Q is None else multiply(Q, W.to(left))
        return RightFactor(multiply(left, right.T))

    def scale_of(self, method: Method) -> float:
        return self.scale

    def linear(self, direction: Value) -> Value:
        svd = thin_svd(direction)
        if not svd.rank:
            return direction
        mean = float(svd.s.mean())
        if isinstance(svd, FactoredSVD):
            core = mean * svd.coordinates.u @ svd.coordinates.v.T
            return LowRank(direction.shape, svd.left, core, svd.right)
        return mean * svd.u @ svd.v.T

    def other(self, direction: Value, t: int) -> Value:
        return direction / t
