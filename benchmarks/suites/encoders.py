"""Pretrained encoders of ``transformers``, and classification heads that are fixed before fine-tuning.

Base, experts and merged models share a head (paper, appendix B), so only the encoder decides the accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def load_pretrained(class_name: str, directory: Path, **options: Any) -> torch.nn.Module:
    """Load ``transformers.<class_name>`` in float32, for evaluation, without progress bars."""
    import transformers

    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # loading one tower warns about the other's weights
    model_class = getattr(transformers, class_name)
    model: torch.nn.Module = model_class.from_pretrained(directory, local_files_only=True, **options)
    return model.float().eval()


@dataclass(frozen=True)
class Head:
    """A cosine classifier: logits = scale · cos((f − mean) / std, class weight)."""

    weight: Tensor  # classes × features
    mean: Tensor
    std: Tensor
    scale: float

    def __call__(self, features: Tensor) -> Tensor:
        """Return the logits of each sample."""
        from torch.nn.functional import normalize

        standardised = (features - self.mean) / self.std
        return self.scale * normalize(standardised, dim=1) @ normalize(self.weight, dim=1).T

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        import torch
        from safetensors.torch import save_file

        scale = torch.tensor(self.scale)
        save_file({"weight": self.weight, "mean": self.mean, "std": self.std, "scale": scale}, path)

    @staticmethod
    def load(path: Path) -> Head:
        """Read what `save` wrote."""
        from safetensors.torch import load_file

        tensors = load_file(path)
        return Head(tensors["weight"], tensors["mean"], tensors["std"], float(tensors["scale"]))
