"""The kind of suite that trains its own experts: tasks with data, heads fixed before training, everything cached."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.suites.heads import all_features, class_mean_head, label_text_head
from benchmarks.suites.lora import LoRARecipe, adapted, is_adapter
from benchmarks.suites.training import Recipe, fine_tune, save_model
from mergestream.errors import MergestreamError, UsageError
from mergestream.evaluation.cache import cache_directory, cached_directory, key_of, written_whole
from mergestream.evaluation.heads import Head
from mergestream.evaluation.suites.base import Suite, first_tasks
from mergestream.evaluation.workers import report, run_parallel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from benchmarks.suites.backbones import Backbone


@dataclass(frozen=True)
class Data:
    train_items: Sequence[Any]
    train_labels: Tensor
    test_items: Sequence[Any]
    test_labels: Tensor


@dataclass(frozen=True)
class Task:
    """A classification task: ``load`` reads the fetched packages and returns shuffled train and test splits."""

    name: str
    classes: tuple[str, ...]
    sources: tuple[str, ...]  # digests of the packages it is made from
    load: Callable[[], Data]
    prompts: tuple[str, ...] = ()  # texts that name the classes, where the head is made from them
    version: int = 1  # of the loader: part of the key of everything derived from the data

    @property
    def key(self) -> str:
        return key_of(self.name, self.classes, self.sources, self.prompts, self.version)


@dataclass
class TrainedSuite(Suite):
    """A suite whose heads come from the base model and whose experts are trained here, once, and cached.

    It has the first ``count`` of ``all_tasks``, and ``test_limit`` test samples of each are scored.
    """

    name: str
    backbone: Backbone
    all_tasks: Sequence[Task]
    recipe: Recipe
    head_samples: int = 1500
    test_limit: int = 500
    count: int = 8
    data_of: str = ""  # the suite whose data and heads these are, where it is another
    can_fine_tune: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.model_name = self.backbone.name
        self.data_of = self.data_of or self.name
        self._tasks = {task.name: task for task in self.all_tasks[: self.count]}
        self.tasks = tuple(self._tasks)
        self._loaded: dict[str, Data] = {}
        self._model: tuple[Path, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": {}, "_model": None}  # a worker process reads from the cache itself

    def limited(self, tasks: int | None = None, test_limit: int | None = None) -> TrainedSuite:
        count = self.count if tasks is None else len(first_tasks(self.name, self.all_tasks, tasks))
        return replace(self, count=count, test_limit=test_limit or self.test_limit)

    def with_lora(self) -> TrainedSuite:
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
        key = key_of(self._tasks[task].key, self.base().name, self.head_samples, asdict(self.recipe))
        return cache_directory() / "experts" / self.name / f"{task}-{key}"

    def train(self, task: str, on_step: Callable[[], None] = lambda: None) -> Path:
        def make(directory: Path) -> None:
            self.recipe.save(self._trained(self.base(), task, on_step), self.base(), directory)

        return cached_directory(self.expert_directory(task), make)

    def fine_tune(self, start: Path, task: str, output: Path) -> None:
        save_model(self.recipe.merged(self._trained(start, task)), self.base(), output)

    def _trained(self, start: Path, task: str, on_step: Callable[[], None] = lambda: None) -> torch.nn.Module:
        data, head, model = self.data(task), self.head(task), self.load(start)
        return fine_tune(self.backbone, model, data.train_items, data.train_labels, head, self.recipe, on_step)

    def load(self, directory: Path) -> torch.nn.Module:
        """A whole model, also where the directory holds but an adapter of the base."""
        if is_adapter(directory):
            return adapted(self.backbone.load(self.base()), directory)
        return self.backbone.load(directory)

    def prepare(self, on_event: Callable[[str, int, int], None], workers: int) -> None:
        for task in self.tasks:
            self.data(task)
        missing = [(self, task) for task in self.tasks if not self.expert_directory(task).is_dir()]
        for _ in run_parallel(_train, missing, workers, on_event):
            pass

    def data(self, task: str) -> Data:
        if task not in self._tasks:
            raise UsageError(f"the suite {self.name} has no task {task!r}; it has {', '.join(self.tasks)}")
        if task not in self._loaded:
            self._loaded[task] = cached_data(self.data_of, self._tasks[task])
        return self._loaded[task]

    def head(self, task: str) -> Head:
        known = self._tasks[task]
        key = key_of(known.key, self.base().name, self.head_samples)
        path = cache_directory() / "heads" / self.data_of / f"{task}-{key}.safetensors"
        if not path.is_file():
            model = self.backbone.load(self.base())
            if known.prompts:
                head = label_text_head(all_features(self.backbone, model, list(known.prompts)))
            else:
                data = self.data(task)
                labels = data.train_labels[: self.head_samples]
                features = all_features(self.backbone, model, data.train_items[: self.head_samples])
                head = class_mean_head(features, labels, len(known.classes))
            with written_whole(path) as draft:
                head.save(draft)
        return Head.load(path)

    def accuracy(self, model: Path, task: str) -> float:
        data = self.data(task)
        labels = data.test_labels[: self.test_limit]
        if self._model is None or self._model[0] != model:  # a model is scored on one task after the other
            self._model = (model, self.load(model))
        features = all_features(self.backbone, self._model[1], data.test_items[: self.test_limit])
        return float((self.head(task)(features).argmax(1) == labels).double().mean())

    def evaluation_key(self, task: str) -> str:
        return key_of(self._tasks[task].key, self.base().name, self.head_samples, self.test_limit, self.backbone.name)

    def protocol(self) -> dict[str, Any]:
        sizes = {task: len(self.data(task).test_labels[: self.test_limit]) for task in self.tasks}
        return {
            "head": "label texts" if any(t.prompts for t in self._tasks.values()) else "class means",
            "head_samples": self.head_samples,
            "recipe": asdict(self.recipe),
            "classes": {task: len(self._tasks[task].classes) for task in self.tasks},
            "test_samples": sizes,
        }


def _train(suite: TrainedSuite, task: str) -> None:
    total = suite.recipe.steps(len(suite.data(task).train_items))
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        report(task, done, total)

    report(task, 0, total)
    suite.train(task, step)


def cached_data(suite: str, task: Task) -> Data:
    """The task's prepared data; texts are kept as JSON, images as uint8 tensors."""
    import torch
    from safetensors.torch import load_file, save_file

    def make(directory: Path) -> None:
        data = task.load()
        present = set(data.train_labels.tolist())
        if present != set(range(len(task.classes))):
            raise MergestreamError(f"the task {task.name} has no training data for some of its classes")
        tensors = {"train_labels": data.train_labels, "test_labels": data.test_labels}
        for split, items in (("train", data.train_items), ("test", data.test_items)):
            if isinstance(items, list):
                (directory / f"{split}.json").write_text(json.dumps(items, ensure_ascii=False), "utf-8")
            else:
                tensors[f"{split}_items"] = torch.as_tensor(items)
        save_file(tensors, directory / "tensors.safetensors")

    directory = cached_directory(cache_directory() / "data" / suite / f"{task.name}-{task.key}", make)
    tensors = load_file(directory / "tensors.safetensors")

    def items(split: str) -> Sequence[Any]:
        if f"{split}_items" in tensors:
            stored: Sequence[Any] = tensors[f"{split}_items"]  # type: ignore[assignment]
            return stored
        listed: list[str] = json.loads((directory / f"{split}.json").read_text("utf-8"))
        return listed

    return Data(items("train"), tensors["train_labels"], items("test"), tensors["test_labels"])
