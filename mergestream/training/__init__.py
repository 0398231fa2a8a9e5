"""Average a model's weights while it trains: a class, and a callback for transformers' Trainer."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mergestream.training.averaging import Averaging
    from mergestream.training.callback import AveragingCallback

__all__ = ["Averaging", "AveragingCallback"]

_HOMES = {"Averaging": "averaging", "AveragingCallback": "callback"}


def __getattr__(name: str) -> Any:
    """Import on first use, so that `Averaging` works without transformers."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
