"""What every checkpoint is, whatever its format: named tensors that are described before they are read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from mergestream.checkpoints.layout import companions
from mergestream.digest import text_digest
from mergestream.errors import MergestreamError, UsageError, did_you_mean
from mergestream.objects import Object
from mergestream.schema import Count

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The dtypes we merge or carry over, by their safetensors name: bytes per element and torch's name.
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
_NAMES = {torch_name: name for name, (_, torch_name) in _DTYPES.items()}
FLOATS = {torch_name: name for torch_name, name in _NAMES.items() if "float" in torch_name}
"""The floating-point types: torch's name to the safetensors name"""
_ALIASES = {
    **{"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16"},
    **{"fp32": "float32", "f32": "float32", "float": "float32", "single": "float32"},
    **{"fp64": "float64", "f64": "float64", "double": "float64"},
}
"""What else people call them"""


def float_name(dtype: str | torch.dtype) -> str:
    """Torch's name of a floating-point type, however a user calls it: ``bf16``, ``BF16``, ``torch.bfloat16``."""
    name = str(dtype).removeprefix("torch.").lower()
    name = _ALIASES.get(name, name)
    if name not in FLOATS:
        near = did_you_mean(name, (*FLOATS, *_ALIASES))
        raise UsageError(f"--dtype {dtype} is not one of {', '.join(FLOATS)}{near} (short: bf16, fp16, fp32, fp64)")
    return name


@dataclass(frozen=True)
class TensorSpec:
    """Dtype (by its safetensors name) and shape of a tensor."""

    dtype: str
    shape: tuple[Count, ...]

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        return self.numel * item_size(self.dtype)

    @cached_property
    def is_float(self) -> bool:
        return self.dtype in FLOATS.values()


@dataclass(frozen=True)
class TensorInfo(TensorSpec):
    """A tensor of a checkpoint, and the name of the file that holds it."""

    file: str


class Checkpoint(ABC):
    """Named tensors, described by ``tensors`` without reading them.

    ``aliases`` maps the later name of a tensor that is stored once under several names to its first name.
    ``fingerprint`` changes when a file does, and costs no reading of the data; in memory there is none.
    ``directory`` is where a config and a tokenizer may lie, if the checkpoint is a directory.
    """

    source: str
    directory: Path | None = None
    tensors: Mapping[str, TensorInfo]
    aliases: Mapping[str, str] = MappingProxyType({})
    fingerprint: str | None = None
    remark: str | None = None
    """What a user should know of it when it is merged"""
    copies: int = 0
    """How often a tensor is in memory while it is read: not at all where it is a view of the file"""
    has_weights: ClassVar[bool] = True
    """Whether there is anything to read: of some bases only the configuration is known."""

    def companions(self) -> Iterator[Path]:
        """The files of its directory that go with the model wherever it goes."""
        return companions(self.directory) if self.directory else iter(())

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The tensor on the CPU, possibly a view of the file or of the caller's memory: never write to it."""

    def stored_name(self, name: str) -> str:
        """What the file calls a tensor."""
        return name

    def close(self) -> None:  # noqa: B027
        """Release the files, if there are any; tensors that were read stay valid."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Shard(ABC):
    """One file of a checkpoint."""

    path: Path | Object
    copies: ClassVar[int] = 0
    tensors: Mapping[str, TensorInfo]
    aliases: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def read(self, name: str) -> Tensor: ...

    @abstractmethod
    def close(self) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]:
        """It travels as a place: who gets it opens the file again."""
        return type(self), (self.path,)


class FileCheckpoint(Checkpoint):
    """A checkpoint of one or several files."""

    def __init__(self, source: str, directory: Path | None, shards: Iterable[Shard]) -> None:
        self.source = source
        self.directory = directory
        self._shards = list(shards)
        self._owner: dict[str, Shard] = {}
        tensors: dict[str, TensorInfo] = {}
        aliases: dict[str, str] = {}
        for shard in self._shards:
            for name, info in shard.tensors.items():
                if name in tensors:
                    raise MergestreamError(
                        f"{shard.path} and {tensors[name].file} both hold the tensor {name!r}; "
                        "remove the one that does not belong to this checkpoint"
                    )
                tensors[name] = info
                self._owner[name] = shard
            aliases.update(shard.aliases)
        if not tensors:
            raise MergestreamError(f"{source} holds no tensors")
        self.tensors = MappingProxyType(tensors)
        self.aliases = MappingProxyType(aliases)
        self.copies = max(shard.copies for shard in self._shards)
        self.fingerprint = _fingerprint(self._shards)

    def read(self, name: str) -> Tensor:
        return self._owner[name].read(name)

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (self.fingerprint, type(self), *self._arguments())

    def _arguments(self) -> tuple[Any, ...]:
        """What it was made of."""
        return self.source, self.directory, self._shards


def item_size(dtype: str) -> int:
    return _DTYPES[dtype][0]


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors name: ``"BF16"`` gives ``torch.bfloat16``."""
    import torch

    dtype: torch.dtype = getattr(torch, _DTYPES[name][1])
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype; a KeyError for one that no checkpoint may have."""
    return _NAMES[_torch_name(dtype)]


def check_dtype(dtype: str, where: str) -> None:
    """Refuse a dtype, by its safetensors or its torch name, that cannot be merged."""
    if dtype in _DTYPES or dtype in _NAMES:
        return
    if dtype.lower().startswith(("f8", "f6", "f4", "float8", "float4", "q", "i4", "u4")):
        raise MergestreamError(f"{where} is quantised ({dtype}); dequantise the checkpoint first")
    raise MergestreamError(
        f"{where} has the dtype {dtype}, which cannot be merged; save it as one of {', '.join(_DTYPES)}"
    )


def describe(name: str, tensor: Tensor, holder: str | Path) -> TensorInfo:
    """The info of a tensor that torch holds, refused unless it is a plain dense one."""
    import torch

    where = f"the tensor {name!r} in {holder}"
    check_dtype(_torch_name(tensor.dtype), where)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_neg():
        raise MergestreamError(f"{where} is not a plain dense tensor; save it dense, with its data")
    return TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape), Path(holder).name)


def shared_views(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Tensors that are the same view of the same memory: later name to first name."""
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        view = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if first.setdefault(view, name) != name:
            aliases[name] = first[view]
    return aliases


def _torch_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _opened_again(fingerprint: str, kind: type[FileCheckpoint], *arguments: Any) -> FileCheckpoint:
    """A checkpoint that was opened elsewhere, if it is the same here."""
    checkpoint = kind(*arguments)
    if checkpoint.fingerprint != fingerprint:
        checkpoint.close()
        raise MergestreamError(f"{checkpoint.source} is not the same files everywhere")
    return checkpoint


def _fingerprint(shards: Iterable[Shard]) -> str:
    lines = []
    for shard in shards:
        lines.append(f"{shard.path.name} {_version(shard.path)}")
        lines += [f"{name} {info.dtype} {info.shape}" for name, info in shard.tensors.items()]
    return text_digest("\n".join(lines))


def _version(file: Path | Object) -> str:
    """Another one for a file that was changed."""
    if isinstance(file, Object):
        return f"{file.size} {file.tag}"
    stat = file.stat()
    return f"{stat.st_size} {stat.st_mtime_ns}"
