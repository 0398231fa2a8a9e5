"""The papers' formulas, written plainly in float64 over whole models: what every method must equal."""

from __future__ import annotations

import json
import math
from itertools import combinations
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

Model = dict[str, Tensor]


def deltas(base: Model, experts: list[Model]) -> list[Model]:
    return [{name: expert[name].double() - base[name].double() for name in base} for expert in experts]


def flat(delta: Model) -> Tensor:
    return torch.cat([delta[name].reshape(-1) for name in sorted(delta)])


def norm(delta: Model) -> float:
    return float(flat(delta).norm())


def average(base: Any, experts: Any) -> Any:
    vectors = deltas(base, experts)
    return {name: sum(v[name] for v in vectors) / len(vectors) for name in base}


def task_arithmetic(base: Any, experts: Any, scale: Any = 0.3) -> Any:
    vectors = deltas(base, experts)
    return {name: scale * sum(v[name] for v in vectors) for name in base}


def ema(base: Any, experts: Any, beta: Any = 0.9) -> Any:
    first, *rest = deltas(base, experts)
    mean = dict(first)
    for vector in rest:
        mean = {name: beta * mean[name] + (1 - beta) * vector[name] for name in base}
    return mean


def lawa(base: Any, experts: Any, window: Any = 5) -> Any:
    latest = deltas(base, experts)[-window:]
    return {name: sum(v[name] for v in latest) / len(latest) for name in base}


def magmax(base: Any, experts: Any, scale: Any = 0.5) -> Any:
    vectors = deltas(base, experts)
    merged = {}
    for name in base:
        stacked = torch.stack([v[name] for v in vectors])
        merged[name] = scale * stacked.gather(0, stacked.abs().argmax(0, keepdim=True))[0]
    return merged


def dare(base: Any, experts: Any, density: Any = 0.5, seed: Any = 0, scale: Any = 0.3) -> Any:
    vectors = [_drawn(vector, density, seed, number) for number, vector in enumerate(deltas(base, experts), 1)]
    return {name: scale / density * sum(vector[name] for vector in vectors) for name in base}


