"""A base model without its weights: when only adapters come, names and forms are enough."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from mergestream.base.anatomy import model_names
from mergestream.base.architecture import Architecture, load_architecture
from mergestream.checkpoints import FLOATS, Checkpoint, TensorInfo, TensorSpec
from mergestream.checkpoints.layout import is_weight_file
from mergestream.checkpoints.location import Location, locate
from mergestream.checkpoints.opening import find_distributed, open_located
from mergestream.checkpoints.strangers import what_else
from mergestream.errors import MergestreamError
from mergestream.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

_CONFIG = "config.json"


class Skeleton(Checkpoint):
    """The tensors of a model, described but not there."""

    has_weights: ClassVar[bool] = False

    def __init__(self, source: str, directory: Path | None, tensors: Mapping[str, TensorSpec]) -> None:
        self.source = source
        self.directory = directory
        self.tensors = MappingProxyType(
            {name: TensorInfo(spec.dtype, spec.shape, _CONFIG) for name, spec in tensors.items()}
        )

    def read(self, name: str) -> Tensor:
        raise MergestreamError(
            f"tensor {name} of the base is needed, and of {self.source} only the configuration is known; "
            "pass --base with the model and its weights"
        )


class Renamed(Checkpoint):
    """A checkpoint under other names."""

    def __init__(self, checkpoint: Checkpoint, stored: Mapping[str, str]) -> None:
        """``stored`` gives for every name the one in the checkpoint; what it does not name is left out."""
        self._checkpoint, self._stored = checkpoint, stored
        self.source, self.directory = checkpoint.source, checkpoint.directory
        self.tensors = MappingProxyType({name: checkpoint.tensors[old] for name, old in stored.items()})
        self.fingerprint, self.remark, self.copies = checkpoint.fingerprint, checkpoint.remark, checkpoint.copies

    def companions(self) -> Iterator[Path]:
        return self._checkpoint.companions()

    def read(self, name: str) -> Tensor:
        return self._checkpoint.read(self._stored[name])

    def stored_name(self, name: str) -> str:
        return self._stored.get(name, name)

    def close(self) -> None:
        self._checkpoint.close()


def under_names(checkpoint: Checkpoint, names: Collection[str]) -> Checkpoint:
    """The checkpoint under the names of a skeleton, which are those of the model's class: older files have others."""
    if checkpoint.tensors.keys() == set(names):
        return checkpoint
    called = {stored: name for name, stored in model_names(checkpoint).items()}
    stored = {called.get(name, name): name for name in checkpoint.tensors}
    return Renamed(checkpoint, {name: stored[name] for name in names}) if stored.keys() >= set(names) else checkpoint


def open_base(source: str | Path, *, config_only: bool) -> Checkpoint:
    """Open a base; its skeleton where it has no weights, or where they are not to be fetched."""
    location = locate(source, weights=not config_only)
    # Weights that an earlier run has left in the hub's cache are not asked for either.
    not_fetched = config_only and not location.is_local
    if not_fetched or _has_only_config(location):
        return _from_config(location.path, location.source)
    return open_located(location)


def _has_only_config(location: Location) -> bool:
    directory = location.path
    if not (directory / _CONFIG).is_file() or find_distributed(directory):
        return False
    names = location.names
    return not any(map(is_weight_file, names)) and what_else(names, str(directory), directory) is None


def _from_config(directory: Path, source: str) -> Skeleton:
    """The tensors that a checkpoint of the model would hold: of tied ones the first, nothing that is computed."""
    config = read_json(directory / _CONFIG)
    if config.get("quantization_config"):
        raise MergestreamError(
            f"{directory / _CONFIG}: quantization_config says that the base is quantised; name the model that it was "
            "made from, or its dequantised form"
        )
    architecture = load_architecture(directory)
    if not isinstance(architecture, Architecture):
        raise MergestreamError(
            f"{source} has no weights, and its tensors cannot be told from {_CONFIG} ({architecture})"
        )
    tied = {name for group in architecture.ties for name in group[1:]}
    floats = FLOATS.get(str(config.get("dtype", config.get("torch_dtype"))), "F32")
    tensors = {
        name: TensorSpec(floats if slot.spec.is_float else slot.spec.dtype, slot.spec.shape)
        for name, slot in architecture.slots.items()
        if slot.spec is not None and name not in tied
    }
    return Skeleton(source, directory, tensors)
