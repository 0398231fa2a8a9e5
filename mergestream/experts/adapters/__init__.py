"""PEFT adapters as experts; see docs/how-to/adapters.md."""

from mergestream.experts.adapters.adapter import Adapter, BoundAdapter, find_adapter, open_adapter

__all__ = ["Adapter", "BoundAdapter", "find_adapter", "open_adapter"]
