"""All data of a report, whatever format it is written in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from mergestream import __version__
from mergestream.escaping import shell_command
from mergestream.report.diagnostics import Similarity, Survival, fields_of, similarity, survival
from mergestream.report.ledger import LedgerFacts
from mergestream.report.scores import Scores, attached
from mergestream.report.verdict import next_step, verdict
from mergestream.report.wording import format_number, short_name, shorten_findings
from mergestream.store.candidate import LARGE

if TYPE_CHECKING:
    from mergestream.store import Expert, Store
    from mergestream.store.manifest import Manifest

T = TypeVar("T")

SIMILAR = 0.5
"""Two experts are similar from this cosine on; unrelated task vectors have a cosine of nearly 0"""
OPPOSED = -0.2
"""Two experts cancel each other when they are added up, from this cosine down"""
FORGOTTEN = 0.05
"""Tasks are being forgotten when they have lost more than this share of the mean score"""
LOW_KEPT = 0.5
"""An expert is hardly merged when less than this share of it entered the state"""
MAX_LAYERS = 3
"""Layers that are named for each conflict"""
_STATE_KEYS = ("scale", "direction_norm", "distance", "lost", "rank")
"""What an expert in a ledger does not have: the readout decides it, or there is nothing to bound"""
_TENSOR_KEYS = ("role", "rule", "dtype", "shape", "norm", "digest")


@dataclass(frozen=True)
class Conflict:
    """Two experts with opposed task vectors."""

    one: str
    other: str
    cosine: float
    layers: dict[str, float]
    """The most opposed layers and their cosines; only a ledger knows them"""

    def __str__(self) -> str:
        layers = [f"{layer} ({format_number(value, '.2f')})" for layer, value in self.layers.items()]
        where = f", most in {', '.join(layers)}" if layers else ""
        cosine = format_number(self.cosine, ".2f")
        return f"{short_name(self.one)} and {short_name(self.other)} oppose each other (cosine {cosine}){where}."


@dataclass(frozen=True)
class Facts:
    """The state of a store and how it was made."""

    store: str
    manifest: Manifest
    similarity: Similarity
    survival: Survival
    scores: Scores | None
    commands: tuple[str, ...]
    """The command lines that make this store again"""
    ledger: LedgerFacts | None = None
    """What only a ledger with experts has; it decides which sections there are"""

    @classmethod
    def of(cls, store: Store) -> Facts:
        """Read a store; a writer that commits meanwhile makes it start again."""
        return store.retried(lambda: cls._read(store))

    @classmethod
    def _read(cls, store: Store) -> Facts:
        ledger = None
        if store.manifest.entries:
            with store.snapshot() as snapshot:
                ledger = LedgerFacts.of(snapshot, store.engine, store.progress)
        return cls(
            store=str(store.storage),
            manifest=store.manifest,
            similarity=similarity(store),
            survival=ledger.survival if ledger else survival(store),
            scores=attached(store),
            commands=tuple(_commands(str(store.storage), store.manifest)),
            ledger=ledger,
        )

    @property
    def history(self) -> tuple[Expert, ...]:
        return self.manifest.history

    @property
    def parameters(self) -> str:
        """``alpha = 0.5, scaling = adaptive``"""
        return ", ".join(f"{key} = {value}" for key, value in self.manifest.parameters.items())

    @cached_property
    def selected(self) -> tuple[int, ...]:
        """Positions of the experts that have a column in tables: all, except in large stores."""
        everyone = range(len(self.history))
        worst = [-(self.ledger.damage[i] or 0.0) if self.ledger else self.history[i].kept for i in everyone]
        return self.similarity.choose(sorted(everyone, key=lambda i: worst[i]))

    @property
    def selection(self) -> str:
        """Says which experts are selected, if not all are."""
        if len(self.selected) == len(self.history):
            return ""
        worst = "the most damaged" if self.ledger else "those of which the least was kept"
        return (
            f"This shows {len(self.selected)} of {len(self.history)} experts: the latest, the most similar to another, "
            f"the most opposed to another, and {worst}."
        )

    def select(self, values: Sequence[T]) -> list[T]:
        """The values of the selected experts."""
        return [values[i] for i in self.selected]

    def nearest(self, position: int) -> tuple[float, str] | None:
        """The largest cosine of an expert to another one, and the name of that one."""
        found = self.similarity.nearest[position]
        return found and (found[0], self.history[found[1]].name)

    def relative_norm(self, number: int) -> float:
        """The norm of the task vector of step ``number`` over the mean of the others."""
        others = [entry.norm for i, entry in enumerate(self.history, 1) if i != number]
        mean = math.fsum(others) / len(others) if others else 0.0
        return self.history[number - 1].norm / mean if mean else 1.0

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """The pairs of experts with strongly negative cosines, the most opposed first."""
        return tuple(
            Conflict(self.history[one].name, self.history[other].name, cosine, self._opposed_layers(one, other))
            for cosine, one, other in sorted(pair for pair in self.similarity.pairs() if pair[0] <= OPPOSED)
        )

    def _opposed_layers(self, one: int, other: int) -> dict[str, float]:
        layers = self.ledger.interference.opposed(one, other) if self.ledger else {}
        return dict(list(layers.items())[:MAX_LAYERS])

    def findings(self) -> list[str]:
        """What deserves a look, in sentences."""
        relative = {entry.name: self.relative_norm(number) for number, entry in enumerate(self.history, 1)}
        found = shorten_findings(
            f"{short_name(name)} is {times:.1f} times as large as the other experts on average."
            for name, times in relative.items()
            if times >= LARGE
        )
        found += shorten_findings(
            f"Only {entry.kept:.0%} of {short_name(entry.name)} entered the merged state."
            for entry in self.history
            if entry.kept < LOW_KEPT and not self.ledger
        )
        names = [short_name(entry.name) for entry in self.history]
        found += shorten_findings(
            f"{names[later]} and {names[earlier]} are similar (cosine {value:.2f})."
            for value, earlier, later in sorted(self.similarity.pairs(), reverse=True)
            if value >= SIMILAR
        )
        found += shorten_findings(
            f"{short_name(entry.name)}: {note}." for entry in self.history for note in entry.notes
        )
        found += self.ledger.findings() if self.ledger else ()
        if (scores := self.scores) and scores.acc and scores.bwt and scores.bwt < -FORGOTTEN * abs(scores.acc):
            found.append(
                f"Tasks have lost {-scores.bwt:.3g} of {scores.metric} on average since their experts were added."
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain data; the same store gives the same report, to the byte."""
        method, base = self.manifest.method, self.manifest.base
        return {
            "mergestream": __version__,
            "store": self.store,
            "method": {"name": method, "parameters": self.manifest.parameters},
            "base": {"source": base.source, "digest": base.digest},
            "experts": [self._expert_json(number, entry) for number, entry in enumerate(self.history, 1)],
            "verdict": verdict(self),
            "next_step": asdict(next_step(self)),
            "findings": self.findings(),
            "conflicts": [asdict(conflict) for conflict in self.conflicts],
            "similarity": fields_of(self.similarity),
            "layers": fields_of(self.survival.by_layer()),
            "survival": fields_of(self.survival),
            "scores": self.scores and {**fields_of(self.scores), "ACC": self.scores.acc, "BWT": self.scores.bwt},
            "tensors": [
                {"name": name, **{key: getattr(tensor, key) for key in _TENSOR_KEYS}}
                for name, tensor in base.tensors.items()
            ],
            "ledger": self.ledger and self.ledger.to_json(),
            "commands": self.commands,
        }

    def _expert_json(self, number: int, entry: Expert) -> dict[str, Any]:
        left_out = {"fates", *(_STATE_KEYS if self.ledger else ())}
        outcome: dict[str, Any] = {"lambda": finite(entry.lambda_), "sqrt_t": math.sqrt(number)}
        if self.ledger:
            outcome = {"held": self.ledger.held[number - 1], "damage": self.ledger.damage[number - 1]}
        return {
            "step": number,
            **{key: value for key, value in asdict(entry).items() if key not in left_out},
            **outcome,
            "relative_norm": self.relative_norm(number),
            "tensors": dict(entry.fates),
        }


