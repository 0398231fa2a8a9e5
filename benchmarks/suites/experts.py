"""Base class of suites that train their experts: one recipe, each expert cached."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.suites.cache import cache_directory, cached_directory, key_of
from benchmarks.suites.lora import LoRARecipe, adapted, is_adapter
from benchmarks.suites.training import Recipe, save_model
from mergestream.errors import UsageError
from mergestream.evaluation.bench import run_parallel
from mergestream.evaluation.suites import Suite, first_tasks

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


class Pretrained(Protocol):
    """A pretrained model: its directory and how to load it."""

    @property
    def name(self) -> str: ...

    def directory(self) -> Path:
        """Return the directory of the base in the hub's layout."""

    def load(self, directory: Path) -> torch.nn.Module: ...


class KeyedTask(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str:
        """Return a digest of everything that decides the task's data."""


@dataclass
class ExpertSuite(Suite):
    """The first ``count`` of ``all_tasks``, scored on ``test_limit`` test samples each."""

    name: str
    backbone: Pretrained
    all_tasks: Sequence[KeyedTask]
    recipe: Recipe
    test_limit: int = 500
    count: int = 8
    data_of: str = ""  # the suite that owns the data, if it is another

    def __post_init__(self) -> None:
        self.model_name = self.backbone.name
        self.data_of = self.data_of or self.name
        self._tasks: dict[str, Any] = {task.name: task for task in self.all_tasks[: self.count]}
        self.tasks = tuple(self._tasks)
        self._loaded: dict[str, Any] = {}
        self._model: tuple[Path, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": {}, "_model": None}  # a worker process reads the cache itself

    @abstractmethod
    def read(self, task: str) -> Any:
        """Return the task's prepared data, cached."""

    @abstractmethod
    def trained(self, start: Path, task: str) -> torch.nn.Module:
        """Fine-tune the model in ``start``; returns the trained part."""

    def training_key(self, task: str) -> list[Any]:
        """Return what decides an expert besides the recipe."""
        return [self._tasks[task].key, self.base().name]

    def limited(self, tasks: int | None = None, test_limit: int | None = None) -> Self:
        count = self.count if tasks is None else len(first_tasks(self.name, self.all_tasks, tasks))
        return replace(self, count=count, test_limit=test_limit or self.test_limit)

    def with_lora(self) -> Self:
        """Return the same suite with LoRA adapters as experts."""
        return replace(self, name=f"{self.name}-lora", recipe=LoRARecipe.like(self.recipe))

    def base(self) -> Path:
        return self.backbone.directory()

    def expert(self, task: str) -> Path:
        directory = self.expert_directory(task)
        if not directory.is_dir():
            self.train(task)
        return directory

    def expert_directory(self, task: str) -> Path:
        key = key_of(*self.training_key(task), asdict(self.recipe))
        return cache_directory() / "experts" / self.name / f"{task}-{key}"

    def train(self, task: str) -> Path:
        def make(directory: Path) -> None:
            self.recipe.save(self.trained(self.base(), task), self.base(), directory)

        return cached_directory(self.expert_directory(task), make)

    def fine_tune(self, start: Path, task: str, output: Path) -> None:
        """Train ``start`` with the experts' recipe (continual fine-tuning)."""
        save_model(self.recipe.merged(self.trained(start, task)), self.base(), output)

    def load(self, directory: Path) -> torch.nn.Module:
        """Load a full model, from a checkpoint or from an adapter of the base."""
        if is_adapter(directory):
            return adapted(self.backbone.load(self.base()), directory)
        return self.backbone.load(directory)

    def loaded(self, directory: Path) -> Any:
        """Load a model and keep it until another is needed, because it is scored on many tasks."""
        if self._model is None or self._model[0] != directory:
            self._model = (directory, self.load(directory))
        return self._model[1]

    def prepare(self, on_progress: Callable[[str, int, int], None], workers: int) -> None:
        for task in self.tasks:
            self.data(task)
        missing = [(self, task) for task in self.tasks if not self.expert_directory(task).is_dir()]
        for task in run_parallel(_train, missing, workers):
            on_progress(task, 1, 1)

    def data(self, task: str) -> Any:
        if task not in self._tasks:
            raise UsageError(f"the suite {self.name} has no task {task!r}; it has {', '.join(self.tasks)}")
        if task not in self._loaded:
            self._loaded[task] = self.read(task)
        return self._loaded[task]


def _train(suite: ExpertSuite, task: str) -> str:
    suite.train(task)
    return task
