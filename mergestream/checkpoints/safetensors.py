"""Safetensors files, local or in object storage: 8 bytes of header length, a JSON header, the tensors' bytes.

The header is parsed here, not by the safetensors package: errors name file and tensor, and a tensor is a view of the
memory-mapped file instead of a copy.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import mmap
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints.checkpoint import DTYPES, Shard, TensorInfo, dtype_error, item_size, torch_dtype
from mergestream.errors import MergestreamError
from mergestream.storage import StoredFile
from mergestream.storage.ranges import SMALL, CoalescedReader

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 64  # torch's limit
_USUAL_HEADER = 1 << 17
"""Bytes of an object that the first request fetches; most headers fit"""
_AGAIN = "download or copy it again"
# Python has this flag since 3.12. Without it, the system may refuse a map larger than the RAM.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class SafetensorsFile(Shard):
    """A validated ``.safetensors`` file; reading a tensor copies nothing."""

    suffixes = (".safetensors",)
    path: Path

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                data_start, header = _read_header(path, file.read, size)
                self.tensors, self._begin = _check_header(path, header, data_start, size)
                # Private and writable: a stray write stays in memory, where a read-only map would crash.
                self._map: mmap.mmap | None = mmap.mmap(
                    file.fileno(), size, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        except OSError as error:
            raise MergestreamError(f"{path} cannot be read: {error.strerror}; check the disk") from error
        self._size = size

    def read(self, name: str) -> Tensor:
        import torch

        info, item = self.tensors[name], item_size(self.tensors[name].dtype)
        dtype, numel = torch_dtype(info.dtype), math.prod(info.shape)
        if numel == 0:
            return torch.empty(info.shape, dtype=dtype)
        if self._map is None:
            raise ValueError(f"{self.path} is closed")
        if self._map.size() != self._size:  # touching pages beyond the end would kill the process
            raise MergestreamError(f"{self.path} changed its size while {name!r} was being read; {_AGAIN}")
        begin = self._begin[name]
        page = begin - begin % mmap.PAGESIZE
        with contextlib.suppress(AttributeError, OSError):  # a hint to fetch the whole tensor, which some systems lack
            self._map.madvise(mmap.MADV_WILLNEED, page, begin + numel * item - page)
        if begin % item:  # legal in the format, but not for every vectorised kernel
            data = torch.frombuffer(self._map, dtype=torch.uint8, offset=begin, count=numel * item)
            return data.clone().view(dtype).reshape(info.shape)
        return torch.frombuffer(self._map, dtype=dtype, offset=begin, count=numel).reshape(info.shape)

    def close(self) -> None:
        self._map = None  # not closed: tensors that are views of the map keep it alive


class SafetensorsObject(Shard):
    """A ``.safetensors`` file in object storage: header and tensors are read by range, small tensors in groups."""

    suffixes = (".safetensors",)
    copies = 1

    @classmethod
    def can_read(cls, path: Path | StoredFile) -> bool:
        return isinstance(path, StoredFile) and path.name.endswith(cls.suffixes)

    def __init__(self, found: StoredFile) -> None:
        self.path = self._object = found
        start = io.BytesIO(found.read(0, min(_USUAL_HEADER, found.size)))

        def read(count: int) -> bytes:
            data = start.read(count)
            return data + found.read(start.tell(), start.tell() + count - len(data))

        data_start, header = _read_header(found, read, found.size)
        self.tensors, self._begin = _check_header(found, header, data_start, found.size)
        spans = {name: (self._begin[name], self._begin[name] + info.nbytes) for name, info in self.tensors.items()}
        self._small = {name: span for name, span in spans.items() if 0 < span[1] - span[0] < SMALL}
        self._coalesced = CoalescedReader(found, self._small.values())

    def read(self, name: str) -> Tensor:
        import torch

        info = self.tensors[name]
        tensor = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        data = tensor.view(-1).view(torch.uint8).numpy().data
        if name in self._small:
            data[:] = self._coalesced.read(*self._small[name])
        else:
            self._object.read_into(data, self._begin[name])
        return tensor


def _read_header(path: Path | StoredFile, read: Callable[[int], bytes], size: int) -> tuple[int, dict[str, Any]]:
    """Read the header; returns where the data starts, and the header. ``read(n)`` returns the next n bytes."""
    if size < 8:
        raise MergestreamError(f"{path} is no safetensors file: it has only {size} bytes; {_AGAIN}")
    (length,) = struct.unpack("<Q", read(8))
    if length > MAX_HEADER:
        raise MergestreamError(f"{path} is no safetensors file: its header would have {length} bytes; {_AGAIN}")
    if length > size - 8:
        raise MergestreamError(
            f"{path} is truncated within its header: {length + 8 - size} bytes are missing; {_AGAIN}"
        )
    try:
        header = json.loads(read(length).decode(), object_pairs_hook=_no_duplicates)
        "".join(header).encode()  # half a surrogate pair is valid JSON, but no text
    except KeyError as error:
        raise MergestreamError(f"{path} has a corrupt header: {error.args[0]!r} is in it twice; {_AGAIN}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise MergestreamError(f"{path} is no safetensors file or has a corrupt header; {_AGAIN}") from error
    if not isinstance(header, dict):
        raise MergestreamError(f"{path} is no safetensors file: its header is not a JSON object; {_AGAIN}")
    return 8 + length, header


def _check_header(
    path: Path | StoredFile, header: dict[str, Any], data_start: int, size: int
) -> tuple[MappingProxyType[str, TensorInfo], dict[str, int]]:
    """Check that the tensors fill the file without gap or overlap; returns them and where each begins."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MergestreamError(f"{path} has a corrupt header: its __metadata__ is not a table of strings; {_AGAIN}")
    tensors: dict[str, TensorInfo] = {}
    spans: dict[str, tuple[int, int]] = {}
    for name, entry in header.items():
        tensors[name], spans[name] = _check_entry(path, name, entry)

    in_order = sorted(spans.items(), key=lambda item: item[1])
    end, before = 0, ""
    for name, (begin, stop) in in_order:
        if begin != end:
            fault = "overlaps" if begin < end else "leaves a gap after"
            raise MergestreamError(
                f"{path} has a corrupt header: the tensor {name!r} {fault} "
                + (f"{before!r}" if before else "the header")
            )
        end, before = stop, name

    missing = data_start + end - size
    if missing > 0:
        cut = next(name for name, (_, stop) in in_order if data_start + stop > size)
        raise MergestreamError(
            f"{path} is truncated: {missing} bytes are missing, from the tensor {cut!r} on; {_AGAIN}"
        )
    if missing < 0:
        raise MergestreamError(f"{path} has {-missing} bytes too many after its last tensor; {_AGAIN}")
    return MappingProxyType(tensors), {name: data_start + begin for name, (begin, _) in spans.items()}


def _check_entry(path: Path | StoredFile, name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    where = f"the tensor {name!r} in {path}"
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        valid = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= MAX_DIMENSIONS
        valid = valid and all(type(n) is int and 0 <= n < 2**60 for n in (*shape, begin, end))
        valid = valid and math.prod(max(n, 1) for n in shape) < 2**60  # what torch can address, empty or not
    except (TypeError, KeyError, ValueError):
        valid = False
    if not valid:
        raise MergestreamError(f"{where} has a corrupt header entry; {_AGAIN}")
    if dtype not in DTYPES:
        raise dtype_error(dtype, where)
    size = math.prod(shape) * item_size(dtype)
    if size != end - begin:
        raise MergestreamError(
            f"{where} has a corrupt header entry: shape {shape} of {dtype} takes {size} bytes, "
            f"its offsets span {end - begin}"
        )
    return TensorInfo(dtype, tuple(shape), path.name), (begin, end)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise KeyError(key)
        table[key] = value
    return table