def finite(value: float) -> float | None:
    """None for infinity and NaN, which JSON does not have."""
    return value if math.isfinite(value) else None


def _commands(store: str, manifest: Manifest) -> Iterator[str]:
    """The command lines that make a store again."""

    def repeat(option: str, values: Iterable[str]) -> list[str]:
        return [part for value in values for part in (option, value)]

    init = ["init", store, "--base", manifest.base.source, "--method", manifest.method]
    init += repeat("--set", (f"{key}={value}" for key, value in manifest.parameters.items()))
    init += repeat("--linear", manifest.base.linear)
    init += repeat("--not-linear", manifest.base.not_linear)
    init += repeat("--heads", manifest.base.heads)
    init += ["--max-rank", str(manifest.max_rank)] if manifest.max_rank is not None else []
    init += ["--config-only"] if not manifest.base.measured else []
    yield shell_command(["mergestream", *init, "--keep", str(manifest.keep)])
    for entry in manifest.history:
        add = ["add", store, entry.source]
        add += ["--name", entry.name] if entry.name.isprintable() else []  # else its path gives the name
        switches = ("partial", "allow_duplicate", "allow_other_base")
        add += [f"--{option.replace('_', '-')}" for option in switches if entry.options.get(option)]
        add += repeat("--ignore", entry.options.get("ignore", ()))
        add += repeat("--gate", (gate["gate"] for gate in entry.gates))
        add += ["--evaluate", entry.evaluation["command"]] if entry.evaluation else []
        yield shell_command(["mergestream", *add])
