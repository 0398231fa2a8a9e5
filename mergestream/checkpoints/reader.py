"""From what a user names to a checkpoint: a path, a directory, a hub id or a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mergestream.checkpoints.checkpoint import Checkpoint, FileCheckpoint, Shard
from mergestream.checkpoints.layout import TORCH_SUFFIXES, WEIGHT_SUFFIXES, find_weights, is_index, read_index
from mergestream.checkpoints.location import Location, locate, system_errors_explained
from mergestream.checkpoints.safetensors import SafetensorsFile, SafetensorsObject
from mergestream.checkpoints.unsupported import METADATA, explain_file, no_weights
from mergestream.errors import MergestreamError
from mergestream.escaping import is_utf8
from mergestream.files import read_json
from mergestream.sizes import counted, shorten_list
from mergestream.storage import StoredFile

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


Source: TypeAlias = "str | Path | Mapping[str, Tensor] | Module"
"""What names a model, or is one"""


def open_checkpoint(source: Source) -> Checkpoint:
    """Open a directory, a file, a hub id ``org/name[@revision]``, a state dict or a module, and check its headers."""
    if isinstance(source, str | Path):
        return open_located(locate(source))
    from mergestream.checkpoints.memory import MemoryCheckpoint, state_dict_of

    return MemoryCheckpoint(state_dict_of(source))


def open_located(location: Location) -> Checkpoint:
    """Open the file or the Hugging Face directory that has been found; a file may be several that an index names."""
    with system_errors_explained(location.source):
        if location.path.is_dir():
            return _open_directory(location)
        directory, name = location.directory, location.path.name
        if name not in directory.names and (index := f"{name}.index.json") in directory.names:
            return _open_indexed(directory, index, location.source)
        return _open_alone(directory, name, location.source, None)


def _open_directory(location: Location) -> Checkpoint:
    directory, source, names = location.path, location.source, location.names
    if "adapter_config.json" in names:
        raise MergestreamError(f"{source} is an adapter, and a full checkpoint is needed here")
    if "config.json" in names and read_json(directory / "config.json").get("quantization_config"):
        raise MergestreamError(
            f"{directory / 'config.json'}: quantization_config says that the checkpoint is quantised; dequantise it "
            "first, or name the model that it was made from"
        )
    entry = find_weights(names, source)
    if entry is None:
        if place := find_distributed(directory):
            from mergestream.checkpoints.distributed import DistributedFiles

            return FileCheckpoint(source, directory, [DistributedFiles(place)])
        raise no_weights(names, source, directory)
    if not is_index(entry):
        return _open_alone(location, entry, source, directory)
    return _open_indexed(location, entry, source)


def _open_indexed(location: Location, entry: str, source: str) -> Checkpoint:
    directory, names = location.path, location.names
    index = directory / entry
    weight_map = read_index(index)
    single = entry.partition(".index.")[0]
    if single in names and single not in weight_map.values():
        raise MergestreamError(f"{source} holds both {single} and {entry}; remove the one that is out of date")
    shards = [_open_shard(location, name, index) for name in sorted(set(weight_map.values()))]
    _check_index(index, weight_map, shards)
    return FileCheckpoint(source, directory, shards)


def find_distributed(directory: Path) -> Path | None:
    """Where a directory holds what torch.distributed.checkpoint saved: itself, or below it as accelerate puts it."""
    places = (directory, directory / "pytorch_model_fsdp_0")
    return next((place for place in places if (place / METADATA).is_file()), None)


def _open_alone(location: Location, name: str, source: str, directory: Path | None) -> Checkpoint:
    path = location.path / name
    if path.suffix == ".gguf" and name not in location.objects:
        from mergestream.checkpoints.gguf import GgufCheckpoint

        return GgufCheckpoint(source, _checked(path))
    return FileCheckpoint(source, directory, [_open_file(location, name)])


def _open_shard(location: Location, name: str, index: Path) -> Shard:
    if name not in location.names:
        raise MergestreamError(
            f"{location.source}/{name} is missing, although {index.name} names it; download it again"
        )
    return _open_file(location, name)


def _check_index(index: Path, weight_map: Mapping[str, str], shards: list[Shard]) -> None:
    tensors = {shard.path.name: shard.tensors for shard in shards}
    for tensor, shard in weight_map.items():
        if tensor not in tensors[shard]:
            raise MergestreamError(f"{index} says that {shard} holds the tensor {tensor!r}, but it does not")
    for shard, infos in tensors.items():
        if extra := [tensor for tensor in infos if weight_map.get(tensor) != shard]:
            raise MergestreamError(
                f"{index.parent / shard} holds {counted(len(extra), 'tensor')} that {index.name} does not list there "
                f"({shorten_list([repr(name) for name in extra])}); "
                "the index and the shards are not of one checkpoint"
            )


def _open_file(location: Location, name: str) -> Shard:
    if name in location.objects:
        return _open_object(location.objects[name])
    path = _checked(location.path / name)
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in TORCH_SUFFIXES:
        from mergestream.checkpoints.torch_file import TorchFile

        return TorchFile(path)
    *suffixes, last = WEIGHT_SUFFIXES
    raise MergestreamError(
        explain_file(path)
        or f"{path} is no checkpoint: give a directory, or a file that ends in {', '.join(suffixes)} or {last}"
    )


def _open_object(found: StoredFile) -> Shard:
    if not found.name.endswith(".safetensors"):
        raise MergestreamError(
            f"{found} is in object storage, where only .safetensors is read by range; copy it to a disk"
        )
    return SafetensorsObject(found)


def _checked(path: Path) -> Path:
    """A file that can be read: no pipe, and not what a clone without Git LFS leaves in its place."""
    if not path.is_file():
        raise MergestreamError(f"{path} is no regular file")
    if not is_utf8(path.name):
        raise MergestreamError(f"{path} is not valid UTF-8; rename it")
    if _is_lfs_pointer(path):
        raise MergestreamError(f"{path} is only Git LFS's pointer to the file; fetch the file with `git lfs pull`")
    return path


def _is_lfs_pointer(path: Path) -> bool:
    """Whether this is what a clone without Git LFS leaves in place of the weights."""
    start = b"version https://git-lfs.github.com"
    with path.open("rb") as file:
        return file.read(len(start)) == start
