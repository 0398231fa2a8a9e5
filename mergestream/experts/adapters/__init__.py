"""PEFT adapters in (`reading`, `vector`) and out (`writing`); see docs/adapters.md."""

from mergestream.experts.adapters.reading import (
    Adapter,
    BoundAdapter,
    adapter_directory,
    is_adapter,
    open_adapter,
    same_model,
)

__all__ = ["Adapter", "BoundAdapter", "adapter_directory", "is_adapter", "open_adapter", "same_model"]
