"""Compare two models of a store: steps that it keeps, its base, or any checkpoint of the same base."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mergestream.algebra.pieces import Elements, ranges
from mergestream.base.names import layer_of
from mergestream.experts import make_task_vector, open_expert

if TYPE_CHECKING:
    from mergestream.store import StoreDirectory


@dataclass(frozen=True)
class Difference:
    """Two models, or two tensors of them, seen from the base."""

    norm_a: float
    """‖A − θ⁰‖"""
    norm_b: float
    distance: float
    """‖A − B‖"""
    cosine: float | None
    """Of A − θ⁰ and B − θ⁰; None where one of them is zero"""


@dataclass(frozen=True)
class Comparison:
    """A and B in all, by layer and by tensor; what differs most comes first."""

    a: str
    b: str
    total: Difference
    layers: Mapping[str, Difference]
    tensors: Mapping[str, Difference]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Sums(NamedTuple):
    """‖A − θ⁰‖², ‖B − θ⁰‖², ‖A − B‖² and ⟨A − θ⁰, B − θ⁰⟩."""

    a2: float
    b2: float
    distance2: float
    product: float

    @classmethod
    def total(cls, parts: list[Sums]) -> Sums:
        return cls(*(math.fsum(column) for column in zip(*parts, strict=True))) if parts else cls(0, 0, 0, 0)

    def difference(self) -> Difference:
        norms = math.sqrt(self.a2) * math.sqrt(self.b2)
        cosine = max(-1.0, min(1.0, self.product / norms)) if norms else None
        return Difference(math.sqrt(self.a2), math.sqrt(self.b2), math.sqrt(self.distance2), cosine)


@dataclass(frozen=True)
class Model:
    """One side of a comparison."""

    label: str
    elements: Callable[[str], Elements | None]
    """By the name of a tensor: its difference from the base; None where that is zero"""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes that a tensor takes at its peak, where it is not streamed"""


def compare(store: StoreDirectory, a: str, b: str) -> Comparison:
    """Compare two models, each the number of a step (0 for the base) or a checkpoint."""
    model = store.manifest.base
    tensors = {name: model.tensors[name].numel for name in model.merged}
    with ExitStack() as stack:
        left, right = (_open(stack, store, which) for which in (a, b))
        memory = {name: left.memory.get(name, 0) + right.memory.get(name, 0) for name in tensors}
        found: dict[str, Sums] = {}
        with store.progress.task("comparing", sum(tensors.values()) * 4) as advance:
            for name, sums in store.engine.run(
                tensors, lambda name: _sums(left.elements(name), right.elements(name), tensors[name]), memory
            ):
                found[name] = sums
                advance(tensors[name] * 4)
    layers: dict[str, list[Sums]] = {}
    for name in tensors:
        layers.setdefault(layer_of(name), []).append(found[name])
    return Comparison(
        left.label,
        right.label,
        Sums.total(list(found.values())).difference(),
        _most_first({layer: Sums.total(parts).difference() for layer, parts in layers.items()}),
        _most_first({name: found[name].difference() for name in tensors}),
    )


def _open(stack: ExitStack, store: StoreDirectory, which: str) -> Model:
    if which.isdecimal():
        return _open_step(stack, store, int(which))
    base = stack.enter_context(store.open_base())
    opened = open_expert(which)
    stack.callback(opened.close)
    vector = make_task_vector(store.manifest.base, base, opened, partial=True, vocab="base")
    return Model(opened.source, vector.elements)


def _open_step(stack: ExitStack, store: StoreDirectory, number: int) -> Model:
    if number == 0:
        return Model("the base", lambda name: None)
    snapshot = stack.enter_context(store.snapshot(number))
    reading = snapshot.reading(store.engine)
    scale = reading.scale(None, store.engine)

    def elements(name: str) -> Elements | None:
        direction = reading.elements(name)
        return None if direction is None else lambda start, stop: direction(start, stop) * scale

    return Model(f"step {number} ({snapshot.last.name})", elements, reading.memory)


def _sums(a: Elements | None, b: Elements | None, numel: int) -> Sums:
    parts = []
    for start, stop in ranges(numel):
        zero = torch.zeros(stop - start, dtype=torch.float64)
        x = a(start, stop).double() if a else zero
        y = b(start, stop).double() if b else zero
        parts.append(Sums(*(float(torch.dot(u, v)) for u, v in ((x, x), (y, y), (x - y, x - y), (x, y)))))
    return Sums.total(parts)


def _most_first(differences: dict[str, Difference]) -> dict[str, Difference]:
    return dict(sorted(differences.items(), key=lambda item: (-item[1].distance, item[0])))
