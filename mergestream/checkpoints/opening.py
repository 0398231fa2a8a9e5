"""From what a user names to a checkpoint: a path, a directory, a hub id or a state dict."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.checkpoints.base import Checkpoint, FileCheckpoint, Shard
from mergestream.checkpoints.safetensors import SafetensorsFile
from mergestream.errors import MergestreamError
from mergestream.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.(safetensors|bin)$")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def open_checkpoint(source: str | Path | Mapping[str, Tensor]) -> Checkpoint:
    """Open a directory, a file, a hub id ``org/name[@revision]`` or a state dict, and check its headers."""
    if isinstance(source, Mapping):
        from mergestream.checkpoints.memory import MemoryCheckpoint

        return MemoryCheckpoint(source)
    try:
        return _open_named(source)
    except (OSError, RuntimeError) as error:  # no permission, a name too long, a home that does not exist
        reason = error.strerror if isinstance(error, OSError) else error
        raise MergestreamError(f"{source} cannot be opened: {reason}") from error


def _open_named(source: str | Path) -> Checkpoint:
    path = Path(source).expanduser()
    if path.is_dir():
        return open_directory(path.resolve(), str(path.resolve()))
    path = path.parent.resolve() / path.name  # a cache's link tells the format by its name, its target does not
    if path.exists():
        return FileCheckpoint(str(path), None, [_open_file(path)])
    if is_hub_id(source):
        from mergestream.checkpoints.hub import download

        directory, resolved = download(str(source))
        return open_directory(directory, resolved)
    raise MergestreamError(f"{source} does not exist: give a directory, a file, or a hub id org/name[@revision]")


def is_hub_id(source: str | Path) -> bool:
    """Whether a name that is no local path may be one on the hub."""
    return isinstance(source, str) and bool(_HUB_ID.fullmatch(source)) and not _is_weight_file(source)


def open_directory(directory: Path, source: str) -> Checkpoint:
    """Open the weights in a Hugging Face directory; ``source`` is how the user knows it."""
    names = {entry.name for entry in directory.iterdir()}
    if "adapter_config.json" in names:
        raise MergestreamError(f"{source} is an adapter, and a full checkpoint is needed here")
    if "config.json" in names and read_json(directory / "config.json").get("quantization_config"):
        raise MergestreamError(
            f"{directory / 'config.json'}: quantization_config says that the checkpoint is quantised; dequantise it "
            "first, or name the model that it was made from"
        )
    entry = find_weights(names, source)
    if not entry.endswith(".index.json"):
        return FileCheckpoint(source, directory, [_open_file(directory / entry)])
    index = directory / entry
    weight_map = read_index(index)
    single = entry.removesuffix(".index.json")
    if single in names and single not in weight_map.values():
        raise MergestreamError(f"{source} holds both {single} and {entry}; remove the one that is out of date")
    shards = [_open_shard(directory, name, index) for name in sorted(set(weight_map.values()))]
    _check_index(index, weight_map, shards)
    return FileCheckpoint(source, directory, shards)


def find_weights(names: Collection[str], source: str) -> str:
    """The file among those of a directory that leads to its weights: an index, or the only file."""
    for name in (SAFETENSORS_INDEX, "model.safetensors"):
        if name in names:
            return name
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if len(indexes) == 1:
        return indexes[0]
    safetensors = sorted(name for name in names if name.endswith(".safetensors"))
    shard = next((name for name in safetensors if (m := _SHARD.search(name)) and int(m[2]) > 1), None)
    if shard:
        raise MergestreamError(f"{source} holds the shard {shard}, but no index (such as {SAFETENSORS_INDEX})")
    if len(safetensors) > 1:
        raise MergestreamError(
            f"{source} holds {len(safetensors)} .safetensors files and no index; "
            f"name the one you mean ({', '.join(safetensors[:3])}{', …' if len(safetensors) > 3 else ''})"
        )
    if safetensors:
        return safetensors[0]
    for name in (TORCH_INDEX, "pytorch_model.bin"):
        if name in names:
            return name
    raise MergestreamError(f"{source} holds no checkpoint: neither model.safetensors nor pytorch_model.bin")


def read_index(path: Path) -> dict[str, str]:
    """Tensor to shard. A shard is a file beside the index: nothing else is followed."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MergestreamError(f"{path} is no index: it has no weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or "/" in shard or "\\" in shard or not _is_weight_file(shard):
            raise MergestreamError(
                f"{path} sends the tensor {tensor!r} to {shard!r}, which is no weight file beside it"
            )
    return weight_map


def _open_shard(directory: Path, name: str, index: Path) -> Shard:
    if not (directory / name).is_file():
        raise MergestreamError(f"{directory / name} is missing, although {index.name} names it; download it again")
    return _open_file(directory / name)


def _check_index(index: Path, weight_map: Mapping[str, str], shards: list[Shard]) -> None:
    tensors = {shard.path.name: shard.tensors for shard in shards}
    for tensor, shard in weight_map.items():
        if tensor not in tensors[shard]:
            raise MergestreamError(f"{index} says that {shard} holds the tensor {tensor!r}, but it does not")
    for shard, infos in tensors.items():
        if extra := [tensor for tensor in infos if weight_map.get(tensor) != shard]:
            raise MergestreamError(
                f"{index.parent / shard} holds {len(extra)} tensors that {index.name} does not list there "
                f"({', '.join(map(repr, extra[:3]))}{', …' if len(extra) > 3 else ''}); "
                "the index and the shards are not of one checkpoint"
            )


def _open_file(path: Path) -> Shard:
    if not path.is_file():
        raise MergestreamError(f"{path} is no regular file")
    if _is_lfs_pointer(path):
        raise MergestreamError(f"{path} is only Git LFS's pointer to the file; fetch the file with `git lfs pull`")
    if path.suffix == ".safetensors":
        return SafetensorsFile(path)
    if path.suffix in _TORCH_SUFFIXES:
        from mergestream.checkpoints.torch_file import TorchFile

        return TorchFile(path)
    raise MergestreamError(
        f"{path} is no checkpoint: give a directory, or a file that ends in .safetensors, .bin, .pt or .pth"
    )


def _is_lfs_pointer(path: Path) -> bool:
    """Whether this is what a clone without Git LFS leaves in place of the weights."""
    start = b"version https://git-lfs.github.com"
    with path.open("rb") as file:
        return file.read(len(start)) == start


def _is_weight_file(name: str) -> bool:
    return name.endswith((".safetensors", *_TORCH_SUFFIXES))
