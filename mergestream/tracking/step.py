"""The numbers of one step, as a tracker takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.digest import json_digest

if TYPE_CHECKING:
    from mergestream import Expert, Store

Values = Mapping[str, float | None]
"""Numbers by the name of an expert or a task"""


@dataclass(frozen=True)
class TrackedStep:
    """One absorbed expert, and its store."""

    store: str
    place: str
    """The path or address of the store"""
    run: str
    """The same for all steps of a store"""
    config: dict[str, Any]
    number: int
    expert: str
    added: str
    scalars: dict[str, float]
    """Numbers by flat names; the name of an expert or a task comes last"""

    @classmethod
    def of(cls, store: Store, entry: Expert) -> TrackedStep:
        """Collect the numbers of a step; in a ledger, damage takes a pass over the linear weights of all experts."""
        manifest = store.manifest
        place = store.storage.address
        return cls(
            store=Path(place).name,
            place=place,
            run=json_digest([place, manifest.base.digest]),
            config={"method": manifest.method, **manifest.parameters, "base": manifest.base.source},
            number=manifest.names.index(entry.name) + 1,
            expert=entry.name,
            added=entry.added,
            scalars=_scalars(store, entry),
        )


def _scalars(store: Store, entry: Expert) -> dict[str, float]:
    names = store.manifest.names
    position = names.index(entry.name)
    before = store.manifest.history[position - 1].mean_norm if position else 0.0
    found: dict[str, float | None] = {
        "norm": entry.norm,
        "mean_norm": entry.mean_norm,
        "relative_norm": entry.norm / before if before else None,
        "kept": entry.kept,
        "seconds": entry.seconds,
        "rank": entry.rank or None,
        "lost": entry.lost or None,
        **_with_largest("cosine", dict(zip(names[:position], store.similarity().cosines[position], strict=False))),
    }
    found["max_cosine"] = found.pop("cosine")
    if entry.cut:  # in a ledger, the readout decides the scale
        survival = store.survival()
        held = dict(zip(survival.experts, survival.total, strict=True))
        found |= {f"held/{name}": share for name, share in held.items()} | _with_largest("damage", store.damage())
    else:
        is_opcm = store.manifest.method == "opcm"
        found |= {"distance": entry.distance, "scale": entry.scale, "lambda": entry.lambda_ if is_opcm else None}
    if entry.evaluation:
        scores = entry.evaluation.get("scores", {})
        found |= {"score": entry.score, **{f"score/{task}": value for task, value in scores.items()}}
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def _with_largest(quantity: str, values: Values) -> dict[str, float | None]:
    """``damage/NAME`` for each name, and ``damage`` for the largest."""
    largest = max((value for value in values.values() if value is not None), default=None)
    return {quantity: largest, **{f"{quantity}/{name}": value for name, value in values.items()}}
