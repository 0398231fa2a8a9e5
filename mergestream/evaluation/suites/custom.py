"""A user's suite: a base, experts and how to score a task, in a Python or YAML file.

A task is scored by a command that prints the accuracy (``evaluate``), by a Python function (``accuracy``), or by test
data and a head in files together with a function that computes features (``features``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from mergestream import download
from mergestream.commands import CommandError, check_command, last_number, run_command
from mergestream.errors import MergestreamError, UsageError
from mergestream.evaluation.cache import key_of
from mergestream.evaluation.suites.base import Suite, first_tasks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CustomTask:
    """An expert and how to score it.

    Give ``accuracy(model directory) -> float``. Or give ``data``, a directory with ``test.safetensors`` (tensors
    ``inputs`` and ``labels``), and ``head``, a file with ``weight`` (classes × features) and optionally ``bias``; then
    the suite needs ``features``.
    """

    expert: str | Path
    accuracy: Callable[[Path], float] | None = None
    data: str | Path | None = None
    head: str | Path | None = None


@dataclass
class CustomSuite(Suite):
    """A suite from a file; its paths are relative to that file.

    ``features(model directory, inputs) -> Tensor`` is for tasks with data and a head. ``evaluate`` is a command that
    contains ``{model}`` and optionally ``{task}``.
    """

    name: str
    base_model: str | Path
    custom_tasks: Mapping[str, CustomTask]
    features: Callable[[Path, Tensor], Tensor] | None = None
    evaluate: str | None = None
    model_name: str = "own model"
    source: Path = field(default_factory=lambda: Path("suite.py"))

    def __post_init__(self) -> None:
        self.tasks = tuple(self.custom_tasks)
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise UsageError(f"{self.source}: {self.name!r} is no valid name; use letters, digits, '-', '_', '.'")
        if len(self.tasks) < 2:
            raise UsageError(f"{self.source}: a suite needs at least two tasks")
        if self.evaluate is not None:
            check_command(self.evaluate)

    def limited(self, tasks: int | None = None, test_limit: int | None = None) -> Suite:
        if test_limit is not None:
            raise UsageError(
                f"{self.source}: the suite {self.name} is scored on all its test data; leave --test-limit out"
            )
        if tasks is None:
            return self
        return replace(self, custom_tasks=dict(first_tasks(self.name, list(self.custom_tasks.items()), tasks)))

    def scored_by(self, command: str) -> Suite:
        return replace(self, evaluate=command)

    def base(self) -> Path:
        return self._model(self.base_model)

    def expert(self, task: str) -> Path:
        return self._model(self.custom_tasks[task].expert)

    def _path(self, name: str | Path) -> Path:
        return self.source.resolve().parent / name

    def _model(self, name: str | Path) -> Path:
        """Return a directory relative to the suite's file, or download a hub id."""
        path = self._path(name)
        if path.is_dir():
            return path
        if path.exists() or "://" in str(name):
            raise MergestreamError(f"{self.source}: {name} is not a directory with a model")
        return download(str(name))[0]

    def accuracy(self, model: Path, task: str) -> float:
        if self.evaluate is not None:
            return read_accuracy(run_command(self.evaluate, model=model, task=task), task, self.evaluate)
        known = self.custom_tasks[task]
        try:
            value = float(known.accuracy(model)) if known.accuracy else self._classify(known, model)
        except Exception as error:  # in the user's functions or files
            raise MergestreamError(
                f"{self.source}: the task {task} cannot be scored: {describe_error(error)}"
            ) from error
        if not 0 <= value <= 1:
            raise MergestreamError(f"{self.source}: the accuracy of the task {task} is {value:g}, not between 0 and 1")
        return value

    def _classify(self, task: CustomTask, model: Path) -> float:
        from safetensors.torch import load_file

        if self.features is None or task.data is None or task.head is None:
            raise UsageError(
                "give it an accuracy function, or data, a head and the suite's features, "
                "or pass --evaluate 'CMD {model} {task}'"
            )
        test, head = load_file(self._path(task.data) / "test.safetensors"), load_file(self._path(task.head))
        logits = self.features(model, test["inputs"]) @ head["weight"].T + head.get("bias", 0.0)
        return float((logits.argmax(1) == test["labels"]).double().mean())

    def evaluation_key(self, task: str) -> str:
        known = self.custom_tasks[task]
        paths = [self._path(known.data) / "test.safetensors"] if known.data else []
        paths += [self._path(known.head)] if known.head else []
        content = [_file_digest(path, path.stat().st_mtime_ns) for path in paths if path.is_file()]
        text = self.source.read_text("utf-8", errors="replace") if self.source.is_file() else ""
        return key_of(task, text, self.evaluate, content)

    def protocol(self) -> dict[str, Any]:
        return {"suite_file": self.source.name, "evaluate": self.evaluate}


@cache
def _file_digest(path: Path, modified: int) -> str:
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def read_accuracy(output: str, task: str, command: str) -> float:
    """Read a command's output: the last number of the last line, or the task's number in a JSON object."""
    lines = [line for line in output.splitlines() if line.strip()]
    value: Any = None
    if lines:
        try:
            value = json.loads(lines[-1])
        except (ValueError, RecursionError):
            value = last_number(lines[-1])
    if isinstance(value, dict):
        value = value.get(task)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise CommandError(
            f"--evaluate {command!r} printed no accuracy for {task}; its last line must be a number between 0 and 1, "
            'or a JSON object such as {"task": 0.93}'
        )
    return float(value)


def describe_error(error: Exception) -> str:
    """Describe an error in a user's code on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
