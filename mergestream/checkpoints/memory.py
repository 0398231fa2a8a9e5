"""State dicts and modules in memory, as checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints.checkpoint import Checkpoint, describe, shared_views
from mergestream.errors import MergestreamError, UsageError

if TYPE_CHECKING:
    from torch import Tensor


def get_state_dict(model: Any) -> Mapping[str, Tensor]:
    """The state dict of a module; a state dict is returned unchanged."""
    if isinstance(model, Mapping):
        return model
    if hasattr(model, "peft_config"):
        raise UsageError(
            "a PeftModel is a base and an adapter in one: pass the directory in which save_pretrained() wrote the "
            "adapter, or model.merge_and_unload()"
        )
    if callable(getattr(model, "state_dict", None)):
        state: Mapping[str, Tensor] = model.state_dict()
        return state
    raise UsageError(
        f"a model is a path, a hub id org/name, a torch module or a state dict, not of type {type(model).__name__}"
    )


class MemoryCheckpoint(Checkpoint):
    """A state dict of this process."""

    def __init__(self, state_dict: Mapping[str, Tensor]) -> None:
        import torch

        for name, value in state_dict.items():
            if not isinstance(value, torch.Tensor):
                raise MergestreamError(
                    f"the state dict holds {name!r}, which is no tensor but of type {type(value).__name__}; remove it"
                )
        self._tensors = {name: tensor.detach() for name, tensor in state_dict.items()}
        self.source = "memory"
        self.tensors = MappingProxyType({n: describe(n, t, "memory") for n, t in self._tensors.items()})
        self.aliases = MappingProxyType(shared_views(self._tensors))

    def read(self, name: str) -> Tensor:
        return self._tensors[name].cpu()

    def close(self) -> None:
        self._tensors = {}

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError("other processes cannot see a model in memory: save it first, or use the local engine")
