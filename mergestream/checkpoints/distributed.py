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
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mergestream.checkpoints.checkpoint import DTYPE_NAMES, Shard, TensorInfo, TensorSpec, dtype_error, torch_dtype
from mergestream.checkpoints.safetensors import MAX_DIMENSIONS
from mergestream.checkpoints.torch_file import WRAPPERS, check_pickle
from mergestream.errors import MergestreamError, first_line
from mergestream.escaping import is_utf8
from mergestream.files import MAX_JSON_BYTES

if TYPE_CHECKING:
    from torch import Tensor

METADATA = ".metadata"
_MAX_CUT_DIMENSIONS = 8  # torch cuts along one, two or three
_WRAPPERS = (*WRAPPERS, "app")
_TRAINING_STATE = re.compile(r"(optim|lr_sched|sched|dataloader|train_state).*")
"""Keys beside a model that was saved without a key of its own"""


def find_metadata(directory: Path) -> Path | None:
    """The ``.metadata`` of a directory, or of the subdirectory in which accelerate saves the model."""
    places = (directory / METADATA, directory / "pytorch_model_fsdp_0" / METADATA)
    return next((place for place in places if place.is_file()), None)


class Chunk(NamedTuple):
    """A part of a tensor, and the bytes of the file in which ``torch.save`` wrote it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


class DistributedFiles(Shard):
    """A ``.metadata`` file and the ``.distcp`` files beside it; reading a tensor joins its chunks."""

    copies = 2
    path: Path

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        content = _read_metadata(path)
        stored = _find_model(content)
        if not stored:
            raise MergestreamError(
                f"{path.parent} holds no tensors of a model; give the directory of the model's checkpoint"
            )
        files = {file.name: file.stat().st_size for file in path.parent.iterdir() if file.is_file()}
        places = _find_places(content)
        self._chunks: dict[str, list[Chunk]] = {}
        self.tensors = {}
        for name, key in stored.items():
            try:
                fields = content["state_dict_metadata"][key].fields
                spec = _read_spec(name, fields, path)
                chunks = [_read_chunk(record.fields, places[key], spec, files) for record in fields["chunks"]]
                if not _tile(chunks, spec.shape):
                    raise ValueError("chunks are missing or overlap")
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise MergestreamError(
                    f"{path} and the files beside it do not hold all of the tensor {name!r}; copy the checkpoint again"
                ) from error
            self._chunks[name] = chunks
            self.tensors[name] = TensorInfo(spec.dtype, spec.shape, chunks[0].file)

    def read(self, name: str) -> Tensor:
        import torch

        info = self.tensors[name]
        tensor = torch.zeros(info.shape, dtype=torch_dtype(info.dtype))
        for chunk in self._chunks[name]:
            part = self._load(chunk, name)
            if chunk.sizes == info.shape:
                return part
            tensor[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] = part
        return tensor

    def _load(self, chunk: Chunk, name: str) -> Tensor:
        import torch

        file = self.path.with_name(chunk.file)
        try:
            with file.open("rb") as stream:
                stream.seek(chunk.begin)
                data = io.BytesIO(stream.read(chunk.length))
            part: Tensor = torch.load(data, map_location="cpu", weights_only=True).detach()
            if tuple(part.shape) != chunk.sizes or part.dtype != torch_dtype(self.tensors[name].dtype):
                raise ValueError(f"a chunk has the shape {list(part.shape)} and the dtype {part.dtype}")
        except Exception as error:  # torch.load raises anything for a damaged archive
            raise MergestreamError(
                f"the tensor {name!r} in {file} cannot be read, and no pickle in it was executed "
                f"({first_line(error)}); copy the checkpoint again"
            ) from error
        return part


# --- reading the pickle -------------------------------------------------------------------------------------


class _Record:
    """An object of one of torch's classes: its fields or arguments, and no code."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.fields = state


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


