"""A suite of your own: a small Python file or YAML that names a base, experts and how to score a task.

Three ways to score, from the simplest: a command that prints the accuracy (``evaluate``), a Python function
(``accuracy``), or test data and a head in files with a function that computes features (``features``).
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.errors import MergestreamError, UsageError
from mergestream.evaluation.cache import key_of
from mergestream.evaluation.requirements import PACKAGES
from mergestream.evaluation.suites.base import Suite

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CustomTask:
    """``accuracy(model directory) -> float`` scores the task; or ``data`` (a directory with ``test.safetensors``:
    tensors ``inputs`` and ``labels``) and ``head`` (a file with ``weight``, classes × features, and perhaps
    ``bias``) do, together with the suite's ``features``."""

    expert: str | Path
    accuracy: Callable[[Path], float] | None = None
    data: str | Path | None = None
    head: str | Path | None = None


@dataclass
class CustomSuite(Suite):
    """``features(model directory, inputs) -> Tensor`` serves the tasks that have data and a head; ``evaluate`` is a
    command with ``{model}`` and perhaps ``{task}`` in it. Paths are relative to the suite's file."""

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
            raise UsageError(f"{self.source}: {self.name!r} is no name for a suite; use letters, digits, '-', '_', '.'")
        if len(self.tasks) < 2:
            raise UsageError(f"{self.source}: a suite needs at least two tasks")

    def __reduce__(self) -> Any:
        # Functions of a file that is no module cannot be sent to another process; the file's name can.
        return load_suite, (self.source, len(self.tasks), self.evaluate)

    def base(self) -> Path:
        return self._model(self.base_model)

    def expert(self, task: str) -> Path:
        return self._model(self.custom_tasks[task].expert)

    def _path(self, name: str | Path) -> Path:
        return self.source.resolve().parent / name

    def _model(self, name: str | Path) -> Path:
        """A directory beside the suite's file, or one that the hub has."""
        if self._path(name).is_dir():
            return self._path(name)
        from mergestream.checkpoints import open_checkpoint

        with open_checkpoint(str(name)) as checkpoint:
            if checkpoint.directory is None:
                raise MergestreamError(f"{self.source}: {name} is not a directory with a model")
            return checkpoint.directory

    def accuracy(self, model: Path, task: str) -> float:
        if self.evaluate is not None:
            return run_command(self.evaluate, model, task)
        try:
            value = self._measured(model, task)
        except MergestreamError:
            raise
        except Exception as error:  # of the user's own functions
            raise MergestreamError(f"{self.source}: the task {task} cannot be scored: {_reason(error)}") from error
        if not 0 <= value <= 1:
            raise MergestreamError(f"{self.source}: the accuracy of the task {task} is {value:g}, not between 0 and 1")
        return value

    def _measured(self, model: Path, task: str) -> float:
        known = self.custom_tasks[task]
        if known.accuracy is not None:
            return float(known.accuracy(model))
        if self.features is None or known.data is None or known.head is None:
            raise UsageError(
                f"{self.source}: the task {task} cannot be scored; give it an accuracy function, or data, a head and "
                "the suite's features, or pass --evaluate 'CMD {model} {task}'"
            )
        return self._classify(self.features, model, self._path(known.data), self._path(known.head))

    def _classify(self, features: Callable[[Path, Tensor], Tensor], model: Path, data: Path, head: Path) -> float:
        from safetensors.torch import load_file

        for path in (data / "test.safetensors", head):
            if not path.is_file():
                raise MergestreamError(f"{self.source}: there is no file {path}")
        test, weights = load_file(data / "test.safetensors"), load_file(head)
        for path, tensors, names in (
            (data / "test.safetensors", test, ("inputs", "labels")),
            (head, weights, ("weight",)),
        ):
            for name in names:
                if name not in tensors:
                    raise MergestreamError(f"{path} has no tensor {name!r}; it has {', '.join(sorted(tensors))}")
        logits = features(model, test["inputs"]) @ weights["weight"].T + weights.get("bias", 0.0)
        return float((logits.argmax(1) == test["labels"]).double().mean())

    def evaluation_key(self, task: str) -> str:
        known = self.custom_tasks[task]
        paths = [self._path(known.data) / "test.safetensors"] if known.data else []
        paths += [self._path(known.head)] if known.head else []
        stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file()]
        text = self.source.read_text("utf-8") if self.source.is_file() else ""
        return key_of(task, text, self.evaluate, stamps)

    def protocol(self) -> dict[str, Any]:
        return {"suite_file": self.source.name, "evaluate": self.evaluate}


