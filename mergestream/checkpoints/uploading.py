"""Writing safetensors to a bucket, where nothing is written in place: as objects of tensors that were done together."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from tempfile import TemporaryFile
from threading import Lock
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from mergestream.checkpoints.checkpoint import TensorSpec, item_size
from mergestream.checkpoints.safetensors import SafetensorsObject
from mergestream.checkpoints.writer import (
    DEFAULT_SHARD_SIZE,
    SafetensorsWriter,
    TensorWriter,
    checked_bytes,
    index_text,
    missing,
    safetensors_header,
    write_at,
)
from mergestream.files import write_error
from mergestream.storage import Storage

if TYPE_CHECKING:
    from torch import Tensor

SHARD = 64 << 20
"""Bytes at which an object is large enough: it is put at once, and nothing of it is left where that fails"""
_CHUNK = 16 << 20


def open_writer(
    storage: Storage,
    folder: str,
    layout: Mapping[str, TensorSpec],
    stem: str = "model",
    *,
    resume: bool = False,
    one_file: bool = False,
) -> TensorWriter:
    """A writer of the tensors of a layout to a folder of a storage: in place locally, else by uploading shards.

    ``resume`` continues an interrupted writer; ``one_file`` writes no shards locally.
    """
    if directory := storage.path(folder):
        size = 2**62 if one_file else DEFAULT_SHARD_SIZE
        return SafetensorsWriter(directory, layout, prefix=stem, max_shard_size=size, resume=resume)
    found = {}
    for name, file in storage.files(folder).items() if resume else ():
        if name.startswith(f"{stem}-") and name.endswith(".safetensors"):
            for tensor, info in SafetensorsObject(file).tensors.items():
                if layout.get(tensor) == TensorSpec(info.dtype, info.shape):
                    found[tensor] = name
    return SafetensorsUploader(storage, folder, layout, prefix=stem, found=found if resume else None)


class SafetensorsUploader(TensorWriter):
    """`SafetensorsWriter` for a folder of a bucket.

    Tensors are staged in a temporary file, in the order in which they come, and uploaded once there are ``SHARD`` bytes
    of them; the index says where each of them is. With ``found``, objects in the folder that hold some of the tensors
    already, an earlier writer is continued.

    A copy in another process uploads objects of its own.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        layout: Mapping[str, TensorSpec],
        *,
        prefix: str = "model",
        found: Mapping[str, str] | None = None,
    ) -> None:
        """``found`` is by the name of the tensor."""
        self.resumed = found is not None
        self._storage, self._folder = storage, f"{folder}/" if folder else ""
        self._layout, self._prefix = dict(layout), prefix
        self._found = dict(found or {})
        self._where: dict[str, str] = {}
        """The object that holds a tensor"""
        self._begin_staging()

    def _begin_staging(self) -> None:
        self._lock = Lock()
        self._staged: dict[str, _Shard] = {}
        """By tensors that are not uploaded yet"""
        self._open: _Shard | None = None

    @property
    def written(self) -> int:
        return len(self._where)

    def write_piece(self, name: str, start: int, piece: Tensor) -> None:
        spec = self._layout[name]
        data = checked_bytes(name, spec, start, piece)
        with self._lock:
            shard = self._staged.get(name) or self._reserve(name)
        shard.write(name, start * item_size(spec.dtype), data)
        if start + piece.numel() < spec.numel:
            return
        with self._lock:
            shard.unfinished.discard(name)
        self._upload_full()

    def _reserve(self, name: str) -> _Shard:
        """Room for a tensor, in the object that is being filled or in the next one."""
        shard, spec = self._open, self._layout[name]
        if shard is None or (shard.layout and shard.size + spec.nbytes > SHARD):
            shard = self._open = _Shard()
        shard.reserve(name, spec)
        self._staged[name] = shard
        return shard

    def _upload_full(self) -> None:
        with self._lock:
            shards = {shard for shard in self._staged.values() if not (shard.unfinished or shard.leaving)}
            shards = {shard for shard in shards if shard is not self._open or shard.size >= SHARD}
            for shard in shards:
                shard.leaving = True
            if self._open in shards:
                self._open = None
        for shard in shards:
            self._upload(shard)

    def _upload(self, shard: _Shard) -> None:
        name = f"{self._prefix}-{uuid4().hex}.safetensors"
        self._storage.put(f"{self._folder}{name}", shard.content())
        with self._lock:
            for tensor in shard.layout:
                del self._staged[tensor]
                self._where[tensor] = name
        shard.close()

    def holds(self, name: str, digest: str) -> bool:
        """Whether an earlier writer has uploaded a tensor: an object is whole where it is there."""
        return name in self._found or not self._layout[name].numel

    def keep(self, name: str) -> None:
        """Count a tensor that an earlier writer has uploaded as written."""
        if name in self._found:  # else it is empty
            self._where[name] = self._found[name]

    def close(self) -> None:
        """Upload what is staged, then the index; a tensor that was never written is an error."""
        for name, spec in self._layout.items():
            if not spec.numel and name not in self._where:
                self._reserve(name).unfinished.discard(name)
        self._upload_all()
        if never := [name for name in self._layout if name not in self._where]:
            raise missing(never)
        stem, index = f"{self._folder}{self._prefix}", index_text(self._layout, self._where)
        self._storage.put(f"{stem}.safetensors.index.json", index.encode())
        used = {f"{self._folder}{name}" for name in self._where.values()}
        ours = {file.key for file in self._storage.files(self._folder[:-1]).values() if file.key.startswith(f"{stem}-")}
        self._storage.delete(ours - used)  # of workers that were lost

    def _upload_all(self) -> None:
        shards, self._open = set(self._staged.values()), None
        for shard in shards:
            self._upload(shard)

    def abandon(self) -> None:
        """Let go of what is staged."""
        for shard in self._staged.values():
            shard.close()
        self._begin_staging()

    def collected(self) -> dict[str, str]:
        """Where tensors are that have been uploaded: all of them, before anybody hears of it."""
        self._upload_all()
        where, self._where = self._where, {}
        return where

    def collect(self, more: dict[str, str]) -> None:
        self._where |= more

    def __getstate__(self) -> dict[str, Any]:
        staging = ("_lock", "_staged", "_open")
        return {**{key: value for key, value in vars(self).items() if key not in staging}, "_where": {}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._begin_staging()


class _Shard:
    """An object to be."""

    def __init__(self) -> None:
        self.layout: dict[str, TensorSpec] = {}
        self.unfinished: set[str] = set()
        self.leaving = False
        """Whether a thread is uploading it"""
        self.size = 0
        self._begin: dict[str, int] = {}
        self._file = TemporaryFile(buffering=0)  # noqa: SIM115

    def reserve(self, name: str, spec: TensorSpec) -> None:
        self.layout[name], self._begin[name] = spec, self.size
        self.unfinished.add(name)
        self.size += spec.nbytes

    def write(self, name: str, offset: int, data: memoryview) -> None:
        try:
            write_at(self._file.fileno(), data, self._begin[name] + offset)
        except OSError as error:
            raise write_error("a temporary file", error) from error

    def content(self) -> bytes | Iterator[bytes]:
        """As it is put: at once where it is small, else in parts."""
        chunks = self._chunks()
        return chunks if self.size > SHARD else b"".join(chunks)

    def _chunks(self) -> Iterator[bytes]:
        yield safetensors_header(self.layout, self._begin, {})
        for start in range(0, self.size, _CHUNK):
            yield os.pread(self._file.fileno(), min(_CHUNK, self.size - start), start)

    def close(self) -> None:
        self._file.close()
