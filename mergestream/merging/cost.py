"""What a tensor costs, known from its form alone: bytes that are read and written, elements that go by, operations of
linear algebra, and memory. The formulas in words are in docs/scale.md."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mergestream.algebra import pieces
from mergestream.algebra.bounds import FactorBounds
from mergestream.algebra.work import Work, factored, product
from mergestream.ledger.method import Ledger, stack_of
from mergestream.ledger.readouts.base import EntriesReadout, StateReadout
from mergestream.methods.base import Context, Method, Slot

WORKSPACE = 6
"""Copies of a matrix that live at the same time while it is projected."""
_FLOPS_OF_AN_ELEMENT = 200
"""As long as it takes to read, subtract, measure, digest and write one; for the order of the work only"""


@dataclass(frozen=True)
class Cost:
    """Of one tensor, or of many together."""

    reads: int = 0
    """Bytes of base, experts and state; those that are read twice count twice"""
    writes: int = 0
    elements: int = 0
    """That go by, each once for every expert"""
    work: Sequence[Work] = ()

    @property
    def flops(self) -> float:
        """Of the linear algebra"""
        return math.fsum(part.flops for part in self.work)

    @property
    def weight(self) -> int:
        """Which of many tensors take the longest."""
        return int(self.flops) + _FLOPS_OF_AN_ELEMENT * self.elements


def together(costs: Iterable[Cost]) -> Cost:
    parts = list(costs)
    return Cost(
        sum(cost.reads for cost in parts),
        sum(cost.writes for cost in parts),
        sum(cost.elements for cost in parts),
        [work for cost in parts for work in cost.work],
    )


def nbytes(layout: Mapping[str, Slot]) -> int:
    """Of all slots of a tensor."""
    return sum(math.prod(slot.shape) * slot.dtype.itemsize for slot in layout.values())


def absorbing(method: Method, context: Context, stored: int, elements: int) -> Cost:
    """A task vector into a dense state, or an entry; it is made of so many ``stored`` bytes, those of base and expert
    or of an adapter, and so many ``elements`` go by."""
    before = context.t > 1 and not method.remembers_experts
    state = nbytes(method.layout(dataclasses.replace(context, t=context.t - 1))) if before else 0
    ranked = _ranked(method, context.t)
    reads = stored * (1 + ("delta" in ranked)) + state * (1 + len(ranked - {"delta"}))
    return Cost(reads, nbytes(method.layout(context)), elements, method.operations(context))


def absorbing_factors(bounds: FactorBounds, slots: int, stored: int, elements: int) -> Cost:
    """Factors of an adapter, of so many bytes, into a state in factors: cores in float64, new rows in float32."""
    (m, n), (a, b), (left, right) = bounds.shape, bounds.new, bounds.core
    written = slots * 8 * left * right + 4 * (m * a + n * b)
    before = slots * 8 * (left - a) * (right - b) + 4 * (m * (left - a) + n * (right - b))
    return Cost(stored + before, written, elements, factored(bounds))


def carrying(method: Method, contexts: Sequence[Context], base: int, experts: int, written: int) -> Cost:
    """All task vectors through the method at once, without a state: all experts together have so many bytes of the
    tensor."""
    passes = 1 + any("delta" in _ranked(method, context.t) for context in contexts)
    whole = method.is_whole(contexts[-1])
    base_reads = base * ((len(contexts) if whole else 1) * passes + whole)
    elements = len(contexts) * math.prod(contexts[-1].shape)
    work = [part for context in contexts for part in method.operations(context)]
    if isinstance(method, Ledger):
        from mergestream.ledger.readouts.agree import Agree

        kept = method.directions(contexts[-1], len(contexts))
        work += speaking(Agree(), contexts[-1], (kept or 0) * len(contexts))
    return Cost(base_reads + passes * experts, written, elements, work)


def reading_state(readout: StateReadout, context: Context, base: int, state: int, rank: int | None) -> Cost:
    """A state of so many bytes, in factors where its rank is known, beside the base."""
    count, m, n = stack_of(context)
    work = [] if rank is None else [product(m, rank, n)]
    if context.linear:
        sides = (m, n) if rank is None else (rank, rank)
        work += [*readout.linear_operations(*sides)] * (count or 1)
    return Cost(base + state, 0, math.prod(context.shape), work)


def reading_entries(readout: EntriesReadout, context: Context, base: int, entries: int, directions: int) -> Cost:
    """Entries of so many bytes, with so many directions of all experts together, beside the base."""
    return Cost(base + entries, 0, math.prod(context.shape), speaking(readout, context, directions))


def speaking(readout: EntriesReadout, context: Context, directions: int) -> list[Work]:
    """The linear algebra of merging so many directions."""
    count, m, n = stack_of(context)
    outputs, inputs = (n, m) if context.transposed else (m, n)
    coefficients = readout.operations(outputs, inputs, directions) if context.linear else ()
    return [*coefficients, product(m, directions, n)] * (count or 1) if directions else []


def _ranked(method: Method, t: int) -> set[str]:
    ranking = method.ranking(t)
    return set(ranking.names) if ranking else set()


def memory_of(method: Method, context: Context, vectors: int = 1) -> int:
    """Bytes that a tensor takes at its peak: a whole one is held with workspace for its decomposition, else pieces of
    all task vectors are."""
    if method.is_whole(context):
        forms = (context.like, *method.layout(context).values())
        return WORKSPACE * max(math.prod(form.shape) * form.dtype.itemsize for form in forms)
    return streamed_memory(context, vectors)


def streamed_memory(context: Context, vectors: int = 1) -> int:
    """Bytes of a tensor that goes by in pieces."""
    return (WORKSPACE + vectors - 1) * min(pieces.PIECE, math.prod(context.shape)) * context.dtype.itemsize
