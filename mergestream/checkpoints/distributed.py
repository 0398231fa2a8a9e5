"""Directories of ``torch.distributed.checkpoint``, as FSDP leaves them: tensors in chunks, described by ``.metadata``.

``.metadata`` is a pickle, which torch would execute. Here it is read into records that have fields and no code; what
they say is checked, and torch's own reader gets metadata that is made of it anew.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from mergestream.checkpoints.checkpoint import (
    Shard,
    TensorInfo,
    TensorSpec,
    check_dtype,
    dtype_name,
    item_size,
    torch_dtype,
)
from mergestream.checkpoints.safetensors import MAX_DIMENSIONS
from mergestream.checkpoints.torch_file import WRAPPERS, check_pickle
from mergestream.checkpoints.unsupported import METADATA
from mergestream.errors import MergestreamError, first_line
from mergestream.escaping import is_utf8
from mergestream.files import MAX_JSON_BYTES

if TYPE_CHECKING:
    from torch import Tensor

_WRAPPERS = (*WRAPPERS, "app")
_OF_A_TRAINING = re.compile(r"(optim|lr_sched|sched|dataloader|train_state).*")
"""What lies beside a model that is saved without a key of its own"""


class Chunk(NamedTuple):
    """A part of a tensor, and the bytes of a file that ``torch.save`` has written it to."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


class DistributedFiles(Shard):
    """Reading a tensor puts its chunks together; no other is in memory."""

    path: Path
    copies = 2

    def __init__(self, directory: Path) -> None:
        self.path = directory / METADATA
        content = _read_metadata(self.path)
        self._stored = _model_names(content)
        if not self._stored:
            raise MergestreamError(
                f"{directory} holds no tensors of a model; give the directory of the model's checkpoint"
            )
        sizes = {path.name: path.stat().st_size for path in directory.iterdir() if path.is_file()}
        places = _places(content)
        self._chunks: dict[str, list[Chunk]] = {}
        tensors: dict[str, TensorInfo] = {}
        for name, key in self._stored.items():
            try:
                described = content["state_dict_metadata"][key].fields
                spec = _spec(name, described, self.path)
                self._chunks[name] = _chunks(key, described["chunks"], places, spec, sizes)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise MergestreamError(
                    f"{self.path} and the files beside it do not hold all of the tensor {name!r}; copy the checkpoint "
                    "again"
                ) from error
            tensors[name] = TensorInfo(spec.dtype, spec.shape, self._chunks[name][0].file)
        self.tensors = MappingProxyType(tensors)

    def close(self) -> None:
        """No file is open."""

    def __reduce__(self) -> tuple[Any, ...]:
        return DistributedFiles, (self.path.parent,)

    def read(self, name: str) -> Tensor:
        import torch
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        info, key = self.tensors[name], self._stored[name]
        target = {key: torch.zeros(info.shape, dtype=torch_dtype(info.dtype))}
        metadata = self._metadata(name)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(target, metadata, is_coordinator=True)
        reader = FileSystemReader(self.path.parent)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        try:
            reader.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:  # a pickle that asks for more, a damaged archive: torch has a type for each
            raise MergestreamError(
                f"the tensor {name!r} in {self.path.with_name(info.file)} cannot be read, and no pickle in it was "
                f"executed ({first_line(error)}); copy the checkpoint again"
            ) from error
        return target[key]

    def _metadata(self, name: str) -> Any:
        """That of one tensor, as torch has it."""
        import torch
        from torch.distributed.checkpoint import metadata as of_torch
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        info, key, chunks = self.tensors[name], self._stored[name], self._chunks[name]
        properties = of_torch.TensorProperties(dtype=torch_dtype(info.dtype))
        parts = [of_torch.ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in chunks]
        places = {
            of_torch.MetadataIndex(key, part.offsets): _StorageInfo(part.file, part.begin, part.length)
            for part in chunks
        }
        described = of_torch.TensorStorageMetadata(properties, torch.Size(info.shape), parts)
        return of_torch.Metadata({key: described}, storage_data=places)


# --- the pickle ----------------------------------------------------------------------------------------------


class _Record:
    """An object of a class of torch's: its fields, or what it was called with, and none of its code."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.fields = state


_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


class _Inert(pickle.Unpickler):
    """Calls nothing but what is written here."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._records = {name: type(name, (_Record,), {}) for names in _CLASSES.values() for name in names}

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return self._records[name]
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name.islower():
            return name  # a dtype, by its name
        raise pickle.UnpicklingError(f"{module}.{name}")