def _drawn(delta: Model, density: float, seed: int, number: int) -> Model:
    """The masks as one stream of random numbers from the first element of a tensor to the last."""
    drawn = {}
    for name, x in delta.items():
        key = xxhash.xxh3_128_intdigest(json.dumps([seed, f"expert{number}", name]).encode())
        numbers = np.random.Philox(key=key).random_raw(x.numel() // 2 + 1).view(np.uint32)[: x.numel()]
        drawn[name] = x * torch.from_numpy(numbers / 2**32 < density).reshape(x.shape)
    return drawn


def weighted(
    base: Any,
    experts: Any,
    weights: Any = "1",
    densities: Any = "1",
    thin: Any = "largest",
    elect: Any = False,
    normalize: Any = False,
    rescale: Any = False,
    scale: Any = 1.0,
    seed: Any = 0,
) -> Any:
    """mergekit's task arithmetic and its kin, entry by entry in Python's own arithmetic."""
    w, d = (
        [*map(float, text.split(","))] + [float(text.split(",")[-1])] * len(experts) for text in (weights, densities)
    )
    merged = {}
    vectors = deltas(base, experts)
    for number, vector in enumerate(vectors):
        if thin == "random":
            vector = _drawn(vector, d[number], seed, number + 1)
        else:
            vector = {name: _largest(x, d[number]) for name, x in vector.items()}
        factor = 1 / d[number] if rescale else 1.0
        vectors[number] = {name: x * factor for name, x in vector.items()}
    for name in base:
        merged[name] = torch.zeros(base[name].numel(), dtype=torch.float64)
        for place, entries in enumerate(zip(*(v[name].reshape(-1).tolist() for v in vectors), strict=True)):
            parts = [(weight * entry, weight) for weight, entry in zip(w, entries, strict=False)]
            if elect:
                sign = 1 if sum(part for part, _ in parts) >= 0 else -1
                parts = [(part, weight) for part, weight in parts if part * sign > 0]
            divisor = sum(weight for _, weight in parts) if normalize else 1
            merged[name][place] = scale * sum(part for part, _ in parts) / (divisor or 1)
        merged[name] = merged[name].reshape(base[name].shape)
    return merged


def _largest(x: Tensor, density: float) -> Tensor:
    return x * (x.abs() >= x.abs().flatten().sort(descending=True).values[max(1, int(density * x.numel())) - 1])


def slerp(base: Any, experts: Any, t: Any = 0.5) -> Any:
    merged = {name: experts[0][name].double() for name in base}
    for expert in experts[1:]:
        for name, x in merged.items():
            y = expert[name].double()
            lengths = float(x.norm() * y.norm())
            cosine = float((x * y).sum()) / lengths if lengths else 0.0
            if abs(cosine) > 0.9995:
                merged[name] = (1 - t) * x + t * y
            else:
                angle = math.acos(cosine)
                merged[name] = (math.sin((1 - t) * angle) * x + math.sin(t * angle) * y) / math.sin(angle)
    return {name: merged[name] - base[name].double() for name in base}


def model_stock(base: Any, experts: Any) -> Any:
    vectors, k = deltas(base, experts), len(experts)
    merged = {}
    for name in base:
        flat_ones = [v[name].reshape(-1) for v in vectors]
        cosines = [
            float(one @ other / (one.norm() * other.norm())) if one.any() and other.any() else 0.0
            for one, other in combinations(flat_ones, 2)
        ]
        cosine = sum(cosines) / len(cosines) if cosines else 1.0
        ratio = k * cosine / (1 + (k - 1) * cosine)
        merged[name] = ratio * sum(v[name] for v in vectors) / k
    return merged


def _trim(delta: Model, density: float, trim: str) -> Model:
    def threshold(values: Tensor) -> float:
        return float(values.abs().sort(descending=True).values[int(density * values.numel()) - 1])

    if trim == "model":
        common = threshold(flat(delta))
        return {name: x * (x.abs() >= common) for name, x in delta.items()}
    return {name: x * (x.abs() >= threshold(x.reshape(-1))) for name, x in delta.items()}


def ties(
    base: Any, experts: Any, density: Any = 0.2, scale: Any = 0.3, mode: Any = "continual", trim: Any = "model"
) -> Any:
    vectors = deltas(base, experts)
    if mode == "streaming":
        trimmed = [_trim(v, density, trim) for v in vectors]
        merged = {}
        for name in base:
            stacked = torch.stack([v[name] for v in trimmed])
            elected = torch.where(stacked.sum(0) >= 0, 1.0, -1.0).double()
            agree = (stacked.sign() == elected) & (stacked != 0)
            merged[name] = scale * (stacked * agree).sum(0) / agree.sum(0).clamp(min=1)
        return merged
    merged = {name: scale * x for name, x in vectors[0].items()}
    for vector in vectors[1:]:
        pair = [_trim(merged, density, trim), _trim(vector, density, trim)]
        for name in base:
            elected = (pair[0][name] + pair[1][name]).sign()
            ties_sum = sum(x[name] * (x[name].sign() == elected) for x in pair)
            merged[name] = scale * ties_sum + (merged[name] if mode == "reference" else 0)
    return merged


def project(S: Tensor, delta: Tensor, alpha: float, projection: str) -> Tensor:
    """The projection of design section 2, by a full SVD and a mask over the terms u_i v_jᵀ."""
    U, sigma, Vh = torch.linalg.svd(S, full_matrices=True)
    rank = int((sigma > 1e-6 * sigma[0]).sum()) if sigma[0] > 0 else 0
    if rank == 0:
        return delta
    total = sigma[:rank].sum()
    r_alpha = next(r for r in range(1, rank + 1) if sigma[:r].sum() >= alpha * total * (1 - 1e-12))
    q = r_alpha - 1
    coefficients = U.T @ delta @ Vh.T
    i = torch.arange(coefficients.shape[0])[:, None]
    j = torch.arange(coefficients.shape[1])[None, :]
    keep = (i >= q) & (j >= q) if projection == "paper" else ~((i < q) & (j < q))
    if projection != "block":
        keep = keep & ~((i == j) & (i < rank))
    result: Tensor = U @ (coefficients * keep) @ Vh
    return result


def opcm(
    base: Any,
    experts: Any,
    alpha: Any = 0.5,
    projection: Any = "reference",
    scaling: Any = "adaptive",
    linear: Any = ("a.weight", "b.weight"),
) -> Any:
    """Algorithm 1 of the paper, in its own recursive form."""
    vectors = deltas(base, experts)
    merged, scale, n = dict(vectors[0]), 1.0, norm(vectors[0])
    for t, vector in enumerate(vectors[1:], 2):
        before = {name: scale * x for name, x in merged.items()}
        summed = {
            name: before[name] + (project(before[name], x, alpha, projection) if name in linear else x)
            for name, x in vector.items()
        }
        n = (t - 1) / t * n + norm(vector) / t
        scale = norm(summed) / n if scaling == "adaptive" else math.sqrt(t)
        merged = {name: x / scale for name, x in summed.items()}
    return merged


def ledger(base: Any, experts: Any, **parameters: Any) -> Any:
    from tests.ledger.formulas import merged

    return merged(base, experts, "agree", **parameters)
