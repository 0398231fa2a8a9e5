"""What a ledger holds of each expert, and how the experts interfere with each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mergestream.merging.interference import Interference
from mergestream.report.diagnostics import Survival, fields_of, ledger_survival
from mergestream.report.wording import short_name, shorten_findings

if TYPE_CHECKING:
    from mergestream.engine import Engine
    from mergestream.progress import Progress
    from mergestream.store.snapshot import Snapshot

HIGH_DAMAGE = 0.3
"""The merged model serves an expert badly above this; eight tasks of the project's suites have 0.08 to 0.24"""
HIGH_OVERLAP = 0.5
"""Two experts respond to the same inputs above this; similar alphabets have 0.45"""
LOW_SHARE = 0.5
"""An entry that holds less has lost much of its expert; eight experts of the project's suites have 0.7 to 0.86"""


@dataclass(frozen=True)
class LedgerFacts:
    """All experts of a ledger, in the order they were added, merged by the default readout."""

    sharing: int
    """Entries are cut as if this many experts shared the budget"""
    survival: Survival
    """The share of each tensor that the entries hold now"""
    interference: Interference

    @classmethod
    def of(cls, snapshot: Snapshot, engine: Engine, progress: Progress) -> LedgerFacts:
        """Measure a ledger, in one pass over the linear weights."""
        found = snapshot.reading(engine).interference(engine, progress)
        assert found is not None
        return cls(snapshot.manifest.sharing, ledger_survival(snapshot), found)

    @cached_property
    def closest(self) -> list[list[tuple[float, str] | None]]:
        """Expert × layer: the largest overlap with another expert, and the name of that expert."""
        found, layers = self.interference, range(len(self.interference.layers))
        return [[found.closest_in(layer, expert) for layer in layers] for expert in range(len(found.experts))]

    @property
    def experts(self) -> tuple[str, ...]:
        return self.interference.experts

    @property
    def held(self) -> tuple[float, ...]:
        """The share of each expert's ‖Δ‖² that its entry holds now, over all tensors."""
        return self.survival.total

    @property
    def damage(self) -> tuple[float | None, ...]:
        return self.interference.damage

    @property
    def overlap(self) -> tuple[tuple[float | None, ...], ...]:
        return self.interference.overlap

    @property
    def layer_overlap(self) -> list[list[float | None]]:
        """Expert × layer: the largest overlap with another expert."""
        return [[found and found[0] for found in row] for row in self.closest]

    @property
    def layer_partner(self) -> list[list[str | None]]:
        """Expert × layer: the expert with that overlap."""
        return [[found and found[1] for found in row] for row in self.closest]

    def pairs(self) -> list[tuple[float, str, str]]:
        """The overlap and the names of every two experts that moved a linear weight in common, the largest first."""
        return sorted(
            (
                (value, self.experts[j], self.experts[i])
                for i, row in enumerate(self.overlap)
                for j, value in enumerate(row[:i])
                if value is not None
            ),
            reverse=True,
        )

    def damaged(self) -> list[tuple[float, str]]:
        """The experts with a high predicted damage, the largest first."""
        known = zip(self.damage, self.experts, strict=True)
        return sorted(((value, name) for value, name in known if value and value > HIGH_DAMAGE), reverse=True)

    def findings(self) -> Iterator[str]:
        """What deserves a look, in sentences."""
        yield from shorten_findings(
            f"The ledger holds only {share:.0%} of {short_name(name)}."
            for share, name in sorted(zip(self.held, self.experts, strict=True))
            if share < LOW_SHARE
        )
        yield from shorten_findings(
            f"The merged model would serve {short_name(name)} badly (predicted damage {damage:.2f})."
            for damage, name in self.damaged()
        )
        yield from shorten_findings(
            f"{short_name(one)} and {short_name(other)} respond to the same inputs (overlap {value:.2f})."
            for value, one, other in self.pairs()
            if value > HIGH_OVERLAP
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; by layer only the largest overlap of each expert, not experts × experts."""
        found = {key: value for key, value in fields_of(self.interference).items() if key != "layer_cosine"}
        by_layer = {"layer_overlap": self.layer_overlap, "layer_partner": self.layer_partner}
        return {"room_for": self.sharing, "held": self.held, **found, **by_layer}
