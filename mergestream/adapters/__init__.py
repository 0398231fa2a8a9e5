"""PEFT adapters in (`reading`, `vector`) and out (`writing`); see docs/adapters.md."""

from mergestream.adapters.reading import Adapter, BoundAdapter, is_adapter, open_adapter

__all__ = ["Adapter", "BoundAdapter", "is_adapter", "open_adapter"]
