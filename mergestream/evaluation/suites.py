"""Suites: a base, an expert for every task, and how to score a model on a task; in a Python file."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, SupportsIndex, TypeVar

from mergestream import download
from mergestream.digest import text_digest
from mergestream.errors import MergestreamError, UsageError

T = TypeVar("T")
CHECKOUT = Path(__file__).resolve().parents[2] / "benchmarks" / "suites"
"""Our suites; only a checkout of the repository has them"""


class Suite(ABC):
    """A base model, an expert for every task, and a way to score any model on any task."""

    name: str
    model_name: str
    tasks: tuple[str, ...]
    beside: ClassVar[tuple[str, ...]] = ()
    """Other measures of a merged model, such as perplexity; ``accuracy`` takes their names in place of a task"""
    reopened: tuple[Callable[..., Suite], tuple[Any, ...]] | None = None
    """The call that loads a suite from its file again, in another process"""

    @abstractmethod
    def base(self) -> Path:
        """Return the directory of the base."""

    @abstractmethod
    def expert(self, task: str) -> Path:
        """Return the directory of a task's expert."""

    @abstractmethod
    def accuracy(self, model: Path, task: str) -> float:
        """Return the accuracy of the model in that directory, between 0 and 1; or another measure."""

    @abstractmethod
    def evaluation_key(self, task: str) -> str:
        """Return a digest of everything besides the model that decides the accuracy: data, head, protocol."""

    def protocol(self) -> dict[str, Any]:
        """Describe how the numbers are made, for the results."""
        return {}

    def prepare(self, on_progress: Callable[[str, int, int], None], workers: int) -> None:
        """Make all experts before the streams start; ``on_progress(task, parts done, total)`` shows it."""
        for task in self.tasks:
            self.expert(task)

    def limited(self, tasks: int | None = None, test_limit: int | None = None) -> Suite:
        """Return the suite with its first ``tasks`` tasks and ``test_limit`` samples each; None changes nothing."""
        for option, value in (("--tasks", tasks), ("--test-limit", test_limit)):
            if value is not None:
                raise UsageError(f"the suite {self.name} cannot be limited; leave {option} out")
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        # Another process cannot import what a suite's file defines, but it can load the file.
        return self.reopened or super().__reduce_ex__(protocol)


def first_tasks(suite: str, tasks: Sequence[T], count: int) -> Sequence[T]:
    """Return the first ``count`` tasks of a suite; a stream needs two."""
    if not 2 <= count <= len(tasks):
        raise UsageError(f"the suite {suite} has between 2 and {len(tasks)} tasks, not {count}")
    return tasks[:count]


@dataclass
class CustomSuite(Suite):
    """A suite of a user; paths are relative to its file."""

    name: str
    base_model: str | Path
    experts: Mapping[str, str | Path]
    """By task: a directory or a hub id"""
    score: Callable[[Path, str], float]
    """Returns the accuracy of the model in a directory on a task, between 0 and 1"""
    model_name: str = "own model"
    source: Path = field(default_factory=lambda: Path("suite.py"))

    def __post_init__(self) -> None:
        self.tasks = tuple(self.experts)
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise UsageError(f"{self.name!r} is no valid name of a suite; use letters, digits, '-', '_', '.'")
        if len(self.tasks) < 2:
            raise UsageError("a suite needs at least two tasks")

    def limited(self, tasks: int | None = None, test_limit: int | None = None) -> Suite:
        super().limited(test_limit=test_limit)  # it is scored on all its test data
        if tasks is None:
            return self
        return replace(self, experts=dict(first_tasks(self.name, list(self.experts.items()), tasks)))

    def base(self) -> Path:
        return self._model(self.base_model)

    def expert(self, task: str) -> Path:
        return self._model(self.experts[task])

    def _model(self, name: str | Path) -> Path:
        """Return a directory relative to the suite's file, or download a hub id."""
        path = self.source.resolve().parent / name
        if path.is_dir():
            return path
        if path.exists() or "://" in str(name):
            raise MergestreamError(f"{self.source}: {name} is not a directory with a model")
        return download(str(name))[0]

    def accuracy(self, model: Path, task: str) -> float:
        try:
            value = float(self.score(model, task))
        except Exception as error:  # in the user's function
            raise MergestreamError(
                f"{self.source}: the task {task} cannot be scored: {_describe_error(error)}"
            ) from error
        if not 0 <= value <= 1:
            raise MergestreamError(f"{self.source}: the accuracy of the task {task} is {value:g}, not between 0 and 1")
        return value

    def evaluation_key(self, task: str) -> str:
        """The code counts: the suite's file and the Python files beside it."""
        files = {self.source, *self.source.resolve().parent.glob("*.py")}
        return key_of(task, sorted(file.read_text("utf-8", errors="replace") for file in files if file.is_file()))

    def protocol(self) -> dict[str, Any]:
        return {"suite_file": self.source.name}


def open_suite(name: str | Path, tasks: int | None = None, test_limit: int | None = None) -> Suite:
    """Open a suite by file, or by the name of one in a checkout; None keeps a suite's default."""
    path = Path(name)
    if path.suffix != ".py":
        path = CHECKOUT / f"{str(name).replace('-', '_')}.py"
    if not path.is_file():
        raise UsageError(
            f"there is no suite {name}: name a Python file that defines SUITE, or in a checkout of mergestream's "
            "repository a file of benchmarks/suites, such as text or vision-lora"
        )
    suite = getattr(_import_file(path), "SUITE", None)
    if not isinstance(suite, Suite):
        raise UsageError(f"{path} defines no SUITE; write SUITE = CustomSuite(…), or an instance of another Suite")
    if isinstance(suite, CustomSuite):
        suite = replace(suite, source=path)
    suite = suite.limited(tasks, test_limit)
    suite.reopened = (open_suite, (path.resolve(), tasks, test_limit))
    return suite


def _import_file(path: Path) -> Any:
    """Import a file, which may import other files of its directory or package, now or later."""
    name = f"{path.stem}@{key_of(str(path.resolve()))}"  # no import statement can name it
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    root = path.resolve().parent
    while (root / "__init__.py").is_file():
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the types of their fields there
    try:
        spec.loader.exec_module(module)
    except MergestreamError as error:
        raise UsageError(f"{path}: {error}") from error
    except Exception as error:
        raise UsageError(f"{path} cannot be loaded: {_describe_error(error)}") from error
    return module


def _describe_error(error: Exception) -> str:
    """Describe an error in a user's code on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def cache_directory() -> Path:
    """Return ``$MERGESTREAM_CACHE``, else ``mergestream`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MERGESTREAM_CACHE") or Path(home) / "mergestream")


def key_of(*parts: Any) -> str:
    """Return a short digest of ``parts``, which may be anything that JSON can write."""
    return text_digest(json.dumps(parts, sort_keys=True, ensure_ascii=False))[:16]