def _read_metadata(path: Path) -> Mapping[str, Any]:
    """The fields of the metadata."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise MergestreamError(f"{path} is too large to be the metadata of a checkpoint; copy the checkpoint again")
    data = path.read_bytes()
    check_pickle(path, data)
    try:
        content = _InertUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise MergestreamError(
            f"{path} asks for more than a checkpoint's metadata ({error}); it was not executed: if you trust its "
            "origin, load the checkpoint and save the model's state_dict() as safetensors"
        ) from error
    except Exception as error:  # a damaged pickle raises anything
        raise MergestreamError(
            f"{path} is corrupt or no metadata of a checkpoint; copy the checkpoint again"
        ) from error
    fields = _get_fields(content, "Metadata")
    if not isinstance(fields.get("state_dict_metadata"), dict) or not isinstance(fields.get("storage_data"), dict):
        raise MergestreamError(f"{path} is no metadata of torch.distributed.checkpoint; copy the checkpoint again")
    return fields


def _get_fields(record: Any, kind: str) -> dict[str, Any]:
    """The fields of a record of the class ``kind``; empty for anything else."""
    fields = getattr(record, "fields", None) if type(record).__name__ == kind else None
    return fields if isinstance(fields, dict) else {}


# --- checking what it says ----------------------------------------------------------------------------------


def _find_model(content: Mapping[str, Any]) -> dict[str, str]:
    """Map the model's tensor names to their keys in the metadata, in which nested state dicts are flattened."""
    planned = content.get("planner_data")
    paths: dict[str, tuple[str, ...]] = {}
    for key, record in content["state_dict_metadata"].items():
        if _get_fields(record, "TensorStorageMetadata") and isinstance(key, str) and not key.endswith("_extra_state"):
            path = planned.get(key) if isinstance(planned, dict) else None
            paths[key] = tuple(map(str, path)) if isinstance(path, tuple) and path else (key,)
    while wrapper := next((w for w in _WRAPPERS if any(p[0] == w and len(p) > 1 for p in paths.values())), None):
        paths = {key: path[1:] for key, path in paths.items() if path[0] == wrapper and len(path) > 1}
    return {".".join(path): key for key, path in paths.items() if len(path) == 1 or not _TRAINING_STATE.match(path[0])}


def _read_spec(name: str, fields: Mapping[str, Any], path: Path) -> TensorSpec:
    dtype, shape = fields["properties"].fields[0], _check_sizes(fields["size"])
    if not is_utf8(name) or len(shape) > MAX_DIMENSIONS:
        raise ValueError("impossible name or shape")
    if dtype not in DTYPE_NAMES:
        raise dtype_error(dtype, f"the tensor {name!r} in {path}")
    return TensorSpec(DTYPE_NAMES[dtype], shape)


def _find_places(content: Mapping[str, Any]) -> dict[str, dict[tuple[int, ...], dict[str, Any]]]:
    """The place of each chunk, by its tensor's key and its offsets."""
    places: dict[str, dict[tuple[int, ...], dict[str, Any]]] = {}
    for index, place in content["storage_data"].items():
        fields = _get_fields(index, "MetadataIndex")
        with suppress(ValueError):  # an entry without offsets is no tensor
            offsets = _check_sizes(fields.get("offset"))
            places.setdefault(str(fields.get("fqn")), {})[offsets] = _get_fields(place, "_StorageInfo")
    return places


def _read_chunk(
    fields: Mapping[str, Any],
    places: Mapping[tuple[int, ...], Mapping[str, Any]],
    spec: TensorSpec,
    files: Mapping[str, int],
) -> Chunk:
    """A chunk of a tensor; ValueError or KeyError if it is outside of the tensor or not in ``files``."""
    offsets, sizes = _check_sizes(fields["offsets"]), _check_sizes(fields["sizes"])
    place = places[offsets]
    file, (begin, length) = place["relative_path"], _check_sizes((place["offset"], place["length"]))
    outside = any(o + n > whole for o, n, whole in zip(offsets, sizes, spec.shape, strict=True))
    missing = begin + length > files[file] or length < TensorSpec(spec.dtype, sizes).nbytes
    if outside or missing or place.get("transform_descriptors"):
        raise ValueError("a chunk is outside of its tensor or file, or compressed")
    return Chunk(offsets, sizes, file, begin, length)


def _tile(chunks: Sequence[Chunk], shape: tuple[int, ...]) -> bool:
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


def _check_sizes(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, tuple) or not all(type(number) is int and 0 <= number < 2**60 for number in numbers):
        raise ValueError("not a tuple of sizes")
    return numbers
