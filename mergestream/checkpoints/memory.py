"""A state dict in memory, as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from mergestream.checkpoints.base import Checkpoint, describe, shared_views
from mergestream.errors import MergestreamError

if TYPE_CHECKING:
    from torch import Tensor


class MemoryCheckpoint(Checkpoint):
    def __init__(self, state_dict: Mapping[str, Tensor]) -> None:
        import torch

        for name, value in state_dict.items():
            if not isinstance(value, torch.Tensor):
                raise MergestreamError(
                    f"the state dict holds {name!r}, which is no tensor but of type {type(value).__name__}"
                )
        self._tensors = {name: tensor.detach() for name, tensor in state_dict.items()}
        self.source = "memory"
        self.tensors = MappingProxyType({n: describe(n, t, "memory") for n, t in self._tensors.items()})
        self.aliases = MappingProxyType(shared_views(self._tensors))

    def read(self, name: str) -> Tensor:
        return self._tensors[name].cpu()

    def close(self) -> None:
        self._tensors = {}
