"""A one-shot merge: each tensor of all experts is merged in one pass, and no state is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from mergestream.algebra.lowrank import Value
from mergestream.algebra.pieces import SquaredNorm, ranges
from mergestream.base.model import BaseModel, BaseTensor
from mergestream.checkpoints import Checkpoint
from mergestream.digest import tensor_digest
from mergestream.engine import Engine, ResultsByTensor
from mergestream.experts.vector import BasePieces, TaskVector
from mergestream.merging.plan import peak_memory, tensor_contexts, with_base
from mergestream.merging.reading import cast, moved_by
from mergestream.merging.step import Outcome, Totals, overflow_explained, total
from mergestream.merging.thresholds import Thresholds, find_thresholds
from mergestream.methods.base import Context, Method
from mergestream.methods.scale import scale_value


@dataclass(frozen=True)
class OnePassMerge:
    """The merged model of some experts; every file is read once."""

    method: Method
    vectors: Mapping[str, TaskVector]
    """By the name of the expert, in their order; they share the base"""
    thresholds: Thresholds
    device: str = "cpu"
    kept2: ResultsByTensor[list[float | None]] = field(default_factory=ResultsByTensor)
    """‖kept‖² of each expert by tensor; None where all of Δ is kept"""
    norm2: ResultsByTensor[float] = field(default_factory=ResultsByTensor)
    """‖direction‖² by tensor"""
    base_digests: ResultsByTensor[str] = field(default_factory=ResultsByTensor)
    task: ClassVar[None] = None
    reading: ClassVar[None] = None

    @classmethod
    def of(cls, method: Method, vectors: Mapping[str, TaskVector], engine: Engine) -> OnePassMerge:
        """Find the magnitudes that the method asks for, in a pass of its own; the merge itself begins with `pieces`."""
        counts = range(1, len(vectors) + 1)
        return cls(
            method, vectors, find_thresholds(method, list(vectors.values()), counts, None, engine), engine.device
        )

    @cached_property
    def _first(self) -> TaskVector:
        return next(iter(self.vectors.values()))

    @property
    def model(self) -> BaseModel:
        return self._first.model

    @property
    def base(self) -> Checkpoint:
        return self._first.base

    @cached_property
    def names(self) -> dict[str, str]:
        """Every tensor that is written, by its name in the base."""
        return {name: name for name in self.model.tensors}

    @property
    def layout(self) -> Mapping[str, BaseTensor]:
        return self.model.tensors

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes that each merged tensor takes at its peak."""
        copies = self.base.copies + sum(vector.expert.copies for vector in self.vectors.values())
        found = {}
        for name in self.model.merged:
            context = self._contexts[-1][name]
            found[name] = peak_memory(self.method, context, len(self.vectors))
            found[name] += copies * math.prod(context.shape) * context.dtype.itemsize
        return found

    @cached_property
    def scale(self) -> float:
        """The method's scale, which depends on no norm: see `is_possible`."""
        return scale_value(self.method.scale_rule, len(self.vectors), math.nan, lambda: math.nan)

    @cached_property
    def _contexts(self) -> list[dict[str, Context]]:
        """The context of every tensor, for each task vector."""
        found = []
        for t, (expert, vector) in enumerate(self.vectors.items(), 1):
            contexts = tensor_contexts(vector.model, t, expert)
            if self.method.keeps_entries:
                contexts = {name: replace(contexts[name], rank=vector.rank(name)) for name in vector.names}
            found.append(contexts)
        return found

    def pieces(self, name: str, dtype: str) -> Iterator[tuple[int, Tensor]]:
        """Consecutive pieces of a tensor, each with its first element, rounded once to ``dtype``."""
        name = self.model.tensors[name].tied_to or name
        if not self.model.tensors[name].merges:
            tensor = self.base.read(name)
            self.base_digests[name] = tensor_digest(tensor)
            yield 0, cast(tensor.reshape(-1), dtype, name)
            return
        base, norm = self._first.base_pieces(name), SquaredNorm()
        kept: list[list[float | None]] = []
        with overflow_explained(name):
            for start, direction in self._directions(name, base, kept):
                norm.add(direction)
                merged = moved_by(base.at(start, start + direction.numel()), direction, self.scale)
                yield start, cast(merged, dtype, name)
        self.base_digests[name], self.norm2[name] = base.digest(), norm.total()
        found = [[part for part in parts if part is not None] for parts in zip(*kept, strict=True)]
        self.kept2[name] = [math.fsum(parts) if parts else None for parts in found] or [None] * len(self.vectors)

    def _directions(self, name: str, base: BasePieces, kept: list[list[float | None]]) -> Iterator[tuple[int, Tensor]]:
        """Consecutive elements of the direction after the last expert; ‖kept‖² of every expert is added to ``kept``.

        Pieces of all experts are read side by side and share those of the ``base``; of whole tensors only one is held
        at a time.
        """
        vectors, thresholds = self.vectors.values(), self.thresholds(name)
        contexts = [replace(of[name], thresholds=found) for of, found in zip(self._contexts, thresholds, strict=True)]
        if self.method.is_whole(contexts[0]):
            if self.method.needs_base:
                contexts = [with_base(context, self._first, self.device) for context in contexts]
            deltas = (self._whole(vector, context) for vector, context in zip(vectors, contexts, strict=True))
            kept2, direction = self.method.absorb_whole(deltas, contexts, self.device)
            kept.append(kept2)
            flat = direction.cpu().reshape(-1)
            for start, stop in ranges(flat.numel()):
                yield start, flat[start:stop]
            return
        for pieces in zip(*(vector.pieces(name, base) for vector in vectors), strict=True):
            start = pieces[0][0]
            places = [replace(context, start=start) for context in contexts]
            kept2, direction = self.method.absorb_all([delta.to(self.device) for _, delta in pieces], places)
            kept.append(kept2)
            yield start, direction.cpu()

    def _whole(self, vector: TaskVector, context: Context) -> Value:
        """Δ in one piece, or in factors where the method takes them."""
        if context.rank is not None:
            return vector.factors(context.tensor)
        return vector.whole(context.tensor).to(self.device)

    def totals(self) -> list[Totals]:
        """The scalars of the model after each expert, after all tensors were read."""
        found: list[Totals] = []
        for number, vector in enumerate(self.vectors.values()):
            outcomes = []
            for name in self.model.merged:
                norm2, kept2 = vector.norm2[name], self.kept2[name][number]
                with overflow_explained(name):
                    outcomes.append(Outcome(norm2, norm2 if kept2 is None else kept2, None, None))
            found.append(total(self.method, number + 1, found[-1].mean_norm if found else 0.0, outcomes))
        return found


def is_possible(method: Method, count: int) -> bool:
    """Whether each tensor can be merged without the others, for this number of experts; else a store is needed."""
    rankings = [ranking for t in range(1, count + 1) if (ranking := method.ranking(t))]
    return method.scale_rule != "adaptive" and all(ranking.names == ("delta",) for ranking in rankings)
