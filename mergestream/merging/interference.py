"""Interference: what the experts of a ledger do to each other when they are merged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mergestream.base.names import layer_of, natural
from mergestream.engine import Engine
from mergestream.ledger.span import Span
from mergestream.merging.entries import EntriesReading, mean_by_key
from mergestream.merging.step import overflow_explained
from mergestream.progress import Progress

Row = tuple[float | None, ...]
Matrix = tuple[Row, ...]


class MatrixInterference(NamedTuple):
    """What experts do to each other in one matrix, by their numbers."""

    damage: Mapping[int, float]
    overlap: Tensor
    inner: Tensor
    """⟨Δ_i, Δ_j⟩"""


@dataclass(frozen=True)
class Interference:
    """What experts do to each other in the linear weights, as means over the matrices of a layer, and of the model.

    A value is None where there is nothing to measure: for an expert that has changed no linear weight, and for two
    experts that have changed none in common. The cosines are of whole task vectors.
    """

    experts: tuple[str, ...]
    layers: tuple[str, ...]
    """The layers that have linear weights"""
    damage: Row
    """By expert: ‖(M − Δ_i)|Δ_i|‖² / ‖|Δ_i|²‖², how far the merged M is from the expert on the expert's inputs"""
    layer_damage: Matrix
    """Expert × layer"""
    cosines: Matrix
    """Expert × expert: ⟨Δ_i, Δ_j⟩ / (‖Δ_i‖·‖Δ_j‖) of all tensors, with the product of what the entries hold"""
    overlap: Matrix
    """Expert × expert: the cosine of Δ_iᵀΔ_i and Δ_jᵀΔ_j, how much two experts respond to the same inputs"""
    layer_overlap: tuple[np.ndarray, ...] = field(compare=False, repr=False)
    """The same by layer; NaN for None: hundreds of experts have millions of pairs"""

    @classmethod
    def of(cls, reading: EntriesReading, engine: Engine, progress: Progress) -> Interference:
        """Measure the experts of a reading, merged by its readout, in one pass over the entries."""
        count, sizes = len(reading.experts), {name: reading.model.tensors[name].numel for name in reading.model.merged}

        def measure(span: Span) -> MatrixInterference:
            return MatrixInterference(reading.matrix_damage(span), span.overlap(count), span.inner_products(count))

        found: dict[str, list[MatrixInterference]] = {}
        inner: dict[str, Tensor] = {}
        with progress.task("comparing the experts", 4 * sum(sizes.values())) as advance:
            for name, matrices in reading.measured(engine, measure):
                found[name] = matrices
                inner[name] = sum((matrix.inner for matrix in matrices), torch.zeros(()))
                advance(4 * sizes[name])
            others = {name: size for name, size in sizes.items() if name not in reading.linear}
            for name, product in engine.run(others, partial(_inner_products, reading), reading.memory):
                inner[name] = product
                advance(4 * sizes[name])
        layers: dict[str, list[MatrixInterference]] = {}
        for name in reading.linear:  # not in the order in which they finished: sums depend on it
            layers.setdefault(layer_of(name), []).extend(found[name])
        names = sorted(layers, key=natural)
        by_layer = [_damage(layers[name], count) for name in names]
        together = [matrix for matrices in layers.values() for matrix in matrices]
        return cls(
            experts=tuple(expert.name for expert in reading.experts),
            layers=tuple(names),
            damage=_damage(together, count),
            layer_damage=tuple(tuple(row[expert] for row in by_layer) for expert in range(count)),
            cosines=_cosines(sum((inner[name] for name in sizes), torch.zeros(count, count)), reading),
            overlap=_with_none(_mean((matrix.overlap for matrix in together), count)),
            layer_overlap=tuple(_mean((matrix.overlap for matrix in layers[name]), count) for name in names),
        )

    def of_pair(self, one: int, other: int) -> dict[str, float]:
        """The overlap of two experts by layer, the largest first."""
        by_layer = {
            layer: float(matrix[one, other]) for layer, matrix in zip(self.layers, self.layer_overlap, strict=True)
        }
        known = (item for item in by_layer.items() if not math.isnan(item[1]))
        return dict(sorted(known, key=lambda item: -item[1]))


def _inner_products(reading: EntriesReading, name: str) -> Tensor:
    """⟨Δ_i, Δ_j⟩ of every two experts in a tensor that is no linear weight."""
    count, context = len(reading.experts), reading.contexts[name]
    entries = reading.entries(name)
    whole = {number: entry.slots["delta"] for number, entry in enumerate(entries) if "delta" in entry.slots}
    inner = torch.zeros(count, count, dtype=torch.float64)
    with overflow_explained(name):
        if not whole:
            spans = Span.of(entries, context.dtype, context.transposed, reading.device)
            return sum((span.inner_products(count) for span in spans), inner)
        rows = torch.stack([delta.reshape(-1).double() for delta in whole.values()])
        inner[np.ix_(list(whole), list(whole))] = rows @ rows.T
        return inner


def _cosines(inner: Tensor, reading: EntriesReading) -> Matrix:
    """The inner products over the full norms; None where an expert has changed nothing."""
    norms = torch.tensor([expert.norm for expert in reading.experts], dtype=torch.float64)
    values = ((inner + inner.T) / (2 * torch.outer(norms, norms))).clamp(-1, 1)
    values.diagonal()[norms > 0] = 1.0  # also where the entry does not hold all of it
    return _with_none(values.numpy())


def _mean(found: Iterable[Tensor], count: int) -> np.ndarray:
    """Expert × expert: the mean over the matrices that both experts have changed."""
    total, known = np.zeros((count, count)), np.zeros((count, count))
    for one in found:
        values = one.double().numpy()
        total += np.nan_to_num(values)
        known += ~np.isnan(values)
    return np.divide(total, known, out=np.full_like(total, np.nan), where=known > 0)


def _with_none(values: np.ndarray) -> Matrix:
    return tuple(tuple(None if value != value else value for value in row) for row in values.tolist())


def pairs_of(matrix: Matrix) -> Iterator[tuple[float, int, int]]:
    """The known value of every two experts in a symmetric matrix, and their positions, the earlier first."""
    for later, row in enumerate(matrix):
        for earlier, value in enumerate(row[:later]):
            if value is not None:
                yield value, earlier, later


def largest_other(row: Sequence[float | None], own: int) -> tuple[float, int] | None:
    """The largest value of a row and its place, without the row's own place."""
    return max(((value, i) for i, value in enumerate(row) if value is not None and i != own), default=None)


def _damage(matrices: Iterable[MatrixInterference], count: int) -> Row:
    known = mean_by_key([matrix.damage for matrix in matrices])
    return tuple(known.get(expert) for expert in range(count))
