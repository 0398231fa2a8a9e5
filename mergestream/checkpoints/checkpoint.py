"""The interface of all checkpoint formats: named tensors, described from the headers before any weight is read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from mergestream.digest import text_digest
from mergestream.errors import MergestreamError, UsageError, did_you_mean
from mergestream.schema import Count
from mergestream.storage import StoredFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The supported dtypes by their safetensors name: bytes per element and torch's name.
_DTYPES = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U64": (8, "uint64"),
    "U32": (4, "uint32"),
    "U16": (2, "uint16"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
}
DTYPES = tuple(_DTYPES)
DTYPE_NAMES = {torch_name: name for name, (_, torch_name) in _DTYPES.items()}
"""Torch's names to safetensors names"""
FLOATS = {torch_name: name for torch_name, name in DTYPE_NAMES.items() if "float" in torch_name}
"""The floating-point types: torch's name to the safetensors name"""
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Short names that ``--dtype`` accepts, beside those of safetensors and torch"""


def float_name(dtype: str | torch.dtype) -> str:
    """Return torch's name of a floating-point type: ``bf16``, ``BF16`` and ``torch.bfloat16`` give ``bfloat16``."""
    name = str(dtype).removeprefix("torch.").lower()
    name = _SHORT.get(name, _DTYPES.get(name.upper(), (0, name))[1])
    if name not in FLOATS:
        near = did_you_mean(name, (*FLOATS, *_SHORT))
        raise UsageError(f"--dtype {dtype} is not one of {', '.join(FLOATS)}{near} (short: {', '.join(_SHORT)})")
    return name


@cache
def item_size(dtype: str) -> int:
    """Bytes per element of a safetensors dtype."""
    return _DTYPES[dtype][0]


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors name: ``"BF16"`` gives ``torch.bfloat16``."""
    import torch

    dtype: torch.dtype = getattr(torch, _DTYPES[name][1])
    return dtype


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype; raises KeyError for an unsupported one."""
    return DTYPE_NAMES[str(dtype).removeprefix("torch.")]


