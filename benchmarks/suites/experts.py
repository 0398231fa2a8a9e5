"""What all suites that train their own experts share: each is trained once, by one recipe, and cached."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from benchmarks.suites.lora import LoRARecipe, adapted, is_adapter
from benchmarks.suites.training import Recipe, save_model
from mergestream.errors import UsageError
from mergestream.evaluation.cache import cache_directory, cached_directory, key_of
from mergestream.evaluation.suites.base import Suite, first_tasks
from mergestream.evaluation.workers import report, run_parallel

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

OnStep = Callable[[], None]


class Pretrained(Protocol):
    """A pretrained model: where its weights are, and how it is loaded."""

    @property
    def name(self) -> str: ...

    def directory(self) -> Path:
        """The base model in the hub's layout."""

    def load(self, directory: Path) -> torch.nn.Module: ...


class KeyedTask(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def key(self) -> str:
        """Of all that decides the task's data."""


@dataclass
class ExpertSuite(Suite):
    """It has the first ``count`` of ``all_tasks``, and ``test_limit`` test samples of each are scored."""

    name: str
    backbone: Pretrained
    all_tasks: Sequence[KeyedTask]
    recipe: Recipe
    test_limit: int = 500
    count: int = 8
    data_of: str = ""  # the suite whose data these are, where it is another
    can_fine_tune: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.model_name = self.backbone.name
        self.data_of = self.data_of or self.name
        self._tasks: dict[str, Any] = {task.name: task for task in self.all_tasks[: self.count]}
        self.tasks = tuple(self._tasks)
        self._loaded: dict[str, Any] = {}
        self._model: tuple[Path, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": {}, "_model": None}  # a worker process reads from the cache itself

    @abstractmethod
    def read(self, task: str) -> Any:
        """The task's prepared data, from the cache or into it."""

    @abstractmethod
    def steps(self, task: str) -> int:
        """How many steps the recipe takes."""

    @abstractmethod
    def trained(self, start: Path, task: str, on_step: OnStep = lambda: None) -> torch.nn.Module:
        """What the recipe trains of the model in ``start``, fine-tuned."""

    def training_key(self, task: str) -> list[Any]:
        """What decides an expert beside the recipe."""
        return [self._tasks[task].key, self.base().name]

    def limited(self, tasks: int | None = None, test_limit: int | None = None) -> Self:
        count = self.count if tasks is None else len(first_tasks(self.name, self.all_tasks, tasks))
        return replace(self, count=count, test_limit=test_limit or self.test_limit)

    def with_lora(self) -> Self:
        """The same suite, but its experts are adapters."""
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

    def train(self, task: str, on_step: OnStep = lambda: None) -> Path:
        def make(directory: Path) -> None:
            self.recipe.save(self.trained(self.base(), task, on_step), self.base(), directory)

        return cached_directory(self.expert_directory(task), make)

    def fine_tune(self, start: Path, task: str, output: Path) -> None:
        save_model(self.recipe.merged(self.trained(start, task)), self.base(), output)

    def load(self, directory: Path) -> torch.nn.Module:
        """A whole model, also where the directory holds but an adapter of the base."""
        if is_adapter(directory):
            return adapted(self.backbone.load(self.base()), directory)
        return self.backbone.load(directory)

    def loaded(self, directory: Path) -> Any:
        """The same, kept until another is asked for: a model is scored on one task after the other."""
        if self._model is None or self._model[0] != directory:
            self._model = (directory, self.load(directory))
        return self._model[1]

    def prepare(self, on_event: Callable[[str, int, int], None], workers: int) -> None:
        for task in self.tasks:
            self.data(task)
        missing = [(self, task) for task in self.tasks if not self.expert_directory(task).is_dir()]
        for _ in run_parallel(_train, missing, workers, on_event):
            pass

    def data(self, task: str) -> Any:
        if task not in self._tasks:
            raise UsageError(f"the suite {self.name} has no task {task!r}; it has {', '.join(self.tasks)}")
        if task not in self._loaded:
            self._loaded[task] = self.read(task)
        return self._loaded[task]


def _train(suite: ExpertSuite, task: str) -> None:
    total = suite.steps(task)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        report(task, done, total)

    report(task, 0, total)
    suite.train(task, step)
