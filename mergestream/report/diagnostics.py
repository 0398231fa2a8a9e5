"""How similar the experts are, and how much of each one entered the merged state, or is held by a ledger now."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mergestream.base.names import layer_of, natural
from mergestream.display import matrix_frame
from mergestream.experts.sketch import WIDTH, cosines, error_of
from mergestream.sizes import counted
from mergestream.store.interference import largest_other
from mergestream.store.records import read_sketch, tensor_records

if TYPE_CHECKING:
    from pandas import DataFrame

    from mergestream.store import StoreDirectory
    from mergestream.store.snapshot import Snapshot


MOST_SHOWN = 24
"""Experts in a figure, or in a table with a column for each: more would be neither read nor affordable."""
MOST_TOLD = 5
"""ResultsByTensor of one kind that are told."""


def choose(everyone: Sequence[int], *rankings: Sequence[int]) -> tuple[int, ...]:
    """All, or where they are too many the first of each ranking in turn; in their order."""
    if len(everyone) <= MOST_SHOWN:
        return tuple(everyone)
    in_turn = dict.fromkeys(expert for turn in zip(*rankings, strict=True) for expert in turn)
    return tuple(sorted(list(in_turn)[:MOST_SHOWN]))


def few(sentences: Iterable[str]) -> list[str]:
    """The first of findings of one kind, and how many more there are."""
    found = list(sentences)
    more = len(found) - MOST_TOLD
    return found if more <= 0 else [*found[:MOST_TOLD], f"… and {more} more of these."]


def plain(facts: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are: ``asdict`` would copy every number of a matrix by itself."""
    return {field.name: getattr(facts, field.name) for field in fields(facts)}


@dataclass(frozen=True)
class Similarity:
    """Cosines of the task vectors, estimated from their sketches."""

    experts: tuple[str, ...]
    cosines: tuple[tuple[float | None, ...], ...]
    """None where an expert has no sketch or did not move at all"""
    standard_error: float = error_of(WIDTH)
    """Of a cosine near zero; those of similar experts are better known"""

    def __repr__(self) -> str:
        return f"<Similarity: cosines of {counted(len(self.experts), 'expert')}>"

    def to_frame(self) -> DataFrame:
        """Expert × expert."""
        return matrix_frame(self.experts, self.experts, self.cosines)

    @cached_property
    def nearest(self) -> tuple[tuple[float, int] | None, ...]:
        """Of each expert: the largest cosine to another one, and which that is."""
        return tuple(largest_other(row, own) for own, row in enumerate(self.cosines))

    def pairs(self) -> Iterator[tuple[float, int, int]]:
        """The cosine of every two experts, and their places, the earlier first."""
        for later, row in enumerate(self.cosines):
            for earlier, value in enumerate(row[:later]):
                if value is not None:
                    yield value, earlier, later

    def chosen(self, *rankings: Sequence[int]) -> tuple[int, ...]:
        """The experts that are shown where there are too many: the latest, the closest, the most opposed, and the first
        of other rankings."""
        everyone = range(len(self.experts))
        closest = [found[0] if found else -math.inf for found in self.nearest]
        opposed = [min((value for value in row if value is not None), default=math.inf) for row in self.cosines]
        by_cosine = sorted(everyone, key=lambda i: -closest[i]), sorted(everyone, key=lambda i: opposed[i])
        return choose(everyone, everyone[::-1], *by_cosine, *rankings)

    def of_experts(self, experts: Sequence[int]) -> Similarity:
        """Only those experts."""
        names = tuple(self.experts[i] for i in experts)
        return replace(self, experts=names, cosines=tuple(tuple(self.cosines[i][j] for j in experts) for i in experts))


