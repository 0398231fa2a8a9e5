"""What the benchmark asks of a suite, and the kind of suite that trains its own experts."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mergestream.errors import MergestreamError, UsageError
from mergestream.evaluation.cache import cache_directory, cached_directory, key_of, written_whole

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.evaluation.backbones import Backbone
    from mergestream.evaluation.heads import Head
    from mergestream.evaluation.training import Recipe


class Suite(ABC):
    """A base model, an expert for every task, and a way to score any model on any task."""

    name: str
    model_name: str
    tasks: tuple[str, ...]
    can_fine_tune: ClassVar[bool] = False  # whether there is training data, for continual fine-tuning

    @abstractmethod
    def base(self) -> Path: ...

    @abstractmethod
    def expert(self, task: str) -> Path: ...

    @abstractmethod
    def accuracy(self, model: Path, task: str) -> float:
        """Accuracy, between 0 and 1, of the model in that directory."""

    @abstractmethod
    def evaluation_key(self, task: str) -> str:
        """A digest of all that decides the accuracy besides the model: test data, head, protocol."""

    def protocol(self) -> dict[str, Any]:
        """What a reader needs to know about how the numbers were made (goes into the results)."""
        return {}

    def prepare(self, on_event: Callable[[str, int, int], None], workers: int) -> None:
        """Have all experts at hand before the streams start; ``on_event(task, steps done, steps in all)``."""
        for task in self.tasks:
            self.expert(task)

    def fine_tune(self, start: Path, task: str, output: Path) -> None:
        """Train on from ``start`` with the experts' recipe (continual fine-tuning)."""
        raise UsageError(f"the suite {self.name} has no training data, so it cannot be fine-tuned continually")


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


class TrainedSuite(Suite):
    """A suite whose heads come from the base model and whose experts are trained here, once, and cached."""

    can_fine_tune = True

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        tasks: Sequence[Task],
        recipe: Recipe,
        head_samples: int = 1500,
        test_limit: int = 500,
    ) -> None:
        self.name, self.backbone, self.recipe = name, backbone, recipe
        self.model_name = backbone.name
        self.head_samples, self.test_limit = head_samples, test_limit
        self._tasks = {task.name: task for task in tasks}
        self.tasks = tuple(self._tasks)
        self._loaded: dict[str, Data] = {}
        self._model: tuple[Path, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": {}, "_model": None}  # a worker process reads from the cache itself

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
            self._fine_tune(self.base(), task, directory, on_step)

        return cached_directory(self.expert_directory(task), make)

    def fine_tune(self, start: Path, task: str, output: Path) -> None:
        self._fine_tune(start, task, output, lambda: None)

    def _fine_tune(self, start: Path, task: str, output: Path, on_step: Callable[[], None]) -> None:
        from mergestream.evaluation.training import fine_tune

        data, head = self.data(task), self.head(task)
        fine_tune(self.backbone, start, data.train_items, data.train_labels, head, self.recipe, output, on_step)

    def prepare(self, on_event: Callable[[str, int, int], None], workers: int) -> None:
        from mergestream.evaluation.workers import train_experts

        for task in self.tasks:
            self.data(task)
        train_experts(self, [task for task in self.tasks if not self.expert_directory(task).is_dir()],
                      on_event, workers)  # fmt: skip

    def data(self, task: str) -> Data:
        if task not in self._tasks:
            raise UsageError(f"the suite {self.name} has no task {task!r}; it has {', '.join(self.tasks)}")
        if task not in self._loaded:
            self._loaded[task] = cached_data(self.name, self._tasks[task])
        return self._loaded[task]

    def head(self, task: str) -> Head:
        from mergestream.evaluation.heads import Head, all_features, class_mean_head, label_text_head

        known = self._tasks[task]
        key = key_of(known.key, self.base().name, self.head_samples)
        path = cache_directory() / "heads" / self.name / f"{task}-{key}.safetensors"
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
        from mergestream.evaluation.heads import all_features

        data = self.data(task)
        labels = data.test_labels[: self.test_limit]
        if self._model is None or self._model[0] != model:  # a model is scored on one task after the other
            self._model = (model, self.backbone.load(model))
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
