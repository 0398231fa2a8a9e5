"""The batch methods, written plainly in float64 on experts that are cut to their leading directions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Model = dict[str, Tensor]
LINEAR = ("a.weight", "b.weight")


def cut(delta: Tensor, count: int, budget: float, entries: str) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ and V of the leading directions of a task vector as a matrix, in the type in which they are kept."""
    matrix = delta.flatten(1)
    m, n = matrix.shape
    capacity = 2 * m * n / (m + n) if delta.ndim > 2 else min(m, n)  # of a convolution as much of its size
    kept = min(m, n, max(1, int(budget * capacity / max(count, 8))))
    U, sigma, Vh = torch.linalg.svd(matrix, full_matrices=False)
    kept = min(kept, int((sigma > 1e-12 * sigma[0]).sum()))  # beyond the rank, singular vectors are arbitrary
    dtype = getattr(torch, entries)
    return U[:, :kept].to(dtype).double(), sigma[:kept], Vh[:kept].T.to(dtype).double()


def is_cut(delta: Tensor, budget: float) -> bool:
    return delta.ndim > 1 and budget * min(delta.flatten(1).shape) >= 8


def merged(
    base: Any,
    experts: Any,
    readout: Any = "agree",
    weights: Any = None,
    budget: Any = 1.0,
    entries: Any = "bfloat16",
    svd: Any = "auto",
    cut_at: Any = None,
) -> Any:
    """The merged task vector by a readout with scale 1."""
    weights = weights or [1.0] * len(experts)
    result = {}
    for name, theta in base.items():
        deltas = [expert[name].double() - theta.double() for expert in experts]
        known = [
            cut(delta, cut_at or len(experts), budget, entries) if is_cut(delta, budget) else None for delta in deltas
        ]
        held = [
            delta if part is None else (part[0] * part[1] @ part[2].T).reshape(delta.shape)
            for delta, part in zip(deltas, known, strict=True)
        ]
        total = sum(c * delta for c, delta in zip(weights, held, strict=True))
        if readout in ("sum", "expert"):
            result[name] = total
        elif name not in LINEAR:
            result[name] = total / sum(weights)
        else:
            norms = [float(delta.square().sum()) for delta in deltas]
            result[name] = FORMULAS[readout](known, norms, weights)
    return result


def agree(parts: Any, norms: Any, weights: Any) -> Any:
    """Design section 8, with C as the n×n matrix that it is."""
    C = D = S = 0
    for (U, sigma, V), norm2, c in zip(parts, norms, weights, strict=True):
        if norm2:
            C = C + c * V * sigma**2 @ V.T / norm2
            D = D + c * U * sigma**3 @ V.T / norm2
            S = S + c * U * sigma @ V.T
    if isinstance(S, int):
        return torch.zeros(len(parts[0][0]), len(parts[0][2]), dtype=torch.float64)
    values, Q = torch.linalg.eigh(C)
    values, Q = values.flip(0).clamp(min=0), Q.flip(1)
    values = values.where(values > 1e-12 * values[0], torch.zeros(1, dtype=torch.float64))
    K = math.ceil(float(values.sqrt().sum() ** 2 / values.sum()) * (1 - 1e-12))
    P = Q[:, :K]
    return S - S @ P @ P.T + D @ P / values[:K] @ P.T


def polar(X: Tensor) -> Tensor:
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    rank = int((sigma > 1e-6 * sigma[0]).sum()) if sigma[0] else 0
    result: Tensor = U[:, :rank] @ Vh[:rank]
    return result


def tsv(parts: Any, norms: Any, weights: Any) -> Any:
    U, V = (torch.cat([part[side] for part in parts], 1) for side in (0, 2))
    sigma = torch.cat([c * part[1] for part, c in zip(parts, weights, strict=True)])
    return polar(U) * sigma @ polar(V).T


