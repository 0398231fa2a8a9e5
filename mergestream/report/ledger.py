"""What a ledger tells of its experts now: how much of each it holds, and how they get into each other's way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mergestream.report.diagnostics import Survival, few, holding, plain
from mergestream.store.interference import Interference, measure_interference

if TYPE_CHECKING:
    from mergestream.engine import Engine
    from mergestream.progress import Progress
    from mergestream.store.snapshot import Snapshot

DAMAGED = 0.3
"""An expert with more predicted damage is served badly; eight tasks of the project's suites have 0.08 to 0.24."""
COLLIDING = 0.5
"""Two experts with a larger overlap answer to the same inputs; alphabets have 0.45 with each other."""
LITTLE_HELD = 0.5
"""An entry that holds less than this has little left of its expert; eight of the project's suites have 0.7 to 0.86."""


@dataclass(frozen=True)
class LedgerFacts:
    """Of all experts, in the order in which they came, as they are read out by default."""

    room_for: int
    """Entries are cut as if so many experts shared the room"""
    holding: Survival
    """The share of each tensor that the entries hold now"""
    interference: Interference
    closest: tuple[tuple[tuple[float, str] | None, ...], ...]
    """Expert × layer: the largest overlap with another expert there, and with whom"""

    @classmethod
    def of(cls, snapshot: Snapshot, engine: Engine, progress: Progress) -> LedgerFacts:
        found = measure_interference(snapshot, engine, progress)
        layers, experts = range(len(found.layers)), range(len(found.experts))
        closest = tuple(tuple(found.closest_in(layer, expert) for layer in layers) for expert in experts)
        return cls(snapshot.manifest.sharing, holding(snapshot), found, closest)

    def of_experts(self, experts: Sequence[int]) -> LedgerFacts:
        """Only those experts; what they are closest to may be another one."""
        found, closest = self.interference.of_experts(experts), tuple(self.closest[i] for i in experts)
        return replace(self, holding=self.holding.of_experts(experts), interference=found, closest=closest)

    @property
    def experts(self) -> tuple[str, ...]:
        return self.interference.experts

    @property
    def held(self) -> tuple[float, ...]:
        """The share of each expert's ‖Δ‖² that its entry holds now, over all tensors."""
        return self.holding.together

    @property
    def damage(self) -> tuple[float | None, ...]:
        return self.interference.damage

    @property
    def overlap(self) -> tuple[tuple[float | None, ...], ...]:
        return self.interference.overlap

    @property
    def layer_overlap(self) -> tuple[tuple[float | None, ...], ...]:
        """Expert × layer: the largest overlap with another expert there."""
        return tuple(tuple(found and found[0] for found in row) for row in self.closest)

    @property
    def layer_partner(self) -> tuple[tuple[str | None, ...], ...]:
        """Expert × layer: with whom that is."""
        return tuple(tuple(found and found[1] for found in row) for row in self.closest)

    def pairs(self) -> Iterator[tuple[float, str, str]]:
        """The overlap of every two experts that have moved a linear weight in common, and their names."""
        for i, row in enumerate(self.overlap):
            for j, value in enumerate(row[:i]):
                if value is not None:
                    yield value, self.experts[j], self.experts[i]

    def _damages(self) -> Iterator[tuple[float, str]]:
        return ((damage, name) for damage, name in zip(self.damage, self.experts, strict=True) if damage is not None)

    def findings(self) -> Iterator[str]:
        """What deserves a look, in sentences."""
        held = sorted(zip(self.held, self.experts, strict=True))
        yield from few(
            f"The entry of {name} holds only {share:.0%} of it." for share, name in held if share < LITTLE_HELD
        )
        yield from few(
            f"{name} would be served badly by the merged model (predicted damage {damage:.2f})."
            for damage, name in sorted(self._damages(), reverse=True)
            if damage > DAMAGED
        )
        yield from few(
            f"{one} and {other} answer to the same inputs (overlap {value:.2f})."
            for value, one, other in sorted(self.pairs(), reverse=True)
            if value > COLLIDING
        )

    def to_json(self) -> dict[str, Any]:
        found = plain(self.interference)
        for key in ("layer_overlap", "layer_cosine"):  # experts × experts for every layer: the largest are told
            del found[key]
        return {
            **{"room_for": self.room_for, "held": self.held, **found},
            **{"layer_overlap": self.layer_overlap, "layer_partner": self.layer_partner},
        }
