"""Features of a base model, and classification heads made from them before fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.suites.encoders import Head

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from benchmarks.suites.backbones import Backbone


def all_features(backbone: Backbone, model: torch.nn.Module, items: Sequence[Any], batch_size: int = 64) -> Tensor:
    """Return the features of all items in order; batches have items of similar length to reduce padding."""
    import torch

    order = sorted(range(len(items)), key=lambda index: len(items[index]))
    rows: list[Tensor] = []
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            rows.append(backbone.features(model, pick(items, chosen)))
    features = torch.cat(rows)
    result = torch.empty_like(features)
    result[torch.tensor(order)] = features
    return result.clone()


def pick(items: Sequence[Any], indices: Sequence[int]) -> Sequence[Any]:
    """Return ``items[indices]`` for lists and tensors."""
    if isinstance(items, list):
        return [items[index] for index in indices]
    picked: Sequence[Any] = items[indices]  # type: ignore[call-overload]
    return picked


def class_mean_head(features: Tensor, labels: Tensor, classes: int, scale: float = 20.0) -> Head:
    """Make a head from class means of standardised base features."""
    import torch

    mean, std = features.mean(0), features.std(0).clamp_min(1e-6)
    standardised = (features - mean) / std
    weight = torch.stack([standardised[labels == label].mean(0) for label in range(classes)])
    return Head(weight, mean, std, scale)


def label_text_head(features: Tensor, scale: float = 20.0) -> Head:
    """Make a head from the base features of texts that name the classes, as CLIP's zero-shot heads."""
    import torch

    return Head(features, torch.zeros(features.shape[1]), torch.ones(features.shape[1]), scale)
