"""regress: the merged weight gives each expert's answers on that expert's inputs, by least squares."""

from __future__ import annotations

import torch
from torch import Tensor

from mergestream.algebra.products import gram
from mergestream.algebra.symmetric import leading_eigenvectors
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.ledger.span import Entry, RightFactor, Span

RIDGE = 0.01
"""ε, as a share of the mean diagonals of A and C"""


class Regress(EntriesReadout):
    """Least squares on the experts' inputs, scaled to the norm that the experts have on them.

    M minimises Σ c_i (‖(M − Δ_i) G_i^½‖² + ‖L_i^½ (M − Δ_i)‖²) + ε ‖M − S‖². With H_i the second moment of the inputs
    of expert i, and H_i, Δ_iᵀΔ_i and Δ_iΔ_iᵀ divided by their traces:

        full fine-tunes   G_i = ½ H_i + ½ Δ_iᵀΔ_i,   without inputs G_i = Δ_iᵀΔ_i
        adapters          G_i = H_i,                  without inputs L_i = Δ_iΔ_iᵀ instead

        A = Σ c_i L_i    C = Σ c_i G_i    B = Σ c_i (L_i Δ_i + Δ_i G_i)    S = Σ c_i Δ_i
        A M + M C + ε M = B + ε S,    ε = 0.01 · (mean diagonal of A + mean diagonal of C)
        M times √(Σ c_i ⟨Δ_i, L_i Δ_i + Δ_i G_i⟩ / ⟨M, A M + M C⟩), at most √t

    Full fine-tuning moves a weight along its inputs. An adapter moves it along a factor that was drawn at random, but
    has learnt where its outputs lie. Without outputs (A = 0) the objective is RegMean's (Jin et al., 2023). The last
    factor restores what a regression loses where experts contradict each other.
    """

    name = "regress"
    tells_adapters = True
    uses_inputs = True

    def coefficients(self, span: Span) -> RightFactor:
        moved = span.sigma[:, None] * span.inputs.double()  # Δ_i = U_i · these rows
        along = span.weight * span.sigma.square() / span.norm2
        outward = torch.zeros_like(along)  # A = U · diagonal · Uᵀ
        target = torch.zeros_like(moved)  # B = U · these rows
        factors, tau = [moved[:0]], 0.0  # C = RᵀR + τ I
        for number, entry in span.experts.items():
            own = span.owner == number
            if entry.is_adapter and not entry.inputs:
                outward[own] = along[own]
                target[own] = along[own, None] * moved[own]
                continue
            R, spread = _inputs(entry, along[own].sqrt()[:, None] * span.inputs[own].double())
            target[own] = moved[own] @ R.T @ R + spread * moved[own]
            factors.append(R)
            tau += spread
        R = torch.cat(factors)
        epsilon = RIDGE * (outward.sum() / span.outputs.shape[1] + R.square().sum() / R.shape[1] + tau)
        Y = _solve(outward, span.output_gram, R, target + epsilon * span.weight[:, None] * moved, tau + epsilon)
        same = span.owner[:, None] == span.owner
        wanted = (span.output_gram * same * (target @ moved.T)).sum()
        UtM = span.output_gram @ Y
        found = (UtM * (outward[:, None] * UtM + Y @ R.T @ R + tau * Y)).sum()
        longer = (wanted / found.clamp(min=torch.finfo(found.dtype).tiny)).clamp(max=len(span.experts))
        return RightFactor(Y * longer.sqrt())


def _inputs(entry: Entry, own: Tensor) -> tuple[Tensor, float]:
    """R and τ of c_i G_i = RᵀR + τ I; ``own`` are rows whose squares are c_i Δ_iᵀΔ_i."""
    if not entry.inputs:
        return own, 0.0
    share = entry.weight / entry.inputs.trace
    R, spread = entry.inputs.factor.to(own), entry.inputs.spread
    if entry.is_adapter:
        return share**0.5 * R, share * spread
    return torch.cat([(share / 2) ** 0.5 * R, 0.5**0.5 * own]), share / 2 * spread


def _solve(outward: Tensor, output_gram: Tensor, R: Tensor, target: Tensor, s: Tensor) -> Tensor:
    """Y of M = U Y with A M + M RᵀR + s M = U · target, for A = U · outward · Uᵀ.

    With A = P Λ Pᵀ and P = U F, each row of PᵀM has an equation of its own, and so has what is outside of P.
    """
    if not outward.any():
        return _divide(target, R, s)
    root = outward.sqrt()
    values, E = leading_eigenvectors(root[:, None] * output_gram * root)
    F = root[:, None] * E / values.sqrt()
    inside = F.T @ output_gram @ target
    return _divide(target - F @ inside, R, s) + F @ _divide_each(inside, R, s + values[:, None])


def _divide(rows: Tensor, R: Tensor, s: Tensor) -> Tensor:
    """rows · (RᵀR + s I)⁻¹, in as few dimensions as there are rows or columns of R."""
    if len(R) >= R.shape[1]:
        return torch.cholesky_solve(rows.T, _cholesky(gram(R), s)).T
    return (rows - rows @ R.T @ torch.cholesky_solve(R, _cholesky(gram(R.T), s))) / s


def _divide_each(rows: Tensor, R: Tensor, s: Tensor) -> Tensor:
    """rows · (RᵀR + s I)⁻¹ with another s for every row."""
    if len(R) >= R.shape[1]:
        values, V = leading_eigenvectors(gram(R))
    else:
        values, E = leading_eigenvectors(gram(R.T))
        V = R.T @ (E / values.sqrt())
    along = rows @ V
    return (along / (values + s)) @ V.T + (rows - along @ V.T) / s


def _cholesky(matrix: Tensor, s: Tensor) -> Tensor:
    matrix.diagonal().add_(s)
    factor: Tensor = torch.linalg.cholesky(matrix)
    return factor
