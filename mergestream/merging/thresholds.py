"""The magnitudes that a method asks to be ranked before a step: exact, over all of a model or of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from mergestream.algebra.pieces import Elements, ranges
from mergestream.algebra.selection import Search, Tally, sample_ranges, sample_stride, tally
from mergestream.engine import Engine, LocalEngine
from mergestream.methods.base import Ranking

if TYPE_CHECKING:
    from mergestream.merging.step import Step

Thresholds = Callable[[str], Sequence[Mapping[str, float]]]
"""By the name of a tensor: for every task vector of a step, what its method asked for."""
_Wanted = Sequence[tuple[int, str, Ranking]]
"""Which task vector, ``delta`` or a slot of the state before it, and how many of its entries"""


def find_thresholds(step: Step, engine: Engine) -> Thresholds:
    """What the method asks for; task vectors that are absorbed at once share their passes over the base."""
    rankings = [(number, ranking) for number, t in enumerate(step.counts) if (ranking := step.method.ranking(t))]
    wanted = [(number, which, ranking) for number, ranking in rankings for which in ranking.names]

    def search(engine: Engine, names: Sequence[str]) -> list[dict[str, float]]:
        found: list[dict[str, float]] = [{} for _ in step.vectors]
        values = _search(step, wanted, engine, names) if wanted else ()
        for (number, which, _), value in zip(wanted, values, strict=True):
            found[number][which] = value
        return found

    if any(ranking.over == "tensor" for _, ranking in rankings):
        return lambda name: search(LocalEngine(workers=1), (name,))
    common = search(engine, step.names)
    return lambda name: common


def _search(step: Step, wanted: _Wanted, engine: Engine, names: Sequence[str]) -> list[float]:
    """The magnitude that the largest entries of all these tensors reach, for everything that is wanted."""
    sizes = {name: step.vectors[0].numel(name) for name in names}
    total = sum(sizes.values())

    def elements(name: str) -> list[Elements]:
        base = step.vectors[0].base_elements(name)
        return [_magnitudes(step, number, which, name, base) for number, which, _ in wanted]

    blocks: list[list[Tensor]] = [[] for _ in wanted]
    for name in names:
        ranked = elements(name)
        for start, stop in sample_ranges(sizes[name], sample_stride(total)):
            for sample, part in zip(blocks, ranked, strict=True):
                sample.append(part(start, stop))
    counts = [max(int(ranking.density * total), ranking.fewest) for _, _, ranking in wanted]
    searches = [Search(count, total, sample) for count, sample in zip(counts, blocks, strict=True)]
    while open_ones := [number for number, search in enumerate(searches) if search.found is None]:

        def tallies(name: str, numbers: Sequence[int] = open_ones) -> list[list[Tally]]:
            ranked = elements(name)
            return [
                [tally(ranked[number](start, stop), searches[number].bracket) for number in numbers]
                for start, stop in ranges(sizes[name])
            ]

        pieces = [piece for _, results in engine.run(sizes, tallies) for piece in results]
        for place, number in enumerate(open_ones):
            searches[number].narrow([piece[place] for piece in pieces])
    return [search.found for search in searches if search.found is not None]


def _magnitudes(step: Step, number: int, which: str, name: str, base: Elements) -> Elements:
    """Any range of the magnitudes that are to be ranked."""
    if which == "delta":
        fresh = step.vectors[number].elements(name, base)
    else:
        state = step.read_state(which, name)
        if isinstance(state, Tensor):
            flat = state.reshape(-1)
            return lambda start, stop: flat[start:stop].abs()
        fresh = state.elements()
    return lambda start, stop: fresh(start, stop).abs_()
