"""Thresholds: the exact magnitudes that a method asks for before a step, over the whole model or one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from mergestream.algebra.pieces import Elements, ranges
from mergestream.algebra.selection import Search, Tally, sample_ranges, sample_stride, tally
from mergestream.engine import Engine, LocalEngine
from mergestream.experts.vector import TaskVector
from mergestream.merging.plan import StepFiles
from mergestream.methods.base import Method, Ranking

Thresholds = Callable[[str], Sequence[Mapping[str, float]]]
"""From a tensor's name to the thresholds of every task vector"""


def find_thresholds(
    method: Method, vectors: Sequence[TaskVector], counts: Sequence[int], state: StepFiles | None, engine: Engine
) -> Thresholds:
    """Search what the method asks for; task vectors that are absorbed at once share their passes over the base.

    ``counts`` is t of each task vector, ``state`` the state before the first.
    """
    rankings = [(number, ranking) for number, t in enumerate(counts) if (ranking := method.ranking(t))]
    wanted = [_Wanted(number, which, ranking) for number, ranking in rankings for which in ranking.names]

    def search(engine: Engine, names: Sequence[str]) -> list[dict[str, float]]:
        found: list[dict[str, float]] = [{} for _ in vectors]
        values = _search(vectors, state, wanted, engine, names) if wanted else ()
        for want, value in zip(wanted, values, strict=True):
            found[want.vector][want.which] = value
        return found

    if any(ranking.over == "tensor" for _, ranking in rankings):
        return lambda name: search(LocalEngine(workers=1), (name,))
    common = search(engine, vectors[0].names)
    return lambda name: common


@dataclass(frozen=True)
class _Wanted:
    """A threshold that the method asks for."""

    vector: int
    which: str
    """``delta``, or a slot of the state before it"""
    ranking: Ranking


def _search(
    vectors: Sequence[TaskVector],
    state: StepFiles | None,
    wanted: Sequence[_Wanted],
    engine: Engine,
    names: Sequence[str],
) -> list[float]:
    """The magnitude that the largest entries of all these tensors reach, for everything that is wanted."""
    sizes = {name: vectors[0].model.tensors[name].numel for name in names}
    total = sum(sizes.values())

    def magnitudes(name: str) -> list[Elements]:
        base = vectors[0].base_elements(name)
        return [_magnitudes(vectors[want.vector], state, want.which, name, base) for want in wanted]

    blocks: list[list[Tensor]] = [[] for _ in wanted]
    for name in names:
        ranked = magnitudes(name)
        for start, stop in sample_ranges(sizes[name], sample_stride(total)):
            for sample, part in zip(blocks, ranked, strict=True):
                sample.append(part(start, stop))
    counts = [max(int(want.ranking.density * total), want.ranking.fewest) for want in wanted]
    searches = [Search(count, total, sample) for count, sample in zip(counts, blocks, strict=True)]
    while unfinished := [number for number, search in enumerate(searches) if search.found is None]:

        def tallies(name: str, numbers: Sequence[int] = unfinished) -> list[list[Tally]]:
            ranked = magnitudes(name)
            return [
                [tally(ranked[number](start, stop), searches[number].bracket) for number in numbers]
                for start, stop in ranges(sizes[name])
            ]

        pieces = [piece for _, results in engine.run(sizes, tallies) for piece in results]
        for place, number in enumerate(unfinished):
            searches[number].narrow([piece[place] for piece in pieces])
    return [search.found for search in searches if search.found is not None]


def _magnitudes(vector: TaskVector, state: StepFiles | None, which: str, name: str, base: Elements) -> Elements:
    """Any range of the magnitudes that are ranked."""
    if which == "delta":
        fresh = vector.elements(name, base)
        return lambda start, stop: fresh(start, stop).abs_()
    assert state is not None, "there is no state before the first expert"
    value = state.read(name, [which])[which]
    if isinstance(value, Tensor):
        flat = value.reshape(-1)
        return lambda start, stop: flat[start:stop].abs()
    multiplied = value.elements()
    return lambda start, stop: multiplied(start, stop).abs_()
