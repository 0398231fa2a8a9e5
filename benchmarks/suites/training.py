"""The recipe that fine-tunes a pretrained model into an expert."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """AdamW without weight decay or dropout; warm-up for a tenth of the steps, then cosine decay to zero."""

    samples: int = 2500
    epochs: int = 2
    batch_size: int = 32
    learning_rate: float = 1e-4
    seed: int = 0

    def steps(self, available: int) -> int:
        return self.epochs * -(-min(self.samples, available) // self.batch_size)

    def trainable(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the trained part of a model: here all of it."""
        return model

    def merged(self, trained: torch.nn.Module) -> torch.nn.Module:
        """Return the whole model."""
        return trained

    def save(self, trained: torch.nn.Module, base: Path, output: Path) -> None:
        """Save the expert; ``base`` is the model it was trained from."""
        save_model(trained, base, output)


def fine_tune(
    start: torch.nn.Module,
    available: int,
    loss_of: Callable[[torch.nn.Module, list[int]], Tensor],
    recipe: Recipe,
) -> torch.nn.Module:
    """Fine-tune ``start`` on the first ``recipe.samples`` of the ``available`` samples; returns the trained part.

    ``loss_of(model, indices)`` is the loss on some samples.
    """
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
        order = torch.randperm(count, generator=generator).tolist()
        for first in range(0, count, recipe.batch_size):
            loss: Any = loss_of(model, order[first : first + recipe.batch_size])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model


def save_model(model: torch.nn.Module, base: Path, output: Path) -> None:
    """Save a model with the other files of the base's directory."""
    model.save_pretrained(output)  # type: ignore[operator]
    for extra in base.iterdir():  # tokenizer and other files
        if extra.is_file() and not (output / extra.name).exists() and extra.suffix == ".json":
            shutil.copy(extra, output / extra.name)