@dataclass(frozen=True)
class Survival:
    """What became of each expert's task vector, tensor by tensor (or layer by layer)."""

    experts: tuple[str, ...]
    parts: tuple[str, ...]
    """Names of the tensors or layers"""
    norm: tuple[tuple[float, ...], ...]
    """‖Δ‖, expert × part"""
    kept: tuple[tuple[float, ...], ...]
    """The share of ‖Δ‖² that entered the state, or that the entry in a ledger holds now, expert × part"""
    protected: tuple[tuple[float | None, ...], ...]
    """q, expert × part; for a layer the mean over its projected weights; None where nothing is projected"""

    def __repr__(self) -> str:
        return f"<Survival: what was kept of {counted(len(self.experts), 'expert')} in {len(self.parts)} parts>"

    def to_frame(self) -> DataFrame:
        """The share that was kept, expert × part."""
        return matrix_frame(self.experts, self.parts, self.kept)

    @cached_property
    def projected(self) -> tuple[bool, ...]:
        """Which parts are ever projected."""
        return tuple(any(row[i] is not None for row in self.protected) for i in range(len(self.parts)))

    @cached_property
    def together(self) -> tuple[float, ...]:
        """The share of each expert, over all parts."""
        return tuple(share for (share,) in self.grouped({"together": range(len(self.parts))}).kept)

    def of_experts(self, experts: Sequence[int]) -> Survival:
        """Only those experts."""
        return Survival(
            experts=tuple(self.experts[i] for i in experts),
            parts=self.parts,
            norm=tuple(self.norm[i] for i in experts),
            kept=tuple(self.kept[i] for i in experts),
            protected=tuple(self.protected[i] for i in experts),
        )

    def select(self, wanted: Sequence[bool]) -> Survival:
        """Only the parts for which ``wanted`` is true."""

        def chosen(row: Sequence) -> tuple:
            return tuple(value for value, want in zip(row, wanted, strict=True) if want)

        rows = (tuple(map(chosen, matrix)) for matrix in (self.norm, self.kept, self.protected))
        return Survival(self.experts, chosen(self.parts), *rows)

    def by_layer(self) -> Survival:
        """The tensors of a layer taken together."""
        members: dict[str, list[int]] = {}
        for i, name in enumerate(self.parts):
            members.setdefault(layer_of(name), []).append(i)
        return self.grouped(members)

    def grouped(self, members: Mapping[str, Sequence[int]]) -> Survival:
        """Parts by their places taken together: energies added up, q averaged over the projected weights."""
        norm, kept, protected = [], [], []
        for norms, shares, ranks in zip(self.norm, self.kept, self.protected, strict=True):
            energy = [math.fsum(norms[i] ** 2 for i in group) for group in members.values()]
            entered = [math.fsum(shares[i] * norms[i] ** 2 for i in group) for group in members.values()]
            known = [[rank for i in group if (rank := ranks[i]) is not None] for group in members.values()]
            norm.append(tuple(map(math.sqrt, energy)))
            kept.append(tuple(part / whole if whole else 1.0 for part, whole in zip(entered, energy, strict=True)))
            protected.append(tuple(math.fsum(group) / len(group) if group else None for group in known))
        return Survival(self.experts, tuple(members), tuple(norm), tuple(kept), tuple(protected))


def similarity(store: StoreDirectory | Snapshot) -> Similarity:
    """Cosines of the task vectors of a store, or of one of its snapshots."""
    sketches = [read_sketch(store.place, entry) for entry in store.manifest.history]
    width = min(map(len, sketches), default=WIDTH)
    names = tuple(store.manifest.names)
    return Similarity(names, tuple(map(tuple, cosines(sketches))), error_of(width))


def survival(store: StoreDirectory) -> Survival:
    if store.manifest.is_ledger and store.history:
        with store.snapshot() as snapshot:
            return holding(snapshot)
    parts = tuple(sorted(store.manifest.base.merged, key=natural))  # files have layer.10 before layer.2
    records = [tensor_records(store.place, entry, parts) for entry in store.history]
    return Survival(
        experts=tuple(entry.name for entry in store.history),
        parts=parts,
        norm=tuple(tuple(record[name]["norm"] for name in parts) for record in records),
        kept=tuple(tuple(record[name]["kept"] for name in parts) for record in records),
        protected=tuple(tuple(record[name]["protected"] for name in parts) for record in records),
    )


def holding(snapshot: Snapshot) -> Survival:
    """The same of a ledger, in which nothing is projected, and entries are cut as more experts come."""
    held, history = snapshot.held(), snapshot.manifest.history
    parts = tuple(sorted(snapshot.manifest.base.merged, key=natural))
    records = [tensor_records(snapshot.place, entry, parts) for entry in history]
    return Survival(
        experts=tuple(entry.name for entry in history),
        parts=parts,
        norm=tuple(tuple(record[name]["norm"] for name in parts) for record in records),
        kept=tuple(tuple(held[entry.name][name] for name in parts) for entry in history),
        protected=tuple((None,) * len(parts) for _ in history),
    )
