"""Classification suites that train their experts: data, heads fixed before training, everything cached."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.suites.cache import cache_directory, cached_directory, key_of, written_whole
from benchmarks.suites.encoders import Head
from benchmarks.suites.experts import ExpertSuite
from benchmarks.suites.heads import all_features, class_mean_head, label_text_head, pick
from benchmarks.suites.training import fine_tune
from mergestream.errors import MergestreamError

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
    sources: tuple[str, ...]  # digests of the source packages
    load: Callable[[], Data]
    prompts: tuple[str, ...] = ()  # texts that name the classes, if the head is made from them
    version: int = 1  # version of the loader, part of every cache key

    @property
    def key(self) -> str:
        return key_of(self.name, self.classes, self.sources, self.prompts, self.version)


@dataclass
class TrainedSuite(ExpertSuite):
    """A suite with heads from the base model and experts trained for these heads."""

    backbone: Backbone
    all_tasks: Sequence[Task]
    head_samples: int = 1500

    def read(self, task: str) -> Data:
        return cached_data(self.data_of, self._tasks[task])

    def training_key(self, task: str) -> list[Any]:
        return [*super().training_key(task), self.head_samples]

    def trained(self, start: Path, task: str) -> torch.nn.Module:
        import torch

        data, head = self.data(task), self.head(task)

        def loss(model: torch.nn.Module, batch: list[int]) -> Tensor:
            logits = head(self.backbone.features(model, pick(data.train_items, batch)))
            return torch.nn.functional.cross_entropy(logits, data.train_labels[batch])

        return fine_tune(self.load(start), len(data.train_items), loss, self.recipe)

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
        features = all_features(self.backbone, self.loaded(model), data.test_items[: self.test_limit])
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
    """A task's prepared data; texts are stored as JSON, images as uint8 tensors."""
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
