"""All that a report tells, whatever form it takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mergestream import __version__
from mergestream.escaping import shell_command
from mergestream.report.diagnostics import MOST_SHOWN, Similarity, Survival, few, plain, similarity, survival
from mergestream.report.ledger import LedgerFacts
from mergestream.report.scores import Scores, attached
from mergestream.report.verdict import signed, verdict
from mergestream.store.arrival import LARGE

if TYPE_CHECKING:
    from mergestream.store import Expert, StoreDirectory
    from mergestream.store.manifest import Manifest

SIMILAR = 0.5
"""A cosine above this is no coincidence: unrelated task vectors have nearly none."""
OPPOSED = -0.2
"""Experts with a cosine below this take away from each other what is added up."""
FORGOTTEN = 0.05
"""Tasks that have lost more than this share of the mean score are being forgotten."""
LITTLE = 0.5
"""An expert of which less than this enters the state is hardly merged."""
MOST_LAYERS = 3
"""Layers of a conflict that are told"""
_OF_STATES = ("scale", "direction_norm", "distance", "lost", "rank")
"""What an expert in a ledger has not: it depends on how the ledger is read out, or there is nothing to bound"""
_OF_TENSORS = ("role", "rule", "dtype", "shape", "norm", "digest")


@dataclass(frozen=True)
class Conflict:
    """Two experts that pull against each other."""

    one: str
    other: str
    cosine: float
    layers: dict[str, float]
    """Where most, and the cosine there; of a ledger, for other stores forget it"""

    def __str__(self) -> str:
        most = [f"{layer} ({signed(value, '.2f')})" for layer, value in self.layers.items()]
        where = f", most in {', '.join(most)}" if most else ""
        return f"{self.one} and {self.other} pull against each other (cosine {signed(self.cosine, '.2f')}){where}."


@dataclass(frozen=True)
class Facts:
    """The state of a store and how it came to be."""

    store: str
    manifest: Manifest
    similarity: Similarity
    survival: Survival
    scores: Scores | None
    commands: tuple[str, ...]
    ledger: LedgerFacts | None = None

    @classmethod
    def of(cls, store: StoreDirectory) -> Facts:
        return store.retried(lambda: cls._read(store))

    @classmethod
    def _read(cls, store: StoreDirectory) -> Facts:
        ledger = _ledger(store)
        found = ledger.holding if ledger else survival(store)
        commands = tuple(_commands(store))
        return cls(str(store.place), store.manifest, similarity(store), found, attached(store), commands, ledger)

    @property
    def history(self) -> tuple[Expert, ...]:
        return self.manifest.history

    @property
    def parameters(self) -> str:
        """``alpha = 0.5, scaling = adaptive``"""
        return ", ".join(f"{key} = {value}" for key, value in self.manifest.parameters.items())

    @cached_property
    def shown_experts(self) -> tuple[int, ...]:
        """The places of the experts in figures, and in tables with a column for each: all, but in large stores."""
        everyone = range(len(self.history))
        worst = [-(self.ledger.damage[i] or 0.0) if self.ledger else self.history[i].kept for i in everyone]
        return self.similarity.chosen(sorted(everyone, key=lambda i: worst[i]))

    @property
    def selection(self) -> str:
        """A sentence about them, where they are not all."""
        if len(self.shown_experts) == len(self.history):
            return ""
        worst = "that are served worst" if self.ledger else "of which the least entered"
        return (
            f"Of {len(self.history)} experts {len(self.shown_experts)} are shown: the latest, the closest to another, "
            f"the most opposed to another, and those {worst}."
        )

    @cached_property
    def shown(self) -> Facts:
        """The same of the experts that are shown, and of as many of the last scores."""
        places = self.shown_experts
        return replace(
            self,
            manifest=replace(self.manifest, history=tuple(self.history[i] for i in places)),
            similarity=self.similarity.of_experts(places),
            survival=self.survival.of_experts(places),
            scores=self.scores and self.scores.latest(MOST_SHOWN),
            ledger=self.ledger and self.ledger.of_experts(places),
        )

    def nearest(self, number: int) -> tuple[str, float] | None:
        """The other expert with the largest cosine to the one of a step, and that cosine."""
        found = self.similarity.nearest[number - 1]
        return None if found is None else (self.history[found[1]].name, found[0])

    def relative_norm(self, number: int) -> float:
        """The norm of a step's task vector over the mean of the others'."""
        others = [entry.norm for i, entry in enumerate(self.history, 1) if i != number]
        mean = math.fsum(others) / len(others) if others else 0.0
        return self.history[number - 1].norm / mean if mean else 1.0

    @cached_property
    def conflicts(self) -> tuple[Conflict, ...]:
        """The experts with strongly negative cosines, the most opposed first."""
        found = sorted(pair for pair in self.similarity.pairs() if pair[0] <= OPPOSED)
        return tuple(
            Conflict(
                self.history[one].name,
                self.history[other].name,
                cosine,
                dict(list(self.ledger.interference.opposed(one, other).items())[:MOST_LAYERS]) if self.ledger else {},
            )
            for cosine, one, other in found
        )

    def findings(self) -> list[str]:
        """What deserves a look, in sentences."""
        relative = {entry.name: self.relative_norm(number) for number, entry in enumerate(self.history, 1)}
        found = few(
            f"{name} is {times:.1f} times as large as the others in the mean."
            for name, times in relative.items()
            if times >= LARGE
        )
        if not self.ledger:
            little = (entry for entry in self.history if entry.kept < LITTLE)
            found += few(f"Only {entry.kept:.0%} of {entry.name} entered the merged state." for entry in little)
        found += few(
            f"{self.history[later].name} and {self.history[earlier].name} are similar (cosine {value:.2f})."
            for value, earlier, later in sorted(self.similarity.pairs(), reverse=True)
            if value >= SIMILAR
        )
        found += few(f"{entry.name}: {note}." for entry in self.history for note in entry.notes)
        found += self.ledger.findings() if self.ledger else ()
        if (scores := self.scores) and scores.acc and scores.bwt and scores.bwt < -FORGOTTEN * abs(scores.acc):
            found.append(f"Tasks have lost {-scores.bwt:.3g} of {scores.metric} in the mean since their experts came.")
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
            "findings": self.findings(),
            "conflicts": [asdict(conflict) for conflict in self.conflicts],
            "similarity": plain(self.similarity),
            "layers": plain(self.survival.by_layer()),
            "survival": plain(self.survival),
            "scores": {**plain(self.scores), "ACC": self.scores.acc, "BWT": self.scores.bwt} if self.scores else None,
            "tensors": [
                {"name": name, **{key: getattr(tensor, key) for key in _OF_TENSORS}}
                for name, tensor in base.tensors.items()
            ],
            "ledger": self.ledger.to_json() if self.ledger else None,
            "commands": self.commands,
        }

    def _expert_json(self, number: int, entry: Expert) -> dict[str, Any]:
        left_out = ("fates", *(_OF_STATES if self.ledger else ()))
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


def _ledger(store: StoreDirectory) -> LedgerFacts | None:
    if not (store.manifest.is_ledger and store.history):
        return None
    with store.snapshot() as snapshot:
        return LedgerFacts.of(snapshot, store.engine, store.progress)


def shown(value: float | None, form: str = ".3f") -> str:
    """A number for people; a dash where it is not known."""
    return "–" if value is None else format(value, form)


def finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None


def _commands(store: StoreDirectory) -> Iterator[str]:
    """The command lines that make this store again."""

    def repeated(option: str, values: Iterable[str]) -> list[str]:
        return [part for value in values for part in (option, value)]

    manifest, path = store.manifest, str(store.place)
    init = ["init", path, "--base", manifest.base.source, "--method", manifest.method]
    init += repeated("--set", (f"{key}={value}" for key, value in manifest.parameters.items()))
    init += repeated("--linear", manifest.base.linear)
    init += repeated("--not-linear", manifest.base.not_linear)
    init += repeated("--heads", manifest.base.heads)
    init += ["--max-rank", str(manifest.max_rank)] if manifest.max_rank is not None else []
    init += ["--config-only"] if not manifest.base.measured else []
    yield shell_command(["mergestream", *init, "--keep", str(manifest.keep)])
    for entry in manifest.history:
        add = ["add", path, entry.source]
        add += ["--name", entry.name] if entry.name.isprintable() else []  # else it is the one of its path
        allowed = ("partial", "allow_duplicate", "allow_other_base")
        add += [f"--{option.replace('_', '-')}" for option in allowed if entry.options.get(option)]
        add += repeated("--ignore", entry.options.get("ignore", ()))
        add += repeated("--gate", (gate["gate"] for gate in entry.gates))
        add += ["--evaluate", entry.evaluation["command"]] if entry.evaluation else []
        yield shell_command(["mergestream", *add])
