"""Encoders of ``transformers``, as the suites load them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def load_pretrained(class_name: str, directory: Path, **options: Any) -> torch.nn.Module:
    """``transformers.<class_name>.from_pretrained`` without its progress bars, in float32, without dropout."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # a tower out of a whole model is meant to leave the rest
    model_class = getattr(transformers, class_name)
    model: torch.nn.Module = model_class.from_pretrained(directory, local_files_only=True, **options)
    return model.float().eval()