@dataclass(frozen=True)
class TensorSpec:
    """Dtype (by its safetensors name) and shape of a tensor."""

    dtype: str
    shape: tuple[Count, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * _DTYPES[self.dtype][0]

    @cached_property
    def is_float(self) -> bool:
        """Whether the dtype is a floating-point type."""
        return self.dtype in FLOATS.values()


@dataclass(frozen=True)
class TensorInfo(TensorSpec):
    """A tensor of a checkpoint, and the name of the file that holds it."""

    file: str


class Checkpoint(ABC):
    """Named tensors, described by ``tensors`` without reading them."""

    source: str
    """How the user named it: path, URL or hub id"""
    directory: Path | None = None
    """The directory with the config and the tokenizer, if there is one"""
    tensors: Mapping[str, TensorInfo]
    aliases: Mapping[str, str] = MappingProxyType({})
    """Later name to first name, for tensors that share their memory"""
    fingerprint: str | None = None
    """Changes when a file changes; computed from the headers. None for a model in memory."""
    metadata: Mapping[str, str] = MappingProxyType({})
    """What a safetensors header says besides its tensors"""
    note: str | None = None
    """A sentence that the user should read when this checkpoint is merged"""
    copies: int = 0
    """Copies of a tensor in memory while it is read; 0 if the tensor is a view of the file"""
    has_weights: ClassVar[bool] = True
    """False for a base of which only the configuration is known"""

    def companions(self) -> Iterator[Path]:
        """The files beside the weights that belong to the model: config, tokenizer, custom code."""
        from mergestream.checkpoints.layout import companions

        return companions(self.directory) if self.directory else iter(())

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Read a tensor to the CPU. It may be a view of the file or of the caller's memory: never write to it."""

    def stored_name(self, name: str) -> str:
        """The tensor's name in the file."""
        return name

    def place(self, name: str) -> str:
        """Where a tensor is, for messages."""
        file = self.tensors[name].file
        return f"tensor {self.stored_name(name)} in {file}" + (f" of {self.source}" if file != self.source else "")

    def close(self) -> None:  # noqa: B027
        """Release the files. Tensors that were read stay valid."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RenamedCheckpoint(Checkpoint):
    """A checkpoint whose tensors have other names."""

    def __init__(self, checkpoint: Checkpoint, stored: Mapping[str, str]) -> None:
        """``stored`` maps each new name to the name in the checkpoint; it omits the tensors to leave out."""
        self._checkpoint, self._stored = checkpoint, stored
        self.source, self.directory = checkpoint.source, checkpoint.directory
        self.tensors = {name: checkpoint.tensors[old] for name, old in stored.items()}
        self.fingerprint, self.note, self.copies = checkpoint.fingerprint, checkpoint.note, checkpoint.copies

    def companions(self) -> Iterator[Path]:
        return self._checkpoint.companions()

    def read(self, name: str) -> Tensor:
        return self._checkpoint.read(self._stored[name])

    def stored_name(self, name: str) -> str:
        return self._checkpoint.stored_name(self._stored.get(name, name))

    def close(self) -> None:
        self._checkpoint.close()


class Shard(Checkpoint):
    """One file of a checkpoint; each file format is a subclass, listed in `mergestream.checkpoints.layout`."""

    path: Path | StoredFile

    def __init__(self, path: Any) -> None:
        """Open a file and check its header; no weight is read."""
        self.path, self.source = path, str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path only: a worker process opens the file again."""
        return type(self), (self.path,)


class FileCheckpoint(Checkpoint):
    """A checkpoint of one or several files."""

    def __init__(
        self, source: str, directory: Path | None, shards: Iterable[Shard], fingerprint: str | None = None
    ) -> None:
        """``fingerprint`` is that of another process that has opened the same files, if there is one."""
        self.source = source
        self._shards = list(shards)
        self.directory = next((shard.directory for shard in self._shards if shard.directory), directory)
        self.note = next((f"{source} {shard.note}" for shard in self._shards if shard.note), None)
        self._owner = {name: shard for shard in self._shards for name in shard.tensors}
        if not self._owner:
            raise MergestreamError(f"{source} holds no tensors")
        self.tensors = {name: shard.tensors[name] for name, shard in self._owner.items()}
        self.aliases = {name: first for shard in self._shards for name, first in shard.aliases.items()}
        self.metadata = self._shards[0].metadata
        self.copies = max(shard.copies for shard in self._shards)
        self.fingerprint = _fingerprint(self._shards)
        if fingerprint not in (None, self.fingerprint):
            self.close()
            raise MergestreamError(f"{source} has other files on this machine; use a directory that all machines share")

    def read(self, name: str) -> Tensor:
        return self._owner[name].read(name)

    def companions(self) -> Iterator[Path]:
        return next((shard.companions() for shard in self._shards if shard.directory), super().companions())

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return FileCheckpoint, (self.source, self.directory, self._shards, self.fingerprint)


def dtype_error(dtype: str, where: str) -> MergestreamError:
    """The error for a dtype that cannot be merged, given by its safetensors or torch name."""
    if dtype.lower().startswith(("f8", "f6", "f4", "float8", "float4", "q", "i4", "u4")):
        return MergestreamError(f"{where} is quantised ({dtype}); dequantise the checkpoint first")
    return MergestreamError(f"{where} has the dtype {dtype}; save it as one of {', '.join(_DTYPES)}")


def describe_tensors(
    state_dict: Mapping[str, Any], holder: str, remedy: str
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Describe torch tensors, and find the aliases: later to first name of the same view of the same memory.

    Refuse what is no plain dense tensor; ``remedy`` ends the error.
    """
    import torch

    infos: dict[str, TensorInfo] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            raise MergestreamError(f"{holder} holds {name!r} of type {type(tensor).__name__}, no tensor; {remedy}")
        where = f"the tensor {name!r} in {holder}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_NAMES:
            raise dtype_error(dtype, where)
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_neg():
            raise MergestreamError(f"{where} is not a plain dense tensor; save it dense, with its data")
        infos[name] = TensorInfo(DTYPE_NAMES[dtype], tuple(tensor.shape), Path(holder).name)
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and first.setdefault(view, name) != name:
            aliases[name] = first[view]
    return infos, aliases


def _fingerprint(shards: Iterable[Shard]) -> str:
    """Digest of sizes, modification times (or ETags) and tensor descriptions of all files."""
    lines = []
    for shard in shards:
        if isinstance(shard.path, StoredFile):
            version = f"{shard.path.size} {shard.path.tag}"
        else:
            stat = shard.path.stat()
            version = f"{stat.st_size} {stat.st_mtime_ns}"
        lines.append(f"{shard.path.name} {version}")
        lines += [f"{name} {info.dtype} {info.shape}" for name, info in shard.tensors.items()]
    return text_digest("\n".join(lines))