def _read_metadata(path: Path) -> Mapping[str, Any]:
    """The fields of the metadata."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise MergestreamError(f"{path} is too large to be the metadata of a checkpoint")
    data = path.read_bytes()
    check_pickle(path, data)
    try:
        content = _Inert(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise MergestreamError(
            f"{path} asks for more than a checkpoint's metadata ({error}); it was not executed: load the checkpoint "
            "where you trust its origin, and save the model's state_dict() as safetensors"
        ) from error
    except Exception as error:  # whatever a damaged pickle runs into
        raise MergestreamError(
            f"{path} is corrupt or no metadata of a checkpoint; copy the checkpoint again"
        ) from error
    fields = _fields(content, "Metadata")
    if not isinstance(fields.get("state_dict_metadata"), dict) or not isinstance(fields.get("storage_data"), dict):
        raise MergestreamError(f"{path} is no metadata of a checkpoint of torch.distributed")
    return fields


def _fields(record: Any, kind: str) -> dict[str, Any]:
    """Of a record of that class; nothing where it is none."""
    fields = getattr(record, "fields", None) if type(record).__name__ == kind else None
    return fields if isinstance(fields, dict) else {}


# --- what it says --------------------------------------------------------------------------------------------


def _model_names(content: Mapping[str, Any]) -> dict[str, str]:
    """The model's names of the tensors, and under which key each is stored: nested state dicts were flattened."""
    planned = content.get("planner_data")
    paths: dict[str, tuple[str, ...]] = {}
    for key, described in content["state_dict_metadata"].items():
        if _fields(described, "TensorStorageMetadata") and isinstance(key, str) and not key.endswith("_extra_state"):
            path = planned.get(key) if isinstance(planned, dict) else None
            paths[key] = tuple(map(str, path)) if isinstance(path, tuple) and path else (key,)
    while wrapper := next((word for word in _WRAPPERS if _wraps(word, paths)), None):
        paths = {key: path[1:] for key, path in paths.items() if path[0] == wrapper and len(path) > 1}
    return {".".join(path): key for key, path in paths.items() if len(path) == 1 or not _OF_A_TRAINING.match(path[0])}


def _wraps(word: str, paths: Mapping[str, tuple[str, ...]]) -> bool:
    return any(path[0] == word and len(path) > 1 for path in paths.values())


def _spec(name: str, described: Mapping[str, Any], path: Path) -> TensorSpec:
    """The form of a tensor."""
    import torch

    dtype, shape = described["properties"].fields[0], _sizes(described["size"])
    if not is_utf8(name) or len(shape) > MAX_DIMENSIONS:
        raise ValueError("no tensor is like that")
    check_dtype(dtype, f"the tensor {name!r} in {path}")
    return TensorSpec(dtype_name(getattr(torch, dtype)), shape)


def _places(content: Mapping[str, Any]) -> dict[tuple[str, tuple[int, ...]], dict[str, Any]]:
    """Where each chunk is, by the key of its tensor and its first element."""
    found = {}
    for index, place in content["storage_data"].items():
        fields = _fields(index, "MetadataIndex")
        with suppress(ValueError):  # no tensor's, where it has no offset
            found[str(fields.get("fqn")), _sizes(fields.get("offset"))] = _fields(place, "_StorageInfo")
    return found


def _chunks(
    key: str,
    described: Any,
    places: Mapping[tuple[str, tuple[int, ...]], Mapping[str, Any]],
    spec: TensorSpec,
    files: Mapping[str, int],
) -> list[Chunk]:
    """The chunks that make up a tensor; a ValueError or KeyError where they do not, or are not in ``files``."""
    chunks = []
    for part in described:
        offsets, sizes = _sizes(part.fields["offsets"]), _sizes(part.fields["sizes"])
        place = places[key, offsets]
        file, (begin, length) = place["relative_path"], _sizes((place["offset"], place["length"]))
        outside = any(o + n > whole for o, n, whole in zip(offsets, sizes, spec.shape, strict=True))
        missing = begin + length > files[file] or length < math.prod(sizes) * item_size(spec.dtype)
        if outside or missing or place.get("transform_descriptors"):
            raise ValueError("a chunk is not what it should be")
        chunks.append(Chunk(offsets, sizes, file, begin, length))
    if sum(math.prod(chunk.sizes) for chunk in {chunk.offsets: chunk for chunk in chunks}.values()) != spec.numel:
        raise ValueError("chunks are missing")
    return chunks


def _sizes(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, tuple) or not all(type(number) is int and 0 <= number < 2**60 for number in numbers):
        raise ValueError("a size is no number")
    return numbers
