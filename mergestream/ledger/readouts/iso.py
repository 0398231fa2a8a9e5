"""Iso-C: the sum of all experts with equal singular values."""

from __future__ import annotations

from torch import Tensor

from mergestream.algebra.lowrank import LowRank, Value
from mergestream.algebra.svd import FactoredSVD, thin_svd
from mergestream.algebra.symmetric import leading_eigenvectors, power
from mergestream.ledger.readouts.base import EntriesReadout, StateReadout
from mergestream.ledger.span import Span
from mergestream.methods.base import Method


class Iso(EntriesReadout, StateReadout):
    """The sum of all experts, with every singular value set to their mean.

        mean(σ) · P Qᵀ  with S = P diag(σ) Qᵀ,  S = Σ c_i Δ_i or the state of a method that adds up

    Marczak et al., No Task Left Behind (2025), Iso-C; its α is the scale, 1.5.

    In the directions of the experts S = U D Vᵀ, and with N = A^½ D UᵀU D A^½, A = VᵀV, whose eigenvalues are σ²,
    P Qᵀ = S (SᵀS)^(−½) = U D A^½ N^(−½) A^(−½) Vᵀ.
    """

    name = "iso"
    scale = 1.5

    def coefficients(self, span: Span) -> Tensor:
        root = power(span.input_gram.clone(), 0.5)
        inverse = power(span.input_gram.clone(), -0.5)
        half = span.weighted[:, None] * root
        squares, vectors = leading_eigenvectors(half.T @ span.output_gram @ half)
        sigma = squares.sqrt()
        mean = sigma.sum() / max(len(sigma), 1)
        return mean * half @ (vectors / sigma) @ (vectors.T @ inverse)

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
