"""A suite that trains its own experts, with a tiny vision transformer and made-up images."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.finetuning import add_row
from benchmarks.suites.backbones import DINOv2Small, dinov2_config, write_checkpoint
from benchmarks.suites.cache import cache_directory, cached_directory
from benchmarks.suites.encoders import Head, load_pretrained
from benchmarks.suites.heads import class_mean_head
from benchmarks.suites.trained import Data, Task, TrainedSuite
from benchmarks.suites.training import Recipe
from mergestream.evaluation.bench import Plan, run_bench
from mergestream.evaluation.rows import parse_rows


class TinyBackbone(DINOv2Small):
    name = "tiny"
    image_size = 28

    def directory(self) -> Path:
        from transformers import Dinov2Config, Dinov2Model

        def make(directory: Path) -> None:
            torch.manual_seed(0)
            config = {**dinov2_config(28), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
            model = Dinov2Model(Dinov2Config(**config))
            write_checkpoint(directory, model.state_dict(), config)

        return cached_directory(cache_directory() / "bases" / "tiny", make)


def stripes(vertical: bool) -> Data:
    """Which third of the image is brighter: rows or columns of it."""
    generator = torch.Generator().manual_seed(int(vertical))

    def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(3, (count,), generator=generator)
        images = torch.randint(0, 120, (count, 3, 28, 28), generator=generator, dtype=torch.uint8)
        for image, label in zip(images, labels, strict=True):
            lines = slice(int(label) * 9, int(label) * 9 + 9)
            image[(slice(None), slice(None), lines) if vertical else (slice(None), lines)] += 130
        return images, labels

    train, test = draw(96), draw(60)
    return Data(train[0], train[1], test[0], test[1])  # type: ignore[arg-type]


class Misnamed(TrainedSuite):
    """The head calls every class by another's name, so that the base is wrong and there is something to learn."""

    def head(self, task: str) -> Head:
        head = super().head(task)
        return Head(head.weight.roll(1, 0), head.mean, head.std, head.scale)


def tiny_trained_suite() -> TrainedSuite:
    tasks = [
        Task(name, ("a", "b", "c"), ("made up",), partial(stripes, vertical))
        for name, vertical in (("rows", False), ("columns", True))
    ]
    return Misnamed(
        "tiny", TinyBackbone(), tasks, Recipe(samples=96, epochs=4, learning_rate=1e-3), 40, head_samples=60
    )


@pytest.mark.slow
def test_experts_are_trained_merged_and_scored(tmp_path: Path) -> None:
    suite = tiny_trained_suite()
    plan = Plan(parse_rows("average"), orders=1, workers=1)
    run_bench(suite, plan, tmp_path / "out", lambda *_: None)
    results = add_row(suite, tmp_path / "out")
    assert all(results.fine_tuned[task] > results.pretrained[task] for task in suite.tasks)
    assert {run.method for run in results.runs} == {"average", "continual_finetuning"}
    tuned = results.methods["continual_finetuning"][0]
    first, last = tuned.order[0], tuned.order[-1]
    # its first model is the first task's expert: the same recipe from the same start
    assert tuned.steps[0]["accuracies"][first] == results.fine_tuned[first]
    assert tuned.steps[1]["accuracies"][last] > results.pretrained[last]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["settings"]["protocol"]["test_samples"] == {
        "rows": 40,
        "columns": 40,
    }


def test_training_is_deterministic_and_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mergestream.evaluation.streams import model_digest

    suite = tiny_trained_suite()
    expert = suite.expert("rows")
    assert (expert / "config.json").is_file()
    assert isinstance(load_pretrained("Dinov2Model", expert), torch.nn.Module)
    written = (expert / "model.safetensors").stat().st_mtime_ns
    assert tiny_trained_suite().expert("rows") == expert
    assert (expert / "model.safetensors").stat().st_mtime_ns == written
    monkeypatch.setenv("MERGESTREAM_CACHE", str(tmp_path / "other-cache"))
    again = tiny_trained_suite().expert("rows")
    assert again != expert and model_digest(again) == model_digest(expert)


def test_heads_come_from_the_base_and_stay(tmp_path: Path) -> None:
    suite = tiny_trained_suite()
    head = suite.head("rows")
    suite.expert("rows")
    assert torch.equal(suite.head("rows").weight, head.weight)


def test_a_class_mean_head_finds_the_nearest_mean(tmp_path: Path) -> None:
    features = torch.tensor([[5.0, 1.0], [5.0, -1.0], [-5.0, 1.0], [-5.0, -1.0]])
    head = class_mean_head(features, torch.tensor([0, 0, 1, 1]), 2)
    head.save(tmp_path / "head.safetensors")
    logits = Head.load(tmp_path / "head.safetensors")(features)
    assert torch.equal(logits.argmax(1), torch.tensor([0, 0, 1, 1]))
    assert logits.max() <= 20
