"""What adding a model would do, as facts that a person or a pipeline can decide on."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergestream.base.names import layer_of
from mergestream.merging.prediction import Estimate
from mergestream.methods.scale import inverse
from mergestream.store.records import cosines_to

if TYPE_CHECKING:
    from mergestream.store.arrival import Arrival
    from mergestream.store.interference import Interference


@dataclass(frozen=True)
class TensorInspection:
    """One tensor: its role, what would happen to it, how much it moved and what would survive."""

    role: str
    fate: str
    norm: float
    relative_norm: float
    """‖Δ‖ / ‖θ⁰‖ of this tensor"""
    kept: float
    protected: int | None

    @classmethod
    def of(cls, arrival: Arrival, name: str) -> TensorInspection:
        tensor, outcome = arrival.vector.model.tensors[name], arrival.outcomes[name]
        norm = math.sqrt(outcome.norm2)
        relative = norm / tensor.norm if tensor.norm else 0.0
        return cls(tensor.role, arrival.vector.actions[name], norm, relative, outcome.kept, outcome.protected)


@dataclass(frozen=True)
class Inspection:
    """The outcome of a step that was not taken."""

    source: str
    method: str
    step: int
    """The step it would be"""
    duplicate_of: str | None
    norm: float
    relative_norm: float
    """‖Δ‖ over the mean norm of the experts so far"""
    cosines: Mapping[str, float | None]
    """The cosine to each expert so far, from their sketches; None where one did not move at all"""
    kept: float
    """The share of ‖Δ‖² that would enter the state, or that its entry in a ledger would hold"""
    scale: float | None
    """None for a ledger, as the distance: both depend on how it is read out"""
    distance: float | None
    fates: Mapping[str, int]
    seconds: float
    """Measured, absorbing it, and predicted, writing the state"""
    predicted: Estimate
    """All of it from what was known before, by rates that were measured then"""
    memory: int
    """Bytes of RAM for tensors at the peak, with the engine's number of workers"""
    disk: int
    """Bytes that the new step takes"""
    tensors: Mapping[str, TensorInspection]
    notes: Sequence[str]
    interference: Interference | None = None
    """Of a ledger, after adding it: the last of the experts is the new one"""

    def __repr__(self) -> str:
        kept = "held" if self.interference else "kept"
        return f"<Inspection of {self.source!r}: step {self.step}, ‖Δ‖ {self.norm:.4g}, {kept} {self.kept:.1%}>"

    @classmethod
    def of(
        cls, arrival: Arrival, predicted: Estimate, seconds: float, interference: Interference | None = None
    ) -> Inspection:
        """The facts of an arrival that was absorbed without being written, in so many seconds."""
        store, totals, before = arrival.store, arrival.totals, arrival.mean_norm_before
        peaks = sorted(arrival.step.memory.values(), reverse=True)
        return cls(
            source=arrival.source,
            method=store.manifest.method,
            step=totals.t,
            duplicate_of=arrival.duplicate_of,
            norm=totals.norm,
            relative_norm=totals.norm / before if before else 1.0,
            cosines=cosines_to(store.place, store.history, arrival.sketch.values()),
            kept=totals.kept,
            scale=None if interference else totals.scale,
            distance=None if interference else totals.distance or 0.0,
            fates=arrival.fates,
            seconds=round(seconds + predicted.writing, 3),
            predicted=predicted,
            memory=sum(peaks[: store.engine.workers]),
            disk=sum(spec.nbytes for spec in (*arrival.layout.values(), *arrival.blocks.values())),
            tensors={name: TensorInspection.of(arrival, name) for name in arrival.vector.names},
            notes=arrival.notes,
            interference=interference,
        )

    @property
    def lambda_(self) -> float | None:
        """1/scale, which of OPCM is λ"""
        return None if self.scale is None else inverse(self.scale)

    @property
    def layers(self) -> dict[str, float]:
        """The share of each layer's ‖Δ‖² that would be kept, the least first: the layers with the most interference."""
        energy: Counter[str] = Counter()
        entered: Counter[str] = Counter()
        for name, tensor in self.tensors.items():
            energy[layer_of(name)] += tensor.norm**2  # type: ignore[assignment]
            entered[layer_of(name)] += tensor.kept * tensor.norm**2  # type: ignore[assignment]
        shares = {layer: entered[layer] / whole for layer, whole in energy.items() if whole}
        return dict(sorted(shares.items(), key=lambda item: (item[1], item[0])))

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(dataclasses.replace(self, interference=None))
        data |= {"lambda": self.lambda_, "layers": self.layers}
        data["predicted"]["bottleneck"] = self.predicted.bottleneck
        del data["interference"]
        if found := self.interference:
            data |= {"held": self.kept, "damage": dict(zip(found.experts, found.damage, strict=True))}
            data["overlap"] = {
                expert: {"mean": found.overlap[-1][number], "layers": found.of_pair(-1, number)}
                for number, expert in enumerate(found.experts[:-1])
            }
        return data
