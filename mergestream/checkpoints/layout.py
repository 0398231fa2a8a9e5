"""What the directory of a model holds: the weights, their index where they are several, and what goes with them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from mergestream.errors import MergestreamError
from mergestream.files import read_json

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")
INDEX_SUFFIX = ".index.json"
_COMPANION_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm")
_SAFETENSORS_INDEX = f"model.safetensors{INDEX_SUFFIX}"
_TORCH_INDEX = f"pytorch_model.bin{INDEX_SUFFIX}"
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.(safetensors|bin)$")


def is_weight_file(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIXES)


def is_companion(name: str) -> bool:
    """Whether a file is configuration, tokenizer or generation settings: it is fetched and copied with the model.

    Weights and their index are not, nor are the model card and Python files.
    """
    return name.endswith(_COMPANION_SUFFIXES) and not name.endswith(INDEX_SUFFIX)


def companions(directory: Path) -> Iterator[Path]:
    """The files that go with a model. A link among them may lead to a hub's cache, but not to any file of the user's:
    what is copied is published."""
    inside = directory.resolve(), directory.resolve().parent.parent / "blobs"
    for path in directory.iterdir():
        if is_companion(path.name) and path.is_file():
            if not any(path.resolve().is_relative_to(place) for place in inside):
                raise MergestreamError(f"{path} is a link that leads out of the model's directory; put the file there")
            yield path


def find_weights(names: Collection[str], source: str) -> str:
    """The file among those of a directory that leads to its weights: an index, or the only file."""
    for name in (_SAFETENSORS_INDEX, "model.safetensors"):
        if name in names:
            return name
    indexes = [name for name in names if name.endswith(f".safetensors{INDEX_SUFFIX}")]
    if len(indexes) == 1:
        return indexes[0]
    safetensors = sorted(name for name in names if name.endswith(".safetensors"))
    shard = next((name for name in safetensors if (m := _SHARD.search(name)) and int(m[2]) > 1), None)
    if shard:
        raise MergestreamError(f"{source} holds the shard {shard}, but no index (such as {_SAFETENSORS_INDEX})")
    if len(safetensors) > 1:
        raise MergestreamError(
            f"{source} holds {len(safetensors)} .safetensors files and no index; "
            f"name the one you mean ({', '.join(safetensors[:3])}{', …' if len(safetensors) > 3 else ''})"
        )
    if safetensors:
        return safetensors[0]
    for name in (_TORCH_INDEX, "pytorch_model.bin"):
        if name in names:
            return name
    raise MergestreamError(f"{source} holds no checkpoint: neither model.safetensors nor pytorch_model.bin")


def read_index(path: Path) -> dict[str, str]:
    """Tensor to shard. A shard is a file beside the index: nothing else is followed."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MergestreamError(f"{path} is no index: it has no weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or "/" in shard or "\\" in shard or not is_weight_file(shard):
            raise MergestreamError(
                f"{path} sends the tensor {tensor!r} to {shard!r}, which is no weight file beside it"
            )
    return weight_map
