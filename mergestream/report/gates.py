"""Gates: conditions on the numbers of a step. A step that fails one is not taken."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mergestream.commands import NUMBER, SCORES, CommandError, check_command, last_number, run_command
from mergestream.errors import MergestreamError, UsageError
from mergestream.escaping import one_line
from mergestream.export.directory import Output
from mergestream.export.model import Target, write_model
from mergestream.report.diagnostics import ledger_survival
from mergestream.report.harness import read_evaluation
from mergestream.store.arrival import Candidate
from mergestream.store.manifest import Evaluation, Expert, Manifest, PassedGate

QUANTITIES = {
    "kept": "the share of the expert that enters the merged state",
    "max_cosine": "the largest cosine to an expert in the store",
    "relative_norm": "the expert's norm over the mean norm of the experts in the store",
    "norm": "the norm of the expert's task vector",
    "scale": "the scale of the merged task vector after the step",
    "lambda": "λ, 1/scale, after the step",
    "distance": "the distance of the merged model to the base",
    "held": "the share of the expert that its entry in the ledger holds",
    "damage": "the largest predicted damage of an expert in the ledger",
    "score": "the score by the --evaluate command",
}
OF_LEDGERS = ("held", "damage")
NOT_OF_LEDGERS = ("scale", "lambda", "distance")
"""Which depend on how a ledger is read out"""
_COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_GATE = re.compile(rf"\s*(\w+)\s*(>=|<=|>|<)\s*({NUMBER})\s*")


class GateError(MergestreamError):
    """One or more gates failed; the message has one sentence, on one line, for each."""

    @property
    def sentences(self) -> Sequence[str]:
        return str(self).split("\n")


@dataclass(frozen=True)
class Gate:
    """A condition such as ``kept>=0.6``."""

    quantity: str
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Gate:
        match = _GATE.fullmatch(text)
        if not match or match[1] not in QUANTITIES or not math.isfinite(float(match[3])):
            raise UsageError(
                f"gate {text!r} is not a condition such as 'kept>=0.6' (it can be on: {', '.join(QUANTITIES)})"
            )
        return cls(match[1], match[2], float(match[3]))

    def __str__(self) -> str:
        return f"{self.quantity}{self.comparison}{self.bound:g}"

    def holds(self, value: float | None) -> bool:
        """None is a comparison with nothing, as for the first expert, and holds; an unknown value (NaN) does not."""
        return value is None or _COMPARISONS[self.comparison](value, self.bound)


@dataclass(frozen=True)
class Gatekeeper:
    """The gates of one ``add``, and the command that gives the score."""

    gates: tuple[Gate, ...] = ()
    command: str | None = None

    @classmethod
    def of(cls, gates: Sequence[str], command: str | None, manifest: Manifest | None = None) -> Gatekeeper:
        """Refuses what cannot be meant, by a store with this manifest, before any work is done."""
        parsed = tuple(Gate.parse(text) for text in gates)
        if manifest is not None:
            for gate in parsed:
                _check_known(gate.quantity, manifest)
        if command is not None:
            check_command(command)
        elif any(gate.quantity == "score" for gate in parsed):
            raise UsageError("a gate on the score needs a command that gives it; pass --evaluate CMD")
        return cls(parsed, command)

    def asks_for(self, quantity: str) -> bool:
        return any(gate.quantity == quantity for gate in self.gates)

    def review(self, candidate: Candidate) -> Expert:
        """Hold a step against the gates, the numbers first, then the score of the model that it would give.

        Returns its entry with what was found.
        """
        expert = candidate.expert
        numbers = [gate for gate in self.gates if gate.quantity != "score"]
        passed = check(numbers, self._numbers(candidate), expert.source) if numbers else []
        if self.command is None:
            return replace(expert, gates=passed)
        evaluation = self._evaluation(candidate, self.command)
        found = {"score": evaluation["score"]}
        passed += check([gate for gate in self.gates if gate.quantity == "score"], found, expert.source)
        return replace(expert, gates=passed, evaluation=evaluation)

    def _numbers(self, candidate: Candidate) -> dict[str, float | None]:
        expert, history, engine = candidate.expert, candidate.store.history, candidate.store.engine
        relative_norm = max_cosine = None
        if history:
            mean = history[-1].mean_norm
            relative_norm = expert.norm / mean if mean else math.nan
        if history and self.asks_for("max_cosine"):
            max_cosine = max((value for value in candidate.cosines().values() if value is not None), default=math.nan)
        held = damage = None
        if self.asks_for("held") or self.asks_for("damage"):
            with candidate.snapshot() as snapshot:
                held = ledger_survival(snapshot).total[-1] if self.asks_for("held") else None
                if self.asks_for("damage"):
                    damage = max(snapshot.reading(engine).damage(engine).values(), default=None)
        return {
            **{"held": held, "damage": damage},
            **{"kept": expert.kept, "norm": expert.norm, "distance": expert.distance},
            **{"scale": expert.scale, "lambda": expert.lambda_},
            **{"relative_norm": relative_norm, "max_cosine": max_cosine},
        }

    def _evaluation(self, candidate: Candidate, command: str) -> Evaluation:
        """What the command makes of the model that the store would give."""
        store = candidate.store
        with store.place.workspace() as directory:
            output = Output(directory / "model")
            with candidate.snapshot() as snapshot, output.draft() as draft:
                write_model(snapshot, Target(draft, output, store.engine, store.progress))
            scores = directory / "scores"
            scores.mkdir()
            return evaluate(command, output.path, scores)


def _check_known(quantity: str, manifest: Manifest) -> None:
    """Refuse a gate on what the method of a store does not have."""
    if manifest.is_ledger and quantity in NOT_OF_LEDGERS:
        raise UsageError(
            f"{quantity} is not of a ledger: it depends on how the ledger is read out; gate on damage or held instead"
        )
    if not manifest.is_ledger and quantity in OF_LEDGERS:
        raise UsageError(
            f"{quantity} is of a ledger, and this store is merged by {manifest.method}; gate on kept instead"
        )


def check(gates: Sequence[Gate], values: Mapping[str, float | None], source: str) -> list[PassedGate]:
    """What goes into the history: each gate with its value. Raises if one fails."""
    failed = []
    for gate in gates:
        value = values[gate.quantity]
        if not gate.holds(value):
            found = "is not known" if value is None or math.isnan(value) else f"is {value:.4g}"
            what = QUANTITIES[gate.quantity]
            failed.append(f"{one_line(source)} was not added: {what} {found}, and the gate asks for {gate}")
    if failed:
        raise GateError("\n".join(failed))
    return [{"gate": str(gate), "value": values[gate.quantity]} for gate in gates]


def evaluate(command: str, model: Path, scores: Path) -> Evaluation:
    """What a user's command finds out about a model's directory: what it writes to ``scores``, where it asks for that,
    else the last number that it prints."""
    try:
        printed = run_command(command, model=model, scores=scores, show_errors=True)
    except MergestreamError as error:
        raise MergestreamError(f"{error}; nothing was added") from error
    if SCORES in command:
        return read_evaluation(command, scores)
    score = last_number(printed)
    if score is None or not math.isfinite(score):
        printed = "no number" if score is None else f"{score} as its last number"
        raise CommandError(f"--evaluate {command!r} printed {printed}; nothing was added")
    return {"command": command, "score": score}
