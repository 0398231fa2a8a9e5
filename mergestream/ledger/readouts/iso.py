"""Iso-C: the sum of all experts with equal singular values."""

from __future__ import annotations

from mergestream.algebra.lowrank import LowRank, Value
from mergestream.algebra.svd import FactoredSVD, thin_svd
from mergestream.algebra.symmetric import leading_eigenvectors
from mergestream.ledger.readouts.base import EntriesReadout, StateReadout
from mergestream.ledger.readouts.tsv import spectrum
from mergestream.ledger.span import Factors, Span
from mergestream.methods.base import Method


class Iso(EntriesReadout, StateReadout):
    """The sum of all experts, with every singular value set to their mean.

        mean(σ) · P Qᵀ  with S = P diag(σ) Qᵀ,  S = Σ c_i Δ_i or the state of a method that adds up

    Marczak et al., No Task Left Behind (2025), Iso-C; its α is the scale, 1.5.

    In the directions of the experts S = U D Vᵀ. With VᵀV = E Λ Eᵀ the rows of Q = Λ^(−½) Eᵀ Vᵀ are orthonormal,
    S = U H Q with H = D E Λ^½, and with HᵀUᵀU H = W Σ² Wᵀ it is P Qᵀ = U H W Σ⁻¹ · Wᵀ Q.
    """

    name = "iso"
    scale = 1.5

    def coefficients(self, span: Span) -> Factors:
        roots, E = spectrum(span.inputs)
        H = span.weighted[:, None] * (E * roots)
        squares, W = leading_eigenvectors(H.T @ span.output_gram @ H, dtype=E.dtype)
        sigma = squares.sqrt()
        left = H.to(E) @ (W * (sigma.sum() / sigma / max(len(sigma), 1)).to(E))
        return Factors(left, W.T @ (E / roots).T)

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
