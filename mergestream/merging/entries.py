"""Read a merged model out of the entries of a ledger; `read_out` decides between a ledger and an accumulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mergestream.algebra.lowrank import LowRank, Value
from mergestream.algebra.pieces import Elements
from mergestream.base.model import BaseModel
from mergestream.engine import Engine
from mergestream.errors import UsageError
from mergestream.ledger.merge import merge_entries
from mergestream.ledger.method import Ledger, cut_entry
from mergestream.ledger.readouts.base import EntriesReadout
from mergestream.ledger.selection import Selection
from mergestream.ledger.span import ENERGIES, Entry, Span
from mergestream.merging.plan import KeptExpert, streamed_memory
from mergestream.merging.reading import Reading, StateReading
from mergestream.merging.step import overflow_explained
from mergestream.methods.base import Method
from mergestream.methods.scale import NAMED, Scale, parse_scale, scale_value
from mergestream.progress import Progress

if TYPE_CHECKING:
    from mergestream.merging.interference import Interference

ENOUGH = 0.95
"""The share of ‖Δ‖² that the entry of an adapter should hold of every tensor: its rank is small enough to fit"""
LARGEST_BUDGET = 8.0
"""With this budget eight experts are kept whole"""
MAX_NAMED = 3
Measured = TypeVar("Measured")


class TensorEnergy(NamedTuple):
    """The squared norm of one tensor of an entry: what is read, all known singular values, and ‖Δ‖²."""

    held: float
    known: float
    whole: float


@dataclass(frozen=True, kw_only=True)
class EntriesReading(Reading):
    """The entries of the selected experts, and the readout that merges them."""

    method: Ledger
    readout: EntriesReadout
    experts: Sequence[KeptExpert]
    weights: Mapping[str, float]

    @cached_property
    def lengths(self) -> dict[str, list[tuple[int, int]]]:
        """By tensor, for every entry: how many directions it has, and how many its expert wants; without the tensors
        that are kept whole."""
        found = {}
        for name in self.model.merged:
            if self.method.is_cut(context := self.contexts[name]):
                forms = [(expert.files.shapes(name), expert.is_adapter) for expert in self.experts]
                found[name] = [self.method.lengths(context, *form) for form in forms]
        return found

    @cached_property
    def directions(self) -> dict[str, int]:
        """How many directions are read of each entry, at most, by tensor.

        All entries are cut to the same rank: that of the budget, or that of the shortest entry that was cut earlier.
        """
        found = {}
        for name, lengths in self.lengths.items():
            level = self.method.kept_rank(self.contexts[name], self.wanted_ranks[name])
            found[name] = min([level, *(kept for kept, wanted in lengths if kept < wanted)])
        return found

    def is_over(self, times: float) -> bool:
        """Whether the entries of any tensor have more than ``times`` the directions that the budget allows."""
        for name, lengths in self.lengths.items():
            allowed = self.method.budget * self.method.capacity(self.contexts[name])
            if sum(kept for kept, _ in lengths) > times * allowed:
                return True
        return False

    def is_long(self, expert: str) -> bool:
        """Whether the entry of an expert has more directions of any tensor than are read."""
        number = [one.name for one in self.experts].index(expert)
        return any(lengths[number][0] > self.directions[name] for name, lengths in self.lengths.items())

    @cached_property
    def wanted_ranks(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(wanted for _, wanted in lengths) for name, lengths in self.lengths.items()}

    @cached_property
    def linear(self) -> dict[str, int]:
        """The linear weights, with their sizes."""
        return {name: tensor.numel for name, tensor in self.model.tensors.items() if tensor.role == "linear"}

    def entries(self, name: str, *, measured: bool = False) -> list[Entry]:
        """The entries of one tensor, as they are read; with the moments of its inputs if the readout uses them, or if
        the merge is ``measured``."""
        found, context = [], self.contexts[name]
        cut = max(len(self.experts), *(expert.cut for expert in self.experts))
        with_inputs = (measured or self.readout.uses_inputs) and name in self.linear
        for expert in self.experts:
            slots = cut_entry(expert.files.read(name), self.directions.get(name, 0))
            moment = expert.inputs.moment(name) if expert.inputs and with_inputs else None
            if moment and self.method.is_cut(context):
                moment = moment.cut(self.method.share(context, cut))
            found.append(Entry(slots, self.weights[expert.name], moment, expert.is_adapter))
        return found

    def elements(self, name: str) -> Elements | None:
        direction = merge_entries(self.readout, self.entries(name), self.contexts[name], device=self.device)
        if isinstance(direction, LowRank):  # no expert has changed the tensor
            return None
        whole = direction.reshape(-1)
        return lambda start, stop: whole[start:stop]

    def direction(self, name: str) -> Value:
        context = self.contexts[name]
        return merge_entries(self.readout, self.entries(name), context, in_factors=True, device=self.device)

    def rank_bound(self, name: str) -> int | None:
        found, context = [expert.files.shapes(name) for expert in self.experts], self.contexts[name]
        changed, (count, *shape) = [slots for slots in found if slots], context.matrices
        if not changed:
            return 0
        if len(context.shape) < 2 or count or ("delta" in changed[0] and not context.linear):
            return None
        ranks = [min(self.directions[name], *slots["sigma"]) if "sigma" in slots else min(shape) for slots in changed]
        return min(*shape, sum(ranks))

    def is_zero(self, name: str) -> bool:
        return not any(
            bool(entry.slots["delta" if "delta" in entry.slots else "sigma"].any())
            for entry in self.entries(name)
            if entry.slots
        )

    def scale(self, given: str | float | None, engine: Engine) -> float:
        rule: Scale = self.readout.scale if given is None else parse_scale(given)
        if rule in NAMED and not self.readout.additive:
            raise UsageError(
                f"{self.readout.name} does not add up task vectors, so the scale {rule} does not apply; pass a number"
            )
        mean_norm = math.fsum(expert.norm for expert in self.experts) / len(self.experts)
        return scale_value(rule, len(self.experts), mean_norm, lambda: self.norm(engine))

    @cached_property
    def memory(self) -> dict[str, int]:
        """The merged matrix, all directions of both sides twice, and a dozen matrices of coefficients."""
        sizes = {}
        for name, tensor in self.model.tensors.items():
            context = self.contexts[name]
            _, m, n = context.matrices
            together = min(self.directions.get(name, 1) * len(self.experts), 8 * min(m, n))
            elements = 2 * math.prod(context.shape) + 2 * together * (m + n)
            whole = context.dtype.itemsize * elements + 12 * 8 * together**2
            if self.readout.uses_inputs:  # rows in float64, and matrices of the smaller side of all moments
                width = m if context.transposed else n
                whole += 8 * (6 * together * width + 4 * min(2 * together, width) ** 2)
            sizes[name] = whole if tensor.merges else streamed_memory(context)
        return sizes

    def held(self) -> dict[str, dict[str, float]]:
        """The share of ‖Δ‖² that each entry holds as it is read now; 1 where a tensor is kept whole or not changed."""
        return {
            expert: {name: _share([found[name]]) if name in found else 1.0 for name in self.model.merged}
            for expert, found in self.energies.items()
        }

    @cached_property
    def energies(self) -> dict[str, dict[str, TensorEnergy]]:
        """By expert and tensor, without those that are kept whole; reads little more than the singular values."""
        found: dict[str, dict[str, TensorEnergy]] = {}
        for expert in self.experts:
            found[expert.name] = {}
            for name, kept in self.directions.items():
                if slots := cut_entry(expert.files.read(name, ENERGIES)):
                    squares, whole = slots["sigma"].square(), float(slots["norm2"].sum())
                    held, known = float(squares[..., :kept].sum()), float(squares.sum())
                    found[expert.name][name] = TensorEnergy(min(held, whole), min(known, whole), whole)
        return found

    @property
    def least_held(self) -> float:
        """The smallest share of ‖Δ‖² that an entry holds of its expert."""
        return min((_share(energies.values()) for energies in self.energies.values()), default=1.0)

    def shortfall(self, everyone: Reading) -> str | None:
        assert isinstance(everyone, EntriesReading)
        found, is_known = [], True
        for expert in self.experts:
            energies = self.energies[expert.name] if expert.is_adapter else {}
            if short := {name: _share([one]) for name, one in energies.items() if _share([one]) < ENOUGH}:
                worst = min(short, key=short.__getitem__)
                found.append(f"{expert.name} ({short[worst]:.1%} of {worst})")
                is_known &= all(energies[name].known >= ENOUGH * energies[name].whole for name in short)
        if not found:
            return None
        budget = everyone._budget_for_adapters() if is_known else LARGEST_BUDGET  # a rank is not known, or is full
        named = ", ".join(found[:MAX_NAMED]) + (f" and {len(found) - MAX_NAMED} more" if found[MAX_NAMED:] else "")
        remedy = f"a new store made with --set budget={budget:g} avoids that"
        if budget > LARGEST_BUDGET:
            remedy = "divide the experts among several stores, for no budget is large enough"
        return f"the store holds only a part of {named}; {remedy}"

    def _budget_for_adapters(self) -> float:
        """The smallest budget with which no adapter is cut, rounded up to a hundredth."""
        needed = 0.0
        for name, lengths in self.lengths.items():
            pairs = zip(lengths, self.experts, strict=True)
            ranks = [wanted for (_, wanted), expert in pairs if expert.is_adapter]
            others = (len(self.experts) - len(ranks)) * max(ranks, default=0)
            needed = max(needed, (sum(ranks) + others) / self.method.capacity(self.contexts[name]))
        return math.ceil(100 * needed) / 100

    def interference(self, engine: Engine, progress: Progress) -> Interference:
        from mergestream.merging.interference import Interference

        return Interference.of(self, engine, progress)

    def measured(self, engine: Engine, measure: Callable[[Span], Measured]) -> Iterator[tuple[str, list[Measured]]]:
        """Measure each matrix of every linear weight; yields them as they finish."""

        def measure_tensor(name: str) -> list[Measured]:
            context = self.contexts[name]
            with overflow_explained(name):
                spans = Span.of(self.entries(name, measured=True), context.dtype, context.transposed, self.device)
                return [measure(span) for span in spans if len(span.sigma)]

        yield from engine.run(self.linear, measure_tensor, self.memory)

    def matrix_damage(self, span: Span) -> dict[int, float]:
        """The predicted damage in one matrix, by the number of the expert."""
        return span.damage(self.readout.coefficients(span))

    def damage(self, engine: Engine) -> dict[str, float]:
        """The predicted damage of each expert, as the mean over all linear weights, by name.

        An expert that has changed no linear weight is left out.
        """
        found = [damage for _, matrices in self.measured(engine, self.matrix_damage) for damage in matrices]
        return {self.experts[number].name: damage for number, damage in mean_by_key(found).items()}


def _share(energies: Collection[TensorEnergy]) -> float:
    """The share that is held of several tensors."""
    held, whole = math.fsum(energy.held for energy in energies), math.fsum(energy.whole for energy in energies)
    return held / whole if whole else 1.0


def mean_by_key(found: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """The mean of each key over the mappings that have it; the sums are exact, so their order makes no difference."""
    values: dict[int, list[float]] = {}
    for one in found:
        for key, value in one.items():
            values.setdefault(key, []).append(value)
    return {key: math.fsum(known) / len(known) for key, known in values.items()}


def read_out(
    model: BaseModel, method: Method, t: int, kept: Sequence[KeptExpert], selection: Selection, device: str = "cpu"
) -> Reading:
    """The merged model of t experts, as the user has selected it; ``kept`` is what is needed to read it.

    An accumulator keeps one state that has absorbed all experts. A ledger keeps one entry per expert.
    """
    if not isinstance(method, Ledger):
        last, readout = kept[-1], selection.of_state(method)
        return StateReading(
            model=model,
            t=t,
            readout=readout,
            device=device,
            method=method,
            state=last.files,
            mean_norm=last.mean_norm,
            direction_norm=last.direction_norm,
        )
    adapters = [expert.name for expert in kept if expert.is_adapter]
    chosen, weights = selection.of_entries([expert.name for expert in kept], adapters)
    return EntriesReading(
        model=model,
        t=len(weights),
        readout=chosen,
        device=device,
        method=method,
        experts=[expert for expert in kept if expert.name in weights],
        weights=weights,
    )
