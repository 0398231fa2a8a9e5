"""Open a checkpoint: a file, a directory, a hub id, or a state dict or module in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mergestream.checkpoints.checkpoint import Checkpoint, FileCheckpoint, Shard, describe_tensors
from mergestream.checkpoints.distributed import PLACES, DistributedFiles
from mergestream.checkpoints.layout import (
    FORMATS,
    WEIGHT_SUFFIXES,
    explain_directory,
    find_weights,
    is_index,
    no_weights_error,
    read_index,
    refuse_quantised,
)
from mergestream.checkpoints.location import Location, locate, system_errors_explained
from mergestream.checkpoints.safetensors import SafetensorsObject
from mergestream.errors import MergestreamError, UsageError
from mergestream.escaping import is_utf8

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


Source: TypeAlias = "str | Path | Mapping[str, Tensor] | Module"
"""A path, URL or hub id of a model, or the model itself"""
_LFS_POINTER = b"version https://git-lfs.github.com"


def open_checkpoint(source: Source) -> Checkpoint:
    """Open a directory, a file, a hub id ``org/name[@revision]``, a state dict or a module, and check its headers."""
    if isinstance(source, str | Path):
        return open_located(locate(source))
    return MemoryCheckpoint(source)


def open_located(location: Location) -> Checkpoint:
    """Open a file or directory that `locate` found; ``model.safetensors`` may stand for the shards of its index."""
    with system_errors_explained(location.source):
        if location.path.is_dir():
            return _open_directory(location)
        directory, name = location.directory, location.path.name
        if name not in directory.names and (index := f"{name}.index.json") in directory.names:
            return _open_indexed(directory, index, location.source)
        return FileCheckpoint(location.source, None, [_open_shard(directory, name)])


def _open_directory(location: Location) -> Checkpoint:
    directory, source, names = location.path, location.source, location.names
    if "adapter_config.json" in names:
        raise MergestreamError(f"{source} is an adapter; a full checkpoint is needed here")
    refuse_quantised(directory)
    entry = find_weights(names, source)
    if entry is not None and is_index(entry):
        return _open_indexed(location, entry, source)
    if entry is not None:
        return FileCheckpoint(source, directory, [_open_shard(location, entry)])
    if found := [directory / place for place in PLACES if (directory / place).is_file()]:
        return FileCheckpoint(source, directory, [DistributedFiles(found[0])])
    raise no_weights_error(names, source, directory)


def _open_indexed(location: Location, entry: str, source: str) -> Checkpoint:
    """Open the shards that an index file lists, and check that they hold what it lists."""
    directory, names = location.path, location.names
    index = directory / entry
    weight_map = read_index(index)
    single = entry.partition(".index.")[0]
    if single in names and single not in weight_map.values():
        raise MergestreamError(f"{source} holds both {single} and {entry}; remove the one that is out of date")
    if missing := sorted(set(weight_map.values()) - names):
        raise MergestreamError(f"{location.source}/{missing[0]} is missing, but {entry} lists it; download it again")
    shards = [_open_shard(location, name) for name in sorted(set(weight_map.values()))]
    held = {(tensor, shard.path.name) for shard in shards for tensor in shard.tensors}
    if differing := held ^ weight_map.items():
        tensor, name = min(differing)
        holds, lists = ("holds", "does not list") if (tensor, name) in held else ("lacks", "lists")
        fault = f"{holds} the tensor {tensor!r}, which {entry} {lists} there"
        raise MergestreamError(f"{index.parent / name} {fault}; download index and shards again")
    return FileCheckpoint(source, directory, shards)


def _open_shard(location: Location, name: str) -> Shard:
    """Open a file, on this machine or in object storage."""
    if remote := location.objects.get(name):
        if name.endswith(".safetensors"):
            return SafetensorsObject(remote)
        raise MergestreamError(f"{remote} is not read in object storage, only .safetensors is; copy it to a disk")
    path = location.path / name
    if not path.is_file():  # opening a pipe would block
        raise MergestreamError(f"{path} is no regular file; give the file itself")
    if not is_utf8(path.name):
        raise MergestreamError(f"{path} is not valid UTF-8; rename it")
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise MergestreamError(f"{path} is only a Git LFS pointer; fetch the file with `git lfs pull`")
    for suffix, file_format in FORMATS.items():
        if path.name.endswith(suffix):
            return file_format(path)
    raise MergestreamError(
        explain_directory({path.name}, str(path.parent))
        or f"{path} is no checkpoint: give a directory, or a file that ends in {', '.join(WEIGHT_SUFFIXES)}"
    )


class MemoryCheckpoint(Checkpoint):
    """A state dict or a module of this process."""

    source = "the state dict"

    def __init__(self, model: Any) -> None:
        if hasattr(model, "peft_config"):
            raise UsageError("a PeftModel is two models: pass what save_pretrained() wrote or model.merge_and_unload()")
        state_dict = model.state_dict() if callable(getattr(model, "state_dict", None)) else model
        if not isinstance(state_dict, Mapping):
            raise UsageError(f"a model is a path, a hub id, a module or a state dict, not a {type(model).__name__}")
        self.tensors, self.aliases = describe_tensors(state_dict, "the state dict", "remove it")
        self._tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in state_dict.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name].cpu()

    def close(self) -> None:
        self._tensors = {}

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError("other processes cannot see a model in memory: save it first, or use the local engine")