def iso(parts: Any, norms: Any, weights: Any) -> Any:
    S = sum_(parts, norms, weights)
    sigma = torch.linalg.svdvals(S)
    return sigma[sigma > 1e-6 * sigma[0]].mean() * polar(S)


def tempered(parts: Any, norms: Any, weights: Any) -> Any:
    merged = tsv(parts, norms, weights)
    moved = [(c, math.sqrt(norm2)) for c, norm2 in zip(weights, norms, strict=True) if norm2]
    mean = sum(c * norm for c, norm in moved) / sum(c for c, _ in moved)
    return merged * (mean / float(merged.norm()))


def outputs(parts: Any, norms: Any, weights: Any) -> Any:
    merged = agree([(V, sigma, U) for U, sigma, V in parts], norms, weights).T
    moved = [(c, math.sqrt(norm2)) for c, norm2 in zip(weights, norms, strict=True) if norm2]
    return merged * (1.5 * sum(c * norm for c, norm in moved) / sum(c for c, _ in moved) / float(merged.norm()))


def regress(deltas: Any, moments: Any, weights: Any, adapters: Any) -> Any:
    """Design section 9, as one system of linear equations; ``moments`` are n×n matrices, or None."""
    m, n = deltas[0].shape
    identities = torch.eye(m, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    inputs, outputs = [], []
    for delta, H, is_adapter in zip(deltas, moments, adapters, strict=True):
        norm2 = max(float(delta.square().sum()), 1e-300)
        by_inputs, by_outputs = delta.T @ delta / norm2, delta @ delta.T / norm2
        has = H is not None
        outputs.append(by_outputs if is_adapter and not has else 0 * by_outputs)
        if is_adapter:
            inputs.append(H / H.trace() if has else 0 * by_inputs)
        else:
            inputs.append((H / H.trace() + by_inputs) / 2 if has else by_inputs)
    experts = list(zip(weights, deltas, outputs, inputs, strict=True))
    A, C = sum(c * L for c, _, L, _ in experts), sum(c * G for c, _, _, G in experts)
    B, S = sum(c * (L @ x + x @ G) for c, x, L, G in experts), sum(c * x for c, x, _, _ in experts)
    eps = 0.01 * (A.trace() / m + C.trace() / n)
    if not eps:
        return torch.zeros(m, n, dtype=torch.float64)
    system = torch.kron(A, identities[1]) + torch.kron(identities[0], C) + eps * torch.eye(m * n, dtype=torch.float64)
    M = torch.linalg.solve(system, (B + eps * S).flatten()).reshape(m, n)
    wanted = sum(c * float((x * (L @ x + x @ G)).sum()) for c, x, L, G in experts)
    found = float((M * (A @ M + M @ C)).sum())
    return M * math.sqrt(min(wanted / found, len(deltas)))


def regress_alone(parts: Any, norms: Any, weights: Any) -> Any:
    """Of full fine-tunes without inputs."""
    experts = [
        (c, U * sigma @ V.T, V * sigma**2 @ V.T / norm2)
        for (U, sigma, V), norm2, c in zip(parts, norms, weights, strict=True)
        if norm2
    ]
    C = sum(c * G for c, _, G in experts)
    eps = 0.01 * C.trace() / len(C)
    ridge = eps * torch.eye(len(C), dtype=torch.float64)
    M = sum(c * (delta @ G + eps * delta) for c, delta, G in experts) @ torch.linalg.inv(C + ridge)
    wanted = sum(c * float((delta @ G * delta).sum()) for c, delta, G in experts)
    return M * math.sqrt(min(wanted / float((M @ C * M).sum()), len(experts)))


def sum_(parts: Any, norms: Any, weights: Any) -> Any:
    return sum(c * U * sigma @ V.T for (U, sigma, V), c in zip(parts, weights, strict=True))


FORMULAS = {
    "agree": agree,
    "regress": regress_alone,
    "outputs": outputs,
    "tsv": tsv,
    "tempered": tempered,
    "iso": iso,
    "sum": sum_,
}
