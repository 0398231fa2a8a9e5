"""Gates: conditions on the numbers of a step. ``add`` refuses an expert that fails one."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from mergestream.commands import NUMBER, SCORES, CommandError, check_command, last_number, run_command
from mergestream.errors import MergestreamError, UsageError, did_you_mean
from mergestream.escaping import one_line
from mergestream.export.directory import Output
from mergestream.export.model import Target, write_model
from mergestream.report.diagnostics import read_survival
from mergestream.report.scores import read_evaluation
from mergestream.store.add import Candidate
from mergestream.store.expert import Evaluation, Expert, PassedGate
from mergestream.store.manifest import Manifest

QUANTITIES = {
    "kept": "the share of the expert that enters the merged state",
    "max_cosine": "the largest cosine to an expert in the ledger",
    "relative_norm": "the expert's norm over the mean norm of the experts in the store",
    "norm": "the norm of the expert's task vector",
    "scale": "the scale of the merged task vector after the step",
    "lambda": "λ, 1/scale, after the step",
    "distance": "the distance of the merged model to the base",
    "held": "the share of the expert that its entry in the ledger holds",
    "damage": "the largest predicted damage of an expert in the ledger",
    "score": "the score by the --evaluate command",
}
LEDGER_ONLY = ("held", "damage", "max_cosine")
NOT_IN_LEDGERS = ("scale", "lambda", "distance")
"""Quantities that the readout of a ledger decides"""
_COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_GATE = re.compile(rf"\s*(\w+)\s*(>=|<=|>|<)\s*({NUMBER})\s*")


class GateError(MergestreamError):
    """One or more gates failed; the message has one line for each."""

    exit_code: ClassVar[int] = 4
    kind = "gate"

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
        """Read a condition; raises if it is not one."""
        match = _GATE.fullmatch(text)
        if not match or match[1] not in QUANTITIES or not math.isfinite(float(match[3])):
            close = did_you_mean(match[1], QUANTITIES) if match and match[1] not in QUANTITIES else ""
            raise UsageError(
                f"gate {text!r} is not a condition such as 'kept>=0.6'{close} (the quantities: {', '.join(QUANTITIES)})"
            )
        return cls(match[1], match[2], float(match[3]))

    def __str__(self) -> str:
        return f"{self.quantity}{self.comparison}{self.bound:g}"

    def holds(self, value: float | None) -> bool:
        """Whether a value passes; None (nothing to compare with, as for the first expert) does, NaN does not."""
        return value is None or _COMPARISONS[self.comparison](value, self.bound)


@dataclass(frozen=True)
class Gatekeeper:
    """The gates of one ``add``, and the command that gives the score."""

    gates: tuple[Gate, ...] = ()
    command: str | None = None
    timeout: float | None = None
    """Seconds after which the command is stopped"""

    @classmethod
    def of(
        cls, gates: Sequence[str], command: str | None, manifest: Manifest, timeout: float | None = None
    ) -> Gatekeeper:
        """Read the gates; raises before any work is done if the store cannot have one of them."""
        parsed = tuple(Gate.parse(text) for text in gates)
        has_entries = manifest.is_ledger
        for gate in parsed:
            if has_entries and gate.quantity in NOT_IN_LEDGERS:
                raise UsageError(
                    f"a ledger has no {gate.quantity} before it is exported; gate on damage or held instead"
                )
            if not has_entries and gate.quantity in LEDGER_ONLY:
                raise UsageError(
                    f"only a ledger has {gate.quantity}, and this store uses {manifest.method}; gate on kept instead"
                )
        if command is not None:
            check_command(command)
        elif any(gate.quantity == "score" for gate in parsed):
            raise UsageError("a gate on the score needs a command that gives it; pass --evaluate CMD")
        return cls(parsed, command, timeout)

    def asks_for(self, *quantities: str) -> bool:
        """Whether a gate needs one of these quantities."""
        return any(gate.quantity in quantities for gate in self.gates)

    def review(self, candidate: Candidate) -> Expert:
        """Check a step against all gates, the score last; returns its entry with the values that passed."""
        expert, evaluation = candidate.expert, None
        passed = check(self.gates, self._measure(candidate), expert.source)
        if self.command is not None:
            evaluation = _evaluate_candidate(candidate, self.command, self.timeout)
            passed += check(self.gates, {"score": evaluation["score"]}, expert.source)
        return replace(expert, gates=passed, evaluation=evaluation)

    def _measure(self, candidate: Candidate) -> dict[str, float | None]:
        """All quantities except the score; the expensive ones only if a gate needs them."""
        expert, store = candidate.expert, candidate.store
        found = {"kept": expert.kept, "norm": expert.norm, "distance": expert.distance}
        found |= {"scale": expert.scale, "lambda": expert.lambda_, "relative_norm": None}
        if store.history:
            mean = candidate.mean_norm_before
            found["relative_norm"] = expert.norm / mean if mean else math.nan
        if self.asks_for(*LEDGER_ONLY):
            with candidate.snapshot() as snapshot:
                found["held"] = read_survival(snapshot.storage, snapshot.manifest, snapshot.reading().held()).total[-1]
                if self.asks_for("damage", "max_cosine"):
                    among = snapshot.reading(store.engine).interference(store.engine, store.progress)
                    assert among is not None
                    found["damage"] = max((value for value in among.damage if value is not None), default=None)
                    cosines = [value for value in among.cosines[-1][:-1] if value is not None]
                    found["max_cosine"] = max(cosines, default=math.nan) if store.history else None
        return found


def check(gates: Sequence[Gate], values: Mapping[str, float | None], source: str) -> list[PassedGate]:
    """The gates on these quantities, each with its value, for the history; raises if one fails."""
    gates, failed = [gate for gate in gates if gate.quantity in values], []
    for gate in gates:
        value = values[gate.quantity]
        if not gate.holds(value):
            found = "is not known" if value is None or math.isnan(value) else f"is {value:.4g}"
            what = QUANTITIES[gate.quantity]
            failed.append(f"{one_line(source)} was not added: {what} {found}, and the gate asks for {gate}")
    if failed:
        raise GateError("\n".join(failed))
    return [{"gate": str(gate), "value": values[gate.quantity]} for gate in gates]


def evaluate(command: str, model: Path, scores: Path, timeout: float | None = None) -> Evaluation:
    """Run a user's command on a model; the score is in the files at ``scores``, or is the last number printed."""
    try:
        printed = run_command(command, timeout, model=model, scores=scores, show_errors=True)
    except CommandError as error:
        raise CommandError(f"{error}; nothing was added") from error
    if SCORES in command:
        return read_evaluation(command, scores)
    score = last_number(printed)
    if score is None or not math.isfinite(score):
        printed = "no number" if score is None else f"{score} as its last number"
        raise CommandError(f"--evaluate {command!r} printed {printed}; nothing was added")
    return {"command": command, "score": score}


def _evaluate_candidate(candidate: Candidate, command: str, timeout: float | None) -> Evaluation:
    """Export the model that the step would give to a temporary directory, and evaluate it."""
    store = candidate.store
    with store.storage.workspace() as directory:
        output = Output(directory / "model")
        with candidate.snapshot() as snapshot, output.draft() as draft:
            write_model(snapshot, Target(draft, output, store.engine, store.progress))
        scores = directory / "scores"
        scores.mkdir()
        return evaluate(command, output.path, scores, timeout)
