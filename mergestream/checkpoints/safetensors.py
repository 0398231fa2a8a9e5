"""Safetensors files, local or in object storage: 8 bytes of header length, a JSON header, the tensors' bytes.

The header is parsed here, not by the safetensors package: errors name file and tensor, and a tensor is a view of the
memory-mapped file instead of a copy.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, convert

from mergestream.checkpoints.checkpoint import DTYPES, Shard, TensorInfo, dtype_error, item_size, torch_dtype
from mergestream.errors import MergestreamError
from mergestream.files import AGAIN
from mergestream.schema import Count, unique_keys
from mergestream.storage import StoredFile
from mergestream.storage.base import RANGE, transfers

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEADER = 100_000_000  # the format's own limit
MAX_DIMENSIONS = 64  # torch's limit
_USUAL_HEADER = 1 << 17
"""Bytes of an object that the first request fetches; most headers fit"""
_SMALL, _RUNS_KEPT = 1 << 20, 2
"""Adjacent tensors of fewer bytes are fetched together, as a run, and so many runs stay in memory"""
# Python has this flag since 3.12. Without it, the system may refuse a map larger than the RAM.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class _Entry(Struct):
    """A tensor in the header."""

    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[Count, Count]


class _SafetensorsShard(Shard):
    """A file whose header is read and checked; ``_spans`` has the bytes of each tensor."""

    def _read_header(self, size: int, read: Callable[[int, int], bytes]) -> None:
        """Read and check the header; ``read(begin, end)`` returns bytes of the file."""
        path = self.path
        if size < 8:
            raise MergestreamError(f"{path} is no safetensors file: it has only {size} bytes; {AGAIN}")
        (length,) = struct.unpack("<Q", read(0, 8))
        if length > MAX_HEADER:
            raise MergestreamError(f"{path} is no safetensors file: its header would have {length} bytes; {AGAIN}")
        if length > size - 8:
            raise MergestreamError(f"{path} is truncated: {length + 8 - size} bytes of its header are missing; {AGAIN}")
        try:
            header = json.loads(read(8, 8 + length).decode(), object_pairs_hook=unique_keys)
            if not isinstance(header, dict):
                raise ValueError("not a JSON object")
            "".join(header).encode()  # half a surrogate pair is valid JSON, but no text
            self.metadata = convert(header.pop("__metadata__", {}), dict[str, str])
        except (ValueError, RecursionError) as error:
            raise MergestreamError(
                f"{path} is no safetensors file or has a corrupt header ({error}); {AGAIN}"
            ) from error
        self._spans, position = dict[str, tuple[int, int]](), 8 + length
        entries = {name: _check_entry(path, name, entry) for name, entry in header.items()}
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            begin, end = (8 + length + offset for offset in entry.data_offsets)
            if begin != position:
                fault = "overlaps the tensor before it" if begin < position else "leaves a gap before it"
                raise MergestreamError(f"{path} has a corrupt header: the tensor {name!r} {fault}")
            self._spans[name], position = (begin, end), end
        if position > size:
            raise MergestreamError(f"{path} is truncated: {position - size} bytes are missing at its end; {AGAIN}")
        if position < size:
            raise MergestreamError(f"{path} has {size - position} bytes too many after its last tensor; {AGAIN}")
        self.tensors = {name: TensorInfo(entry.dtype, entry.shape, path.name) for name, entry in entries.items()}


class SafetensorsFile(_SafetensorsShard):
    """A validated ``.safetensors`` file; reading a tensor copies nothing."""

    path: Path

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            with path.open("rb") as file:
                number = file.fileno()
                self._size = os.fstat(number).st_size
                self._read_header(self._size, lambda begin, end: os.pread(number, end - begin, begin))
                # Private and writable: a stray write stays in memory, where a read-only map would crash.
                self._map: mmap.mmap | None = mmap.mmap(
                    number, self._size, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE
                )
        except OSError as error:
            raise MergestreamError(f"{path} cannot be read: {error.strerror}; check the disk") from error

    def read(self, name: str) -> Tensor:
        import torch

        info = self.tensors[name]
        dtype, begin, end = torch_dtype(info.dtype), *self._spans[name]
        if begin == end:
            return torch.empty(info.shape, dtype=dtype)
        if self._map is None:
            raise ValueError(f"{self.path} is closed")
        if self._map.size() != self._size:  # touching pages beyond the end would kill the process
            raise MergestreamError(f"{self.path} changed its size while {name!r} was being read; {AGAIN}")
        page = begin - begin % mmap.PAGESIZE
        with contextlib.suppress(AttributeError, OSError):  # a hint to fetch the whole tensor, which some systems lack
            self._map.madvise(mmap.MADV_WILLNEED, page, end - page)
        if begin % dtype.itemsize:  # legal in the format, but not for every vectorised kernel
            data = torch.frombuffer(self._map, dtype=torch.uint8, offset=begin, count=end - begin)
            return data.clone().view(dtype).reshape(info.shape)
        count = (end - begin) // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, offset=begin, count=count).reshape(info.shape)

    def close(self) -> None:
        self._map = None  # not closed: tensors that are views of the map keep it alive


class SafetensorsObject(_SafetensorsShard):
    """A ``.safetensors`` file in object storage: header and tensors are read by range, adjacent small
    tensors together."""

    copies = 1
    path: StoredFile

    def __init__(self, path: StoredFile) -> None:
        super().__init__(path)
        start = path.read(0, min(_USUAL_HEADER, path.size))
        self._read_header(path.size, lambda begin, end: (start if end <= len(start) else path.read(0, end))[begin:end])
        self._runs: dict[str, list[int]] = {}
        """By small tensor: where its run begins and ends"""
        run = [0, 0]
        for name, (begin, end) in sorted(self._spans.items(), key=lambda item: item[1]):
            if 0 < end - begin < _SMALL:
                if begin != run[1] or end - run[0] > RANGE:
                    run = [begin, end]
                run[1], self._runs[name] = end, run
        self._fetch, self._lock = lru_cache(_RUNS_KEPT)(partial(transfers().submit, path.read)), Lock()

    def read(self, name: str) -> Tensor:
        import torch

        info = self.tensors[name]
        tensor = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
        data = tensor.view(-1).view(torch.uint8).numpy().data
        begin, end = self._spans[name]
        if run := self._runs.get(name):
            with self._lock:  # the next thread finds what this one has begun to fetch
                fetched = self._fetch(*run)
            data[:] = fetched.result()[begin - run[0] : end - run[0]]
        else:
            self.path.read_into(data, begin)
        return tensor


def _check_entry(path: Path | StoredFile, name: str, raw: Any) -> _Entry:
    where = f"the tensor {name!r} in {path}"
    try:
        entry = convert(raw, _Entry)
        if math.prod(max(n, 1) for n in entry.shape) >= 2**60:  # more than torch can address, even if it is empty
            raise ValueError(f"shape {list(entry.shape)}")
    except ValueError as error:
        raise MergestreamError(f"{where} has a corrupt header entry ({error}); {AGAIN}") from error
    if entry.dtype not in DTYPES:
        raise dtype_error(entry.dtype, where)
    begin, end = entry.data_offsets
    size = math.prod(entry.shape) * item_size(entry.dtype)
    if size != end - begin:
        fault = f"{entry.dtype} {list(entry.shape)} takes {size} bytes, its offsets span {end - begin}"
        raise MergestreamError(f"{where} has a corrupt header entry ({fault}); {AGAIN}")
    return entry
