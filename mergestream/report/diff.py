"""Compare two models: steps that a store keeps, its base, or any checkpoint of the same base."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mergestream.algebra.pieces import Elements, ranges
from mergestream.base.names import layer_of
from mergestream.errors import MergestreamError
from mergestream.experts import make_task_vector, open_expert

if TYPE_CHECKING:
    from mergestream.store import Store

Sums = tuple[float, ...]
"""‖A − θ⁰‖², ‖B − θ⁰‖², ‖A − B‖² and ⟨A − θ⁰, B − θ⁰⟩"""
Model = tuple[str, Callable[[str], Elements | None], Mapping[str, int]]
"""One side: its label, the difference of a tensor from the base (None if zero), and the memory of what is not streamed
"""


@dataclass(frozen=True)
class Difference:
    """The difference of two models, layers or tensors."""

    norm_a: float
    """‖A − θ⁰‖"""
    norm_b: float
    """‖B − θ⁰‖"""
    distance: float
    """‖A − B‖"""
    cosine: float | None
    """The cosine of A − θ⁰ and B − θ⁰; None if one of them is zero"""

    @classmethod
    def of(cls, parts: Iterable[Sums]) -> Difference:
        """The difference over some tensors."""
        a2, b2, distance2, product = map(math.fsum, zip(*parts, (0.0,) * 4, strict=True))
        norms = math.sqrt(a2) * math.sqrt(b2)
        cosine = max(-1.0, min(1.0, product / norms)) if norms else None
        return cls(math.sqrt(a2), math.sqrt(b2), math.sqrt(distance2), cosine)


@dataclass(frozen=True)
class Comparison:
    """The difference of A and B in total, by layer and by tensor; the largest comes first."""

    a: str
    b: str
    total: Difference
    layers: Mapping[str, Difference]
    tensors: Mapping[str, Difference]


def compare(store: Store, a: str, b: str) -> Comparison:
    """Compare two models, each the number of a step (0 for the base) or a checkpoint."""
    base = store.manifest.base
    tensors = {name: base.tensors[name].numel for name in base.merged}
    found: dict[str, Sums] = {}
    with ExitStack() as stack, store.progress.task("comparing", sum(tensors.values()) * 4) as advance:
        (label_a, elements_a, memory_a), (label_b, elements_b, memory_b) = (
            _open_model(stack, store, model) for model in (a, b)
        )
        memory = {name: memory_a.get(name, 0) + memory_b.get(name, 0) for name in tensors}

        def measure(name: str) -> Sums:
            return _measure(elements_a(name), elements_b(name), tensors[name])

        for name, sums in store.engine.run(tensors, measure, memory):
            if not all(map(math.isfinite, sums)):
                raise MergestreamError(f"{name} of {label_a} or {label_b} holds NaN, Inf or numbers that are too large")
            found[name] = sums
            advance(tensors[name] * 4)
    layers: dict[str, list[Sums]] = {}
    for name in tensors:
        layers.setdefault(layer_of(name), []).append(found[name])
    return Comparison(
        label_a,
        label_b,
        Difference.of(found.values()),
        _sort({layer: Difference.of(parts) for layer, parts in layers.items()}),
        _sort({name: Difference.of([found[name]]) for name in tensors}),
    )


def _open_model(stack: ExitStack, store: Store, model: str) -> Model:
    if model == "0":
        return "the base", lambda name: None, {}
    if not model.isdecimal():
        base, opened = stack.enter_context(store.manifest.open_base()), open_expert(model)
        stack.callback(opened.close)
        vector = make_task_vector(store.manifest.base, base, opened, partial=True, vocab="base")
        return opened.source, vector.elements, {}
    snapshot = stack.enter_context(store.snapshot(int(model)))
    reading = snapshot.reading(store.engine)
    scale = reading.scale(None, store.engine)

    def elements(name: str) -> Elements | None:
        direction = reading.elements(name)
        return None if direction is None else lambda start, stop: direction(start, stop) * scale

    return f"step {model} ({snapshot.last.name})", elements, reading.memory


def _measure(a: Elements | None, b: Elements | None, numel: int) -> Sums:
    parts = []
    for start, stop in ranges(numel):
        zero = torch.zeros(stop - start, dtype=torch.float64)
        x = a(start, stop).double() if a else zero
        y = b(start, stop).double() if b else zero
        parts.append([float(torch.dot(u, v)) for u, v in ((x, x), (y, y), (x - y, x - y), (x, y))])
    return tuple(map(math.fsum, zip(*parts, strict=True))) if parts else (0.0,) * 4


def _sort(differences: dict[str, Difference]) -> dict[str, Difference]:
    return dict(sorted(differences.items(), key=lambda item: (-item[1].distance, item[0])))
