"""All data of a report, whatever format it is written in."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mergestream import __version__
from mergestream.merging.interference import Interference, pairs_of
from mergestream.report.diagnostics import HIGH_DAMAGE, Survival, read_survival
from mergestream.report.scores import Scores, attached
from mergestream.report.tables import MAX_FINDINGS, format_number, list_some, short_names
from mergestream.report.verdict import next_step, verdict
from mergestream.store.transaction import retried

if TYPE_CHECKING:
    from mergestream.store import Expert, Store
    from mergestream.store.manifest import Manifest

SIMILAR = 0.5
"""Two experts are similar from this cosine on; unrelated task vectors have a cosine of nearly 0"""
OPPOSED = -0.2
"""Two experts cancel each other when they are added up, from this cosine down"""
FORGOTTEN = 0.05
"""Tasks are being forgotten when they have lost more than this share of the mean score"""
LOW_SHARE = 0.5
"""An expert is hardly merged when a smaller share of it entered the state, or is held by its entry in a ledger"""
_STATE_KEYS = ("scale", "direction_norm", "distance", "rank")
"""Fields of an expert that mean nothing in a ledger, where the readout decides the scale"""
_INTERFERENCE_KEYS = ("experts", "layers", "damage", "layer_damage", "overlap")
_TENSOR_KEYS = ("role", "rule", "dtype", "shape", "norm", "digest")


@dataclass(frozen=True)
class Facts:
    """The state of a store and how it was made."""

    store: str
    manifest: Manifest
    survival: Survival
    """The share of each tensor that entered the state, or that the entries of a ledger hold now"""
    scores: Scores | None
    interference: Interference | None = None
    """What the experts do to each other; only a ledger with experts knows it, and so has other sections"""
    shortfall: str | None = None
    """A sentence on the adapters of which a ledger holds too little"""

    @classmethod
    def of(cls, store: Store) -> Facts:
        """Read a store; a writer that commits meanwhile makes it start again."""
        return retried(store, lambda: cls._read(store))

    @classmethod
    def _read(cls, store: Store) -> Facts:
        place, manifest, scores = store.storage, store.manifest, attached(store)
        if not manifest.entries:
            return cls(str(place), manifest, read_survival(place, manifest), scores)
        with store.snapshot() as snapshot:
            shares = read_survival(place, manifest, snapshot.reading().held())
            interference = snapshot.reading(store.engine).interference(store.engine, store.progress)
            return cls(str(place), manifest, shares, scores, interference, snapshot.shortfall())

    @property
    def history(self) -> tuple[Expert, ...]:
        return self.manifest.history

    @property
    def share(self) -> str:
        """The word for the share of an expert that entered the state, or that a ledger holds."""
        return "held" if self.interference else "kept"

    @property
    def share_of(self) -> str:
        return "the ledger holds" if self.interference else "entered the merged state"

    @cached_property
    def names(self) -> list[str]:
        """The names of all experts as tables and sentences write them."""
        return short_names(entry.name for entry in self.history)

    @cached_property
    def pairs(self) -> list[tuple[float, int, int]]:
        """The cosine of every two experts in a ledger, ascending, and their positions."""
        return sorted(pairs_of(self.interference.cosines)) if self.interference else []

    @property
    def conflicts(self) -> list[tuple[float, int, int]]:
        """The pairs that oppose each other, the most opposed first."""
        return [pair for pair in self.pairs if pair[0] <= OPPOSED]

    def damaged(self) -> list[tuple[float, int]]:
        """The experts of a ledger with a high predicted damage, and their positions, the largest first."""
        damage = self.interference.damage if self.interference else ()
        return sorted(((value, i) for i, value in enumerate(damage) if value and value > HIGH_DAMAGE), reverse=True)

    def findings(self) -> list[str]:
        """What deserves a look, in sentences; each lists its strongest cases first."""
        names = self.names
        kinds = {
            f"Less than half is {self.share}": [
                f"{name} ({share:.0%})"
                for share, name in sorted(zip(self.survival.total, names, strict=True))
                if share < LOW_SHARE
            ],
            "Similar experts (cosine)": [
                f"{names[i]} and {names[j]} ({cosine:.2f})"
                for cosine, i, j in reversed(self.pairs)
                if cosine >= SIMILAR
            ],
            "Experts that oppose each other (cosine)": [
                f"{names[i]} and {names[j]} ({format_number(cosine, '.2f')})" for cosine, i, j in self.conflicts
            ],
            "Served badly by the merged model (predicted damage)": [
                f"{names[i]} ({damage:.2f})" for damage, i in self.damaged()
            ],
        }
        found = [f"{kind}: {list_some(cases)}." for kind, cases in kinds.items() if cases]
        notes = [f"{name}: {note}." for name, entry in zip(names, self.history, strict=True) for note in entry.notes]
        found += notes[:MAX_FINDINGS]
        if len(notes) > MAX_FINDINGS:
            found.append(f"… and {len(notes) - MAX_FINDINGS} more notes from when the experts were added.")
        if self.shortfall:
            found.append(f"{self.shortfall[0].upper()}{self.shortfall[1:]}.")
        if (scores := self.scores) and scores.acc and scores.bwt and scores.bwt < -FORGOTTEN * abs(scores.acc):
            found.append(
                f"Tasks have lost {-scores.bwt:.3g} of {scores.metric} on average since their experts were added."
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data; the same store gives the same report, to the byte."""
        base, found, of_pairs, ledger = self.manifest.base, self.interference, {}, None
        if found:
            experts = found.experts
            conflicts = [{"one": experts[i], "other": experts[j], "cosine": cosine} for cosine, i, j in self.conflicts]
            of_pairs = {"conflicts": conflicts, "similarity": {"experts": experts, "cosines": found.cosines}}
            ledger = {"room_for": self.manifest.sharing, "held": self.survival.total}
            ledger |= {key: getattr(found, key) for key in _INTERFERENCE_KEYS}
        return {
            "mergestream": __version__,
            "store": self.store,
            "method": {"name": self.manifest.method, "parameters": self.manifest.parameters},
            "base": {"source": base.source, "digest": base.digest},
            "experts": [self._expert_json(number, entry) for number, entry in enumerate(self.history, 1)],
            "verdict": verdict(self),
            "next_step": asdict(next_step(self)),
            "findings": self.findings(),
            **of_pairs,
            "layers": asdict(self.survival.by_layer()),
            "survival": asdict(self.survival),
            "scores": self.scores and {**asdict(self.scores), "ACC": self.scores.acc, "BWT": self.scores.bwt},
            "tensors": [
                {"name": name, **{key: getattr(tensor, key) for key in _TENSOR_KEYS}}
                for name, tensor in base.tensors.items()
            ],
            "ledger": ledger,
        }

    def _expert_json(self, number: int, entry: Expert) -> dict[str, Any]:
        found = {"step": number, **asdict(entry)}
        found["tensors"] = found.pop("fates")
        if self.interference:
            for key in _STATE_KEYS:
                del found[key]
            return found | {"held": self.survival.total[number - 1], "damage": self.interference.damage[number - 1]}
        return found | {"lambda": entry.lambda_ if math.isfinite(entry.lambda_) else None}
