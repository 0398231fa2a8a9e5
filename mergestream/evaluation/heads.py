"""A classification head that is fixed before any fine-tuning (paper, appendix B).

Base, experts and merged models share it, so that only the encoder decides how well a task is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Head:
    """logits = scale · cos((f − mean) / std, class weight)."""

    weight: Tensor  # classes × features
    mean: Tensor
    std: Tensor
    scale: float

    def __call__(self, features: Tensor) -> Tensor:
        from torch.nn.functional import normalize

        standardised = (features - self.mean) / self.std
        return self.scale * normalize(standardised, dim=1) @ normalize(self.weight, dim=1).T

    def save(self, path: Path) -> None:
        import torch
        from safetensors.torch import save_file

        scale = torch.tensor(self.scale)
        save_file({"weight": self.weight, "mean": self.mean, "std": self.std, "scale": scale}, path)

    @staticmethod
    def load(path: Path) -> Head:
        from safetensors.torch import load_file

        tensors = load_file(path)
        return Head(tensors["weight"], tensors["mean"], tensors["std"], float(tensors["scale"]))
