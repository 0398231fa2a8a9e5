"""PEFT adapters in and out (docs/adapters.md)."""

from mergestream.adapters.reading import Adapter, BoundAdapter, is_adapter, open_adapter
from mergestream.adapters.writing import AdaptedModule, Energy, write_adapter

__all__ = [
    "AdaptedModule",
    "Adapter",
    "BoundAdapter",
    "Energy",
    "is_adapter",
    "open_adapter",
    "write_adapter",
]
