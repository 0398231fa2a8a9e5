"""Directories of ``torch.distributed.checkpoint`` (FSDP): tensors in chunks, described by ``.metadata``.

``.metadata`` is a pickle that torch would execute. Here it is unpickled into inert records (fields, no code), and every
number in it is checked.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, convert

from mergestream.checkpoints.checkpoint import DTYPE_NAMES, Shard, TensorInfo, TensorSpec, dtype_error, torch_dtype
from mergestream.checkpoints.safetensors import MAX_DIMENSIONS
from mergestream.checkpoints.torch_file import NOT_EXECUTED, WRAPPERS, check_pickle
from mergestream.errors import MergestreamError, first_line
from mergestream.escaping import is_utf8
from mergestream.files import AGAIN, MAX_JSON_BYTES
from mergestream.schema import Count

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"
PLACES = (METADATA, f"pytorch_model_fsdp_0/{METADATA}")
"""Where a directory has it: accelerate saves the model in a subdirectory"""
_MAX_CUT_DIMENSIONS = 8  # torch cuts along one, two or three
_WRAPPERS = (*WRAPPERS, "app")
_TRAINING_STATE = re.compile(r"(optim|lr_sched|sched|dataloader|train_state).*")
"""Keys beside a model that was saved without a key of its own"""


# --- what the metadata says: torch's classes, with the fields that are read ----------------------------------

Sizes = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMENSIONS)]


class _Chunk(Struct):
    """A part of a tensor (torch's ``ChunkStorageMetadata``)."""

    offsets: Sizes
    sizes: Sizes


class _Tensor(Struct):
    """A tensor and its chunks (``TensorStorageMetadata``)."""

    properties: Any
    size: Sizes
    chunks: list[_Chunk]


class _Index(Struct, frozen=True):
    """The name of a chunk (``MetadataIndex``); what is no tensor has no offset."""

    fqn: str
    offset: Sizes | None = None


class _Place(Struct):
    """The bytes of the file in which ``torch.save`` wrote a chunk (``_StorageInfo``)."""

    relative_path: str
    offset: Count
    length: Count
    transform_descriptors: Any = None


class _Metadata(Struct):
    """The content of ``.metadata`` (``Metadata``)."""

    state_dict_metadata: dict[str, Any]
    storage_data: dict[_Index, _Place]
    planner_data: Any = None


class DistributedFiles(Shard):
    """A ``.metadata`` file and the ``.distcp`` files beside it; reading a tensor joins its chunks."""

    copies = 2
    path: Path

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        metadata = _read_metadata(path)
        stored = _find_model(metadata)
        if not stored:
            raise MergestreamError(f"{path.parent} holds no tensors of a model; give the directory of the model")
        files = {file.name: file.stat().st_size for file in path.parent.iterdir() if file.is_file()}
        self._chunks: dict[str, list[tuple[_Chunk, _Place]]] = {}
        self.tensors = {}
        for name, key in stored.items():
            try:
                tensor = convert(metadata.state_dict_metadata[key], _Tensor, from_attributes=True)
                dtype = tensor.properties.state[0]
                if dtype not in DTYPE_NAMES:
                    raise dtype_error(dtype, f"the tensor {name!r} in {path}")
                places = [(chunk, metadata.storage_data[_Index(key, chunk.offsets)]) for chunk in tensor.chunks]
                spec = TensorInfo(DTYPE_NAMES[dtype], tensor.size, places[0][1].relative_path)
                for chunk, place in places:
                    _check_chunk(chunk, place, spec, files)
                if not is_utf8(name) or not _tile(tensor.chunks, tensor.size):
                    raise ValueError("chunks are missing or overlap")
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise MergestreamError(f"{path} lacks a part of the tensor {name!r}; {AGAIN}") from error
            self._chunks[name], self.tensors[name] = places, spec

    def read(self, name: str) -> Tensor:
        import torch

        info = self.tensors[name]
        tensor = torch.zeros(info.shape, dtype=torch_dtype(info.dtype))
        for chunk, place in self._chunks[name]:
            part = self._load(chunk, place, name)
            if chunk.sizes == info.shape:
                return part
            tensor[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = part
        return tensor

    def _load(self, chunk: _Chunk, place: _Place, name: str) -> Tensor:
        import torch

        file = self.path.with_name(place.relative_path)
        try:
            with file.open("rb") as stream:
                stream.seek(place.offset)
                data = io.BytesIO(stream.read(place.length))
            part: Tensor = torch.load(data, map_location="cpu", weights_only=True).detach()
            if tuple(part.shape) != chunk.sizes or part.dtype != torch_dtype(self.tensors[name].dtype):
                raise ValueError(f"a chunk has the shape {list(part.shape)} and the dtype {part.dtype}")
        except Exception as error:  # torch.load raises anything for a damaged archive
            where, reason = f"the tensor {name!r} in {file}", first_line(error)
            raise MergestreamError(f"{where} cannot be read, no pickle was executed ({reason}); {AGAIN}") from error
        return part


# --- reading the pickle -------------------------------------------------------------------------------------


class _Record:
    """An object of one of torch's classes: its fields, and no code."""

    def __init__(self, *arguments: Any) -> None:
        """Some classes are made from arguments, and none of these is needed."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


_MODULES = re.compile(r"torch\.distributed\.checkpoint\.(metadata|filesystem)|torch\.serialization|pathlib(\._local)?")
_BUILTINS = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}


class _InertUnpickler(pickle.Unpickler):
    """Unpickles objects of the modules that describe a checkpoint as records, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _BUILTINS:
            return _BUILTINS[module, name]
        if _MODULES.fullmatch(module):
            return type(name, (_Record,), {})
        if module == "torch" and name.islower():
            return name  # a dtype, by its name
        raise pickle.UnpicklingError(f"{module}.{name}")


def _read_metadata(path: Path) -> _Metadata:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise MergestreamError(f"{path} is too large to be the metadata of a checkpoint; copy the checkpoint again")
    data = path.read_bytes()
    check_pickle(path, data)
    try:
        return convert(_InertUnpickler(io.BytesIO(data)).load(), _Metadata, from_attributes=True)
    except pickle.UnpicklingError as error:
        raise MergestreamError(f"{path} asks for more than metadata ({error}): it {NOT_EXECUTED}") from error
    except Exception as error:  # a damaged pickle raises anything
        raise MergestreamError(f"{path} is corrupt or no metadata; copy the checkpoint again") from error


# --- checking what it says ----------------------------------------------------------------------------------


def _find_model(metadata: _Metadata) -> dict[str, str]:
    """Map the model's tensor names to their keys in the metadata, in which nested state dicts are flattened."""
    planned = metadata.planner_data
    paths: dict[str, tuple[str, ...]] = {}
    for key, record in metadata.state_dict_metadata.items():
        if type(record).__name__ == "TensorStorageMetadata" and not key.endswith("_extra_state"):
            path = planned.get(key) if isinstance(planned, dict) else None
            paths[key] = tuple(map(str, path)) if isinstance(path, tuple) and path else (key,)
    while wrapper := next((w for w in _WRAPPERS if any(p[0] == w and len(p) > 1 for p in paths.values())), None):
        paths = {key: path[1:] for key, path in paths.items() if path[0] == wrapper and len(path) > 1}
    return {".".join(path): key for key, path in paths.items() if len(path) == 1 or not _TRAINING_STATE.match(path[0])}


def _check_chunk(chunk: _Chunk, place: _Place, spec: TensorSpec, files: Mapping[str, int]) -> None:
    """Refuse a chunk that is outside of its tensor, or not whole in one of the ``files``."""
    outside = any(o + n > whole for o, n, whole in zip(chunk.offsets, chunk.sizes, spec.shape, strict=True))
    missing = place.offset + place.length > files[place.relative_path]
    if outside or missing or place.length < TensorSpec(spec.dtype, chunk.sizes).nbytes or place.transform_descriptors:
        raise ValueError("a chunk is outside of its tensor or file, or compressed")


def _tile(chunks: Sequence[_Chunk], shape: tuple[int, ...]) -> bool:
    """Whether the chunks cover every element exactly once; ranks may repeat a chunk.

    A box is determined by its corners with alternating signs. Boxes tile a larger one exactly if the signed corners
    that they do not share are its corners: no grid or comparison of all pairs is needed.
    """
    boxes = {(chunk.offsets, chunk.sizes) for chunk in chunks}
    cut = [axis for axis, size in enumerate(shape) if any(sizes[axis] != size for _, sizes in boxes)]
    if len(cut) > _MAX_CUT_DIMENSIONS:
        raise ValueError(f"it is cut along {len(cut)} dimensions")
    corners: Counter[tuple[int, ...]] = Counter()
    for signs in product((0, 1), repeat=len(cut)):
        sign = (-1) ** sum(signs)
        for offsets, sizes in boxes:
            corners[tuple(offsets[axis] + end * sizes[axis] for axis, end in zip(cut, signs, strict=True))] += sign
        corners[tuple(end * shape[axis] for axis, end in zip(cut, signs, strict=True))] -= sign
    return not any(corners.values())
