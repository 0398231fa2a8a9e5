"""`inspect`: what adding an expert would do, without adding it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergestream.engine import Engine, LocalEngine
from mergestream.experts import ExpertSource
from mergestream.ledger.selection import Selection
from mergestream.merging.entries import read_out
from mergestream.merging.merger import MemoryState
from mergestream.merging.plan import KeptExpert
from mergestream.merging.step import Discard
from mergestream.methods.scale import inverse
from mergestream.store.add import Candidate, open_candidate
from mergestream.store.steps import lay_out

if TYPE_CHECKING:
    from mergestream.merging.interference import Interference
    from mergestream.store.store import Store


def inspect_expert(store: Store, expert: ExpertSource, options: Mapping[str, Any]) -> Inspection:
    """Absorb an expert without adding it; ``options`` are those of `open_candidate`.

    A ledger also compares the new entry with the others. The entry is kept in memory, so this is done on this machine.
    """
    with open_candidate(store, expert, measure_distance=True, **options) as candidate:
        started, interference = time.monotonic(), None
        engine = LocalEngine() if candidate.cut and not isinstance(store.engine, LocalEngine) else store.engine
        entry = MemoryState(candidate.step) if candidate.cut else None
        candidate.absorb(entry or Discard(), "inspecting", engine)
        seconds = time.monotonic() - started
        candidate.note_oddities()
        if entry:
            interference = _interference(candidate, entry, engine)
        vector, totals, before = candidate.vector, candidate.totals, candidate.mean_norm_before
        tensors = {}
        for name in vector.names:
            tensor, outcome = vector.model.tensors[name], candidate.outcomes[name]
            norm = math.sqrt(outcome.norm2)
            relative = norm / tensor.norm if tensor.norm else 0.0
            facts = norm, relative, outcome.kept, outcome.protected
            tensors[name] = TensorInspection(tensor.role, vector.actions[name], *facts)
        layouts = lay_out(candidate.step, candidate.number).values()
        peaks = sorted((plan.memory for plan in candidate.step.plans.values()), reverse=True)
        return Inspection(
            source=candidate.source,
            method=store.manifest.method,
            step=totals.t,
            duplicate_of=candidate.duplicate_of,
            norm=totals.norm,
            relative_norm=totals.norm / before if before else 1.0,
            kept=totals.kept,
            scale=None if interference else totals.scale,
            distance=None if interference else totals.distance or 0.0,
            fates=candidate.action_counts,
            seconds=round(seconds, 3),
            memory=sum(peaks[: store.engine.workers]),
            disk=sum(spec.nbytes for layout in layouts for spec in layout.values()),
            tensors=tensors,
            notes=candidate.notes,
            interference=interference,
        )


def _interference(candidate: Candidate, entry: MemoryState, engine: Engine) -> Interference | None:
    """How the experts of a ledger would interfere with the candidate, which is the last of them."""
    store, totals = candidate.store, candidate.totals
    norms = totals.norm, totals.mean_norm, totals.direction_norm
    new = KeptExpert(candidate.name, *norms, candidate.cut, bool(candidate.rank), entry)
    with ExitStack() as opened:
        known = opened.enter_context(store.snapshot()).kept if store.history else []
        reading = read_out(candidate.vector.model, store.method, totals.t, [*known, new], Selection(), engine.device)
        if shortfall := reading.shortfall(reading):
            candidate.note(shortfall)
        return reading.interference(engine, store.progress)


@dataclass(frozen=True)
class TensorInspection:
    """One tensor: its role, what would happen to it, how far it moved and how much would be kept."""

    role: str
    fate: str
    norm: float
    relative_norm: float
    """‖Δ‖ / ‖θ⁰‖ of this tensor"""
    kept: float
    protected: int | None


@dataclass(frozen=True)
class Inspection:
    """What adding an expert would do."""

    source: str
    method: str
    step: int
    """The step it would be"""
    duplicate_of: str | None
    norm: float
    relative_norm: float
    """‖Δ‖ over the mean norm of the experts so far"""
    kept: float
    """The share of ‖Δ‖² that would enter the state, or that its entry in a ledger would hold"""
    scale: float | None
    """None for a ledger, like the distance: both depend on the readout"""
    distance: float | None
    fates: Mapping[str, int]
    seconds: float
    """How long absorbing it took; adding it takes a little longer"""
    memory: int
    """Bytes of RAM for tensors at the peak, with the engine's number of workers"""
    disk: int
    """Bytes that the new step takes"""
    tensors: Mapping[str, TensorInspection]
    notes: Sequence[str]
    interference: Interference | None = None
    """For a ledger: the interference with this expert added, as the last one"""

    def __repr__(self) -> str:
        kept = "held" if self.interference else "kept"
        return f"<Inspection of {self.source!r}: step {self.step}, ‖Δ‖ {self.norm:.4g}, {kept} {self.kept:.1%}>"

    @property
    def cosines(self) -> dict[str, float | None]:
        """The cosine to each expert in a ledger, from their entries; None where one of the two is zero."""
        if self.interference is None:
            return {}
        return dict(zip(self.interference.experts[:-1], self.interference.cosines[-1], strict=False))

    @property
    def lambda_(self) -> float | None:
        """1/scale, which is λ of OPCM"""
        return None if self.scale is None else inverse(self.scale)

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(dataclasses.replace(self, interference=None))
        data["lambda"] = self.lambda_
        del data["interference"]
        if found := self.interference:
            damage = dict(zip(found.experts, found.damage, strict=True))
            data |= {"held": self.kept, "damage": damage, "cosines": self.cosines}
            data["overlap"] = {
                expert: {"mean": found.overlap[-1][number], "layers": found.of_pair(-1, number)}
                for number, expert in enumerate(found.experts[:-1])
            }
        return data
