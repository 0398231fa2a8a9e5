"""A step as a tracker takes it: flat numbers, and to what they belong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.digest import json_digest
from mergestream.methods.scale import displayed_scale
from mergestream.report.diagnostics import ledger_survival
from mergestream.store.records import cosines_to, read_sketch

if TYPE_CHECKING:
    from mergestream.store import Expert, StoreDirectory
    from mergestream.store.manifest import Manifest

Shares = Mapping[str, float | None]
"""By expert"""


@dataclass(frozen=True)
class TrackedStep:
    """One absorbed expert, and the store that it came to."""

    store: str
    place: str
    """Of the store"""
    run: str
    """The same for all steps of a store"""
    config: dict[str, Any]
    number: int
    expert: str
    added: str
    scalars: dict[str, float]

    @classmethod
    def of(cls, store: StoreDirectory, entry: Expert) -> TrackedStep:
        """With what has to be measured for it: of a ledger a pass over the linear weights of all experts."""
        import torch

        manifest = store.manifest
        place = store.place.address
        number = manifest.names.index(entry.name) + 1
        sketch = torch.from_numpy(read_sketch(store.place, entry))
        cosines = cosines_to(store.place, manifest.history[: number - 1], sketch)
        held, damage = _of_ledger(store) if manifest.is_ledger else ({}, {})
        return cls(
            store=Path(place).name,
            place=place,
            run=json_digest([place, manifest.base.digest]),
            config={"method": manifest.method, **manifest.parameters, "base": manifest.base.source},
            number=number,
            expert=entry.name,
            added=entry.added,
            scalars=scalars(manifest, number, cosines, held, damage),
        )


def _of_ledger(store: StoreDirectory) -> tuple[Shares, Shares]:
    """What the entries hold now, and the predicted damage."""
    with store.snapshot() as snapshot:
        found = ledger_survival(snapshot)
        damage = snapshot.reading(store.engine).damage(store.engine)
        return dict(zip(found.experts, found.total, strict=True)), damage


def scalars(manifest: Manifest, number: int, cosines: Shares, held: Shares, damage: Shares) -> dict[str, float]:
    """The numbers of a step by flat names; what is of an expert or a task ends in its name."""
    entry, before = manifest.history[number - 1], manifest.history[: number - 1]
    mean = before[-1].mean_norm if before else 0.0
    evaluation = entry.evaluation
    found: dict[str, float | None] = {
        "norm": entry.norm,
        "mean_norm": entry.mean_norm,
        "relative_norm": entry.norm / mean if mean else None,
        "kept": entry.kept,
        "seconds": entry.seconds,
        "rank": entry.rank or None,
        "lost": entry.lost or None,
        "max_cosine": _largest(cosines),
        **_by_name("cosine", cosines),
        **_by_name("held", held),
        "damage": _largest(damage),
        **_by_name("damage", damage),
        "score": evaluation["score"] if evaluation else None,
        **_by_name("score", evaluation.get("scores", {}) if evaluation else {}),
    }
    if not manifest.is_ledger:  # whose scale is decided when it is read out
        name, value = displayed_scale(manifest.method, entry.scale)
        found |= {"distance": entry.distance, "scale": entry.scale, "lambda": value if name == "λ" else None}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _by_name(what: str, values: Shares) -> dict[str, float | None]:
    return {f"{what}/{name}": value for name, value in values.items()}


def _largest(values: Shares) -> float | None:
    return max((value for value in values.values() if value is not None), default=None)
