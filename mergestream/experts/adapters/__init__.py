"""PEFT adapters in; see docs/how-to/adapters.md."""

from mergestream.experts.adapters.reading import Adapter, BoundAdapter, find_adapter, open_adapter

__all__ = ["Adapter", "BoundAdapter", "find_adapter", "open_adapter"]
