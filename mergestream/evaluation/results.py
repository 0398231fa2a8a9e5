"""Results of a benchmark: everything that was measured, in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from msgspec import convert

from mergestream.errors import MergestreamError
from mergestream.evaluation.rows import Row
from mergestream.files import write_json
from mergestream.report.scores import Matrix, average_accuracy, backward_transfer, difference, mean


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over orders of the experts."""

    mean: float
    std: float | None
    count: int

    @staticmethod
    def of(values: Sequence[float | None]) -> Spread | None:
        """The spread of the known values; None if there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return Spread(fmean(known), stdev(known) if len(known) > 1 else None, len(known))


def worst_task(matrix: Matrix) -> float | None:
    """The lowest accuracy after the last expert."""
    known = [value for value in matrix[-1] if value is not None]
    return min(known) if len(known) == len(matrix[-1]) else None


def retention(matrix: Matrix, base: Sequence[float]) -> float | None:
    """The mean change from the base on tasks whose experts are not in the store yet: A[i][j] − base[j] over j > i."""
    return mean([difference(row[j], base[j]) for i, row in enumerate(matrix) for j in range(i + 1, len(row))])


@dataclass(frozen=True)
class Run:
    """One stream: ``steps[i]`` has the accuracies after i + 1 experts, and what the store recorded."""

    method: str
    seed: int
    order: list[str]
    steps: list[dict[str, Any]]

    @property
    def matrix(self) -> list[list[float | None]]:
        """A[i][j]: the accuracy on the j-th task after i + 1 experts; None if not measured."""
        return [[step["accuracies"].get(task) for task in self.order] for step in self.steps]

    def beside(self, name: str) -> float | None:
        """Return another measure of the last model."""
        value: float | None = self.steps[-1].get("beside", {}).get(name)
        return value

    @property
    def final(self) -> dict[str, float]:
        """The accuracies of the last model."""
        accuracies: dict[str, float] = self.steps[-1]["accuracies"]
        return accuracies


@dataclass(frozen=True)
class Results:
    """All measurements of a benchmark, and how they were made."""

    suite: str
    model: str
    tasks: list[str]
    pretrained: dict[str, float]
    fine_tuned: dict[str, float]
    runs: list[Run]
    model_bytes: int
    settings: dict[str, Any] = field(default_factory=dict)
    """Command, seeds, protocol, machine, versions"""
    beside: dict[str, float] = field(default_factory=dict)
    """The suite's other measures (such as perplexity) of the base"""
    digests: dict[str, Any] = field(default_factory=dict)
    """Of the base, the experts and the test data: results of the same are not measured again; none in old results"""

    @cached_property
    def methods(self) -> dict[str, list[Run]]:
        """The runs of each method."""
        grouped: dict[str, list[Run]] = {}
        for run in self.runs:
            grouped.setdefault(run.method, []).append(run)
        return grouped

    def label(self, method: str) -> str:
        """Return the method's name in tables and figures."""
        return Row.parse(method).label

    @property
    def measures(self) -> Mapping[str, Callable[[Run], float | None]]:
        """The metrics of the paper's section 5, and the suite's other measures."""
        return {
            "acc": lambda run: average_accuracy(run.matrix),
            "bwt": lambda run: backward_transfer(run.matrix),
            "worst": lambda run: worst_task(run.matrix),
            "retention": lambda run: retention(run.matrix, [self.pretrained[task] for task in run.order]),
            **{name: partial(Run.beside, name=name) for name in self.beside},
        }

    def spread(self, method: str, measure: str) -> Spread | None:
        """Return mean and standard deviation over the orders in which it was measured; None if there are none."""
        return Spread.of([self.measures[measure](run) for run in self.methods.get(method, ())])

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return mean and standard deviation of every measure, by method; None for what was not measured."""
        return {
            method: {measure: (found := self.spread(method, measure)) and asdict(found) for measure in self.measures}
            for method in self.methods
        }

    def save(self, directory: Path) -> None:
        """Write ``results.json``."""
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "results.json", {**asdict(self), "summary": self.summary()})

    @staticmethod
    def load(directory: Path) -> Results:
        """Read ``results.json``."""
        path = directory / "results.json"
        try:
            return convert(json.loads(path.read_text("utf-8")), Results)  # keys of older versions are left out
        except FileNotFoundError:
            raise MergestreamError(
                f"{directory} has no results.json; run mergestream bench with -o {directory}"
            ) from None
        except ValueError as error:
            raise MergestreamError(f"{path} was not written by mergestream bench; choose another directory") from error
