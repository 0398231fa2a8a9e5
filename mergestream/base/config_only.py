"""Open a base model; without weights, its ``config.json`` gives names and shapes, which is enough for adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from mergestream.base.architecture import Architecture, load_architecture
from mergestream.base.roles import find_architecture, model_names
from mergestream.checkpoints import FLOATS, Checkpoint, TensorInfo, TensorSpec
from mergestream.checkpoints.checkpoint import RenamedCheckpoint
from mergestream.checkpoints.distributed import find_metadata
from mergestream.checkpoints.layout import is_weight_file
from mergestream.checkpoints.location import Location, locate
from mergestream.checkpoints.reader import open_located
from mergestream.checkpoints.unsupported import explain_directory
from mergestream.errors import MergestreamError
from mergestream.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

_CONFIG = "config.json"


class ConfigOnlyBase(Checkpoint):
    """A base model without weights: its tensors are described, but cannot be read."""

    has_weights: ClassVar[bool] = False

    def __init__(self, source: str, directory: Path | None, tensors: Mapping[str, TensorSpec]) -> None:
        self.source, self.directory = source, directory
        self.tensors = MappingProxyType(
            {name: TensorInfo(spec.dtype, spec.shape, _CONFIG) for name, spec in tensors.items()}
        )

    def read(self, name: str) -> Tensor:
        raise MergestreamError(
            f"tensor {name} of the base is needed, but only the configuration of {self.source} is known; "
            "pass --base with the model and its weights"
        )


def open_base(source: str | Path, *, config_only: bool) -> Checkpoint:
    """Open a base model; as a `ConfigOnlyBase` if it has no weights or ``config_only`` forbids their download."""
    location = locate(source, weights=not config_only)
    # Weights in the hub's cache are not used either: the result must not depend on an earlier run.
    if (config_only and not location.is_local) or _has_only_config(location):
        return _from_config(location.path, location.source)
    return open_located(location)


def match_names(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """Rename an older checkpoint's tensors to ``names``, the names in the model's class, if all of them are found."""
    if checkpoint.tensors.keys() == set(names):
        return checkpoint
    called = {stored: name for name, stored in model_names(checkpoint, find_architecture(checkpoint)).items()}
    stored = {called.get(name, name): name for name in checkpoint.tensors}
    if not stored.keys() >= set(names):
        return checkpoint
    return RenamedCheckpoint(checkpoint, {name: stored[name] for name in names})


def _has_only_config(location: Location) -> bool:
    directory = location.path
    if not (directory / _CONFIG).is_file() or find_metadata(directory):
        return False
    names = location.names
    return not any(map(is_weight_file, names)) and explain_directory(names, str(directory), directory) is None


def _from_config(directory: Path, source: str) -> ConfigOnlyBase:
    """Describe the tensors that a checkpoint would hold: tied tensors once, no computed buffers."""
    config = read_json(directory / _CONFIG)
    if config.get("quantization_config"):
        raise MergestreamError(
            f"{directory / _CONFIG}: the base is quantised (quantization_config); give the model it was made from, "
            "or a dequantised copy"
        )
    architecture = load_architecture(directory)
    if not isinstance(architecture, Architecture):
        raise MergestreamError(
            f"{source} has no weights, and {_CONFIG} does not describe its tensors ({architecture}); "
            "give a base with weights"
        )
    tied = {name for group in architecture.ties for name in group[1:]}
    floats = FLOATS.get(str(config.get("dtype", config.get("torch_dtype"))), "F32")
    tensors = {
        name: TensorSpec(floats if slot.spec.is_float else slot.spec.dtype, slot.spec.shape)
        for name, slot in architecture.slots.items()
        if slot.spec is not None and name not in tied
    }
    return ConfigOnlyBase(source, directory, tensors)
