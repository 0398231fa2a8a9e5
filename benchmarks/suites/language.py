"""The ``language`` suite: SmolLM2-135M-Instruct on eight tasks with one right answer each, experts as LoRA adapters.

An answer is right if greedy decoding gives exactly it, or, in tasks with choices, if it is the likeliest choice. The
suite also measures the perplexity on unrelated text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.suites.cache import cache_directory, cached_directory, key_of
from benchmarks.suites.causal import SMOLLM2, CausalBase, Encoded, answer_loss, encode, perplexity, share_right
from benchmarks.suites.experts import ExpertSuite
from benchmarks.suites.fetch import fetch
from benchmarks.suites.language_tasks import TASKS, LanguageTask, Split
from benchmarks.suites.lora import LoRARecipe
from benchmarks.suites.text import ORANGE, tab_rows
from benchmarks.suites.training import fine_tune
from mergestream.files import write_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PERPLEXITY = "perplexity"
TALES = replace(ORANGE, keep=("grimm-tales.tab",))
PASSAGES, PASSAGE_TOKENS = 32, 128


def neutral_texts() -> list[str]:
    """Take passages from each of Grimm's tales."""
    rows = tab_rows(fetch(TALES) / "orangecontrib/text/datasets/grimm-tales.tab", "Content", "Title")
    return [text[1000:2000].partition(" ")[2] for _, text, _ in rows]


@dataclass
class LanguageSuite(ExpertSuite):
    """A generative base, and tasks of questions and answers in plain text."""

    backbone: CausalBase
    all_tasks: Sequence[LanguageTask]
    test_limit: int = 200
    beside: ClassVar[tuple[str, ...]] = (PERPLEXITY,)

    def read(self, task: str) -> Split:
        return cached_examples(self.data_of, self._tasks[task])

    def steps(self, task: str) -> int:
        return self.recipe.steps(len(self.data(task)[0]))

    def encoded(self, task: str, question: str, answer: str) -> Encoded:
        return encode(self.backbone.tokenizer, self._tasks[task].prompt(question), answer)

    def trained(self, start: Path, task: str) -> torch.nn.Module:
        train, _ = self.data(task)

        def loss(model: torch.nn.Module, batch: list[int]) -> Tensor:
            return answer_loss(model, [self.encoded(task, *train[index]) for index in batch])

        return fine_tune(self.load(start), len(train), loss, self.recipe)

    def accuracy(self, model: Path, task: str) -> float:
        return self.score(self.loaded(model), task)

    def score(self, model: torch.nn.Module, task: str) -> float:
        if task == PERPLEXITY:
            return perplexity(model, self.passages())
        test = self.data(task)[1][: self.test_limit]
        choices = [self.encoded(task, "", choice).answer[0] for choice in self._tasks[task].choices]
        return share_right(model, [self.encoded(task, *example) for example in test], choices)

    def passages(self) -> list[list[int]]:
        encoded = self.backbone.tokenizer.encode_batch(neutral_texts())
        return [each.ids[:PASSAGE_TOKENS] for each in encoded if len(each.ids) >= PASSAGE_TOKENS][:PASSAGES]

    def training_key(self, task: str) -> list[Any]:
        return [*super().training_key(task), *self._precision()]

    def evaluation_key(self, task: str) -> str:
        if task == PERPLEXITY:
            return key_of(PERPLEXITY, TALES.sha256, PASSAGES, PASSAGE_TOKENS, self.base().name, *self._precision())
        return key_of(self._tasks[task].key, self.base().name, self.test_limit, *self._precision())

    def _precision(self) -> list[str]:
        return ["bfloat16"] if self.backbone.bfloat16 else []

    def protocol(self) -> dict[str, Any]:
        return {
            "recipe": asdict(self.recipe),
            "layers_multiply_in": "bfloat16" if self.backbone.bfloat16 else "float32",
            "steps": {task: self.steps(task) for task in self.tasks},
            "scored_by": {
                task: "likeliest of the choices" if self._tasks[task].choices else "exact match of greedy decoding"
                for task in self.tasks
            },
            "choices": {task: len(self._tasks[task].choices) for task in self.tasks if self._tasks[task].choices},
            "test_samples": {task: len(self.data(task)[1][: self.test_limit]) for task in self.tasks},
            PERPLEXITY: f"{PASSAGES} passages of {PASSAGE_TOKENS} tokens of Grimm's tales",
        }


def cached_examples(suite: str, task: LanguageTask) -> Split:
    def make(directory: Path) -> None:
        write_json(directory / "examples.json", task.load())

    directory = cached_directory(cache_directory() / "data" / suite / f"{task.name}-{task.key}", make)
    train, test = json.loads((directory / "examples.json").read_text("utf-8"))
    return train, test


RECIPE = LoRARecipe(samples=4000, epochs=1, batch_size=16, learning_rate=5e-4)
SUITE = LanguageSuite("language", SMOLLM2, TASKS, RECIPE)
