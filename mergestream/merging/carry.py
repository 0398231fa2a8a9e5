"""A one-shot merge: every tensor is carried through all task vectors at once, without a state before or after."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from mergestream.algebra.lowrank import Value
from mergestream.algebra.pieces import ranges
from mergestream.experts.vector import BasePieces, TaskVector
from mergestream.merging.plan import peak_memory, tensor_contexts, with_base
from mergestream.methods.base import Context, Method


@dataclass(frozen=True)
class Carry:
    """All task vectors of a one-shot merge, in their order."""

    method: Method
    vectors: Sequence[TaskVector]
    experts: Sequence[str]
    """Their names"""
    device: str = "cpu"

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that are merged."""
        return self.vectors[0].names

    @property
    def counts(self) -> range:
        """t of each task vector."""
        return range(1, len(self.vectors) + 1)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that each tensor takes at its peak."""
        copies = self.vectors[0].base.copies + sum(vector.expert.copies for vector in self.vectors)
        found = {}
        for name in self.names:
            context = self._contexts[-1][name]
            found[name] = peak_memory(self.method, context, len(self.vectors))
            found[name] += copies * math.prod(context.shape) * context.dtype.itemsize
        return found

    def directions(
        self, name: str, thresholds: Sequence[Mapping[str, float]], base: BasePieces
    ) -> Iterator[tuple[int, Tensor, list[float | None]]]:
        """Consecutive elements of the direction at the end, each with what they add to ‖kept‖² of every task vector
        (None where all is kept).

        Pieces go side by side and share those of the ``base``; of whole tensors only one is held at a time.
        """
        contexts = [replace(of[name], thresholds=found) for of, found in zip(self._contexts, thresholds, strict=True)]
        if self.method.is_whole(contexts[0]):
            if self.method.needs_base:
                contexts = [with_base(context, self.vectors[0], self.device) for context in contexts]
            arriving = (self._whole(name, number, context) for number, context in enumerate(contexts))
            yield from _in_pieces(*self.method.carry(arriving, contexts, self.device))
            return
        for pieces in zip(*(vector.pieces(name, base) for vector in self.vectors), strict=True):
            start = pieces[0][0]
            places = [replace(context, start=start) for context in contexts]
            kept2, direction = self.method.absorb_all([delta.to(self.device) for _, delta in pieces], places)
            yield start, direction.cpu(), kept2

    @cached_property
    def _contexts(self) -> list[dict[str, Context]]:
        """The context of every tensor, for each task vector."""
        found = []
        for t, vector, expert in zip(self.counts, self.vectors, self.experts, strict=True):
            contexts = tensor_contexts(vector.model, t, expert)
            if self.method.keeps_entries:
                contexts = {name: replace(contexts[name], rank=vector.rank(name)) for name in vector.names}
            found.append(contexts)
        return found

    def _whole(self, name: str, number: int, context: Context) -> Value:
        """Δ in one piece, or in factors where the method takes them."""
        if context.rank is not None:
            return self.vectors[number].factors(name)
        return self.vectors[number].whole(name).to(self.device)


def _in_pieces(kept2: list[float | None], direction: Tensor) -> Iterator[tuple[int, Tensor, list[float | None]]]:
    """A whole direction in pieces; the first one carries what the tensor adds to ‖kept‖²."""
    flat = direction.cpu().reshape(-1)
    for start, stop in ranges(flat.numel()):
        yield start, flat[start:stop], kept2
        kept2 = [None if part is None else 0.0 for part in kept2]


def can_carry(method: Method, count: int) -> bool:
    """Whether one tensor can be merged without the others: then a one-shot merge of so many experts needs no store."""
    rankings = [ranking for t in range(1, count + 1) if (ranking := method.ranking(t))]
    return method.scale_rule != "adaptive" and all(ranking.names == ("delta",) for ranking in rankings)
