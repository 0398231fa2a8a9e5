"""Similarity of the experts, and how much of each one entered the merged state or is held by a ledger."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mergestream.base.names import layer_of, natural
from mergestream.sizes import counted
from mergestream.store.records import tensor_records

if TYPE_CHECKING:
    from mergestream.merging.interference import Interference
    from mergestream.storage import Storage
    from mergestream.store import Store
    from mergestream.store.manifest import Manifest

HIGH_DAMAGE = 0.3
"""The merged model serves an expert badly above this; eight tasks of the project's suites have 0.08 to 0.24"""


@dataclass(frozen=True)
class Survival:
    """How much of each expert's task vector was kept, tensor by tensor or layer by layer."""

    experts: tuple[str, ...]
    parts: tuple[str, ...]
    """Names of the tensors or layers"""
    norm: tuple[tuple[float, ...], ...]
    """‖Δ‖, expert × part"""
    kept: tuple[tuple[float, ...], ...]
    """The share of ‖Δ‖² that entered the state, or that the entry in a ledger holds now, expert × part"""
    protected: tuple[tuple[float | None, ...], ...]
    """q, expert × part; the mean over the projected weights of a layer; None where nothing is projected"""

    def __repr__(self) -> str:
        return f"<Survival: the share kept of {counted(len(self.experts), 'expert')} in {len(self.parts)} parts>"

    @cached_property
    def total(self) -> tuple[float, ...]:
        """The share of each expert, over all parts."""
        return tuple(share for (share,) in self._group({"total": range(len(self.parts))}).kept)

    def by_layer(self) -> Survival:
        """The tensors of each layer taken together."""
        members: dict[str, list[int]] = {}
        for i, name in enumerate(self.parts):
            members.setdefault(layer_of(name), []).append(i)
        return self._group(members)

    def _group(self, members: Mapping[str, Sequence[int]]) -> Survival:
        """Groups of parts, by position: energies are added up, q is averaged over the projected weights."""
        norm, kept, protected = [], [], []
        for norms, shares, ranks in zip(self.norm, self.kept, self.protected, strict=True):
            energy = [math.fsum(norms[i] ** 2 for i in group) for group in members.values()]
            entered = [math.fsum(shares[i] * norms[i] ** 2 for i in group) for group in members.values()]
            known = [[rank for i in group if (rank := ranks[i]) is not None] for group in members.values()]
            norm.append(tuple(map(math.sqrt, energy)))
            kept.append(tuple(part / whole if whole else 1.0 for part, whole in zip(entered, energy, strict=True)))
            protected.append(tuple(math.fsum(group) / len(group) if group else None for group in known))
        return Survival(self.experts, tuple(members), tuple(norm), tuple(kept), tuple(protected))


def similarity(store: Store) -> Interference:
    """Cosines of the task vectors in a ledger, and what else the experts do to each other."""
    store.manifest.require_ledger("knows the cosines of its experts")
    with store.snapshot() as snapshot:
        found = snapshot.reading(store.engine).interference(store.engine, store.progress)
    assert found is not None
    return found


def survival(store: Store) -> Survival:
    """The share of each expert that entered the state of a store, or that a ledger holds now."""
    if not store.manifest.entries:
        return read_survival(store.storage, store.manifest)
    with store.snapshot() as snapshot:
        return read_survival(snapshot.storage, snapshot.manifest, snapshot.reading().held())


def read_survival(
    place: Storage, manifest: Manifest, held: Mapping[str, Mapping[str, float]] | None = None
) -> Survival:
    """The shares when the experts were added, or those that a ledger holds now."""
    parts = tuple(sorted(manifest.base.merged, key=natural))  # files have layer.10 before layer.2
    records = {entry.name: tensor_records(place, entry, parts) for entry in manifest.history}
    return Survival(
        experts=tuple(records),
        parts=parts,
        norm=tuple(tuple(record[part]["norm"] for part in parts) for record in records.values()),
        kept=tuple(
            tuple(held[name][part] if held else record[part]["kept"] for part in parts)
            for name, record in records.items()
        ),
        protected=tuple(tuple(record[part]["protected"] for part in parts) for record in records.values()),
    )