def run_command(template: str, model: Path, task: str) -> float:
    """The accuracy that a command prints: the last number of its output, or the task's entry of a JSON object."""
    command = [part.replace("{model}", str(model)).replace("{task}", task) for part in shlex.split(template)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise MergestreamError(f"the command {command[0]!r} cannot be run: {error.strerror}") from None
    if done.returncode != 0:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it gave no reason")
        raise MergestreamError(f"the command {shlex.join(command)} failed: {reason.strip()}")
    return read_accuracy(done.stdout, task, shlex.join(command))


def _check_command(template: str) -> None:
    try:
        parts = shlex.split(template)
    except ValueError as error:
        raise UsageError(f"--evaluate {template!r} is no command ({str(error).lower()})") from None
    if not any("{model}" in part for part in parts):
        raise UsageError(f"--evaluate {template!r} does not say where the model goes; write {{model}} in its place")


def read_accuracy(output: str, task: str, command: str) -> float:
    lines = [line for line in output.splitlines() if line.strip()]
    value: Any = None
    if lines:
        try:
            value = json.loads(lines[-1])
        except ValueError:
            numbers = re.findall(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?", lines[-1])
            value = float(numbers[-1]) if numbers else None
    if isinstance(value, dict):
        value = value.get(task)
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise MergestreamError(
            f"the command {command} printed no accuracy for {task}; its last line must be a number between 0 and 1, "
            'or a JSON object such as {"task": 0.93}'
        )
    return float(value)


def load_suite(path: Path, tasks: int | None = None, evaluate: str | None = None) -> CustomSuite:
    """Read a suite from a Python file that defines ``SUITE``, or from YAML."""
    if not path.is_file():
        raise UsageError(f"there is no suite file {path}")
    suite = _from_python(path) if path.suffix == ".py" else _from_yaml(path)
    if tasks is not None and not 2 <= tasks <= len(suite.tasks):
        raise UsageError(f"{path}: the suite has between 2 and {len(suite.tasks)} tasks, not {tasks}")
    if evaluate is not None:
        _check_command(evaluate)
    chosen = dict(list(suite.custom_tasks.items())[:tasks])
    return replace(suite, custom_tasks=chosen, evaluate=evaluate or suite.evaluate, source=path)


def _module(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except MergestreamError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in PACKAGES:
            raise
        raise UsageError(f"{path} cannot be loaded: {_reason(error)}") from error
    return module


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _from_python(path: Path) -> CustomSuite:
    suite = getattr(_module(path), "SUITE", None)
    if not isinstance(suite, CustomSuite):
        raise UsageError(f"{path} defines no SUITE = CustomSuite(…)")
    return suite


def _from_yaml(path: Path) -> CustomSuite:
    import yaml

    try:
        content = yaml.safe_load(path.read_text("utf-8"))
        tasks = {str(name): CustomTask(**entry) for name, entry in content.pop("tasks").items()}
        for name, task in tasks.items():
            if task.accuracy is not None:
                tasks[name] = replace(task, accuracy=_function(path, str(task.accuracy)))
        if "features" in content:
            content["features"] = _function(path, content["features"])
        base = content.pop("base")
        return CustomSuite(content.pop("name", path.stem), base, tasks, source=path, **content)
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} is no description of a suite ({error!r}); see docs/evaluation.md") from None


def _function(path: Path, reference: str) -> Any:
    """``file.py:function``, beside the suite's file."""
    file, _, name = reference.partition(":")
    function = getattr(_module(path.resolve().parent / file), name, None)
    if not callable(function):
        raise UsageError(f"{path}: {reference} is not a function; write file.py:function")
    return function
