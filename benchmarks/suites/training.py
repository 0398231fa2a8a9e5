"""The recipe that makes an expert of a pretrained model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """AdamW without weight decay, a tenth of the steps warming up, then cosine decay to zero; no dropout."""

    samples: int = 2500
    epochs: int = 2
    batch_size: int = 32
    learning_rate: float = 1e-4
    seed: int = 0

    def steps(self, available: int) -> int:
        return self.epochs * -(-min(self.samples, available) // self.batch_size)

    def trainable(self, model: torch.nn.Module) -> torch.nn.Module:
        """What is trained of a model: here all of it."""
        return model

    def merged(self, trained: torch.nn.Module) -> torch.nn.Module:
        """The whole model again."""
        return trained

    def save(self, trained: torch.nn.Module, base: Path, output: Path) -> None:
        """Write the expert; ``base`` is what it was trained from."""
        save_model(trained, base, output)


def fine_tune(
    start: torch.nn.Module,
    available: int,
    loss_of: Callable[[torch.nn.Module, list[int]], Tensor],
    recipe: Recipe,
    on_step: Callable[[], None] = lambda: None,
) -> torch.nn.Module:
    """What the recipe trains of ``start``, fine-tuned on the first ``recipe.samples`` of the ``available`` samples;
    ``loss_of`` a model and the numbers of some of them is what it makes small."""
    import torch

    model = recipe.trainable(start)
    count = min(recipe.samples, available)
    total = recipe.steps(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    warm = max(1, total // 10)

    def rate(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + float(torch.cos(torch.tensor(torch.pi * (step - warm) / max(1, total - warm)))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(recipe.seed)
    for _ in range(recipe.epochs):
        for batch in torch.randperm(count, generator=generator).split(recipe.batch_size):
            loss = loss_of(model, batch.tolist())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            on_step()
    return model


def save_model(model: torch.nn.Module, base: Path, output: Path) -> None:
    """Write a directory like the base's."""
    model.save_pretrained(output)  # type: ignore[operator]
    for extra in base.iterdir():  # the tokenizer and whatever else makes the directory complete
        if extra.is_file() and not (output / extra.name).exists() and extra.suffix == ".json":
            shutil.copy(extra, output / extra.name)
