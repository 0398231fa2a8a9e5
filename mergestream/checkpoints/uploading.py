"""Writing safetensors to a storage: in place if it is local, else by uploading objects of finished tensors."""

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
    index_text,
    lay_out,
    missing_error,
    piece_bytes,
    write_at,
)
from mergestream.files import write_error
from mergestream.storage import Storage, StoredFile

if TYPE_CHECKING:
    from torch import Tensor

SHARD = 64 << 20
"""Bytes after which an object is uploaded, by one request: a failed one leaves nothing behind"""
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
    """A writer of tensors to a folder of a storage.

    ``resume`` continues an interrupted writer; ``one_file`` writes no shards locally.
    """
    if directory := storage.path(folder):
        size = 2**62 if one_file else DEFAULT_SHARD_SIZE
        return SafetensorsWriter(directory, layout, prefix=stem, max_shard_size=size, resume=resume)
    return SafetensorsUploader(storage, f"{folder}/{stem}".lstrip("/"), layout, resume=resume)


class SafetensorsUploader(TensorWriter):
    """Uploads tensors in objects of about `SHARD` bytes, in the order in which they are finished.

    Tensors are staged in a temporary file until there are enough of them; the index says which object holds which
    tensor. With ``resume`` the objects of an interrupted writer are kept. A copy in another process uploads its own.
    """

    def __init__(self, storage: Storage, stem: str, layout: Mapping[str, TensorSpec], *, resume: bool = False) -> None:
        """``stem`` is what the keys of all objects begin with."""
        self._storage, self._stem, self._layout = storage, stem, dict(layout)
        self.resumed = resume
        self._found: dict[str, str] = {}
        """Objects of an interrupted writer, by tensor"""
        for file in self._objects() if resume else ():
            for tensor, info in SafetensorsObject(file).tensors.items():
                if layout.get(tensor) == TensorSpec(info.dtype, info.shape):
                    self._found[tensor] = file.name
        self._uploaded: dict[str, str] = {}
        """The object that holds a tensor"""
        self._begin_staging()

    def _objects(self) -> list[StoredFile]:
        """All objects of this writer, of earlier ones and of its copies."""
        files = self._storage.files(self._stem.rpartition("/")[0]).values()
        return [f for f in files if f.key.startswith(f"{self._stem}-") and f.key.endswith(".safetensors")]

    def _begin_staging(self) -> None:
        self._lock = Lock()
        self._staged: dict[str, _Shard] = {}
        """By tensor, until it is uploaded"""
        self._filling: _Shard | None = None

    @property
    def written(self) -> int:
        return len(self._uploaded)

    def write_piece(self, name: str, start: int, piece: Tensor) -> None:
        spec = self._layout[name]
        data = piece_bytes(name, spec, start, piece)
        with self._lock:
            shard = self._staged.get(name) or self._reserve(name)
        shard.write(name, start * item_size(spec.dtype), data)
        if start + piece.numel() == spec.numel:
            with self._lock:
                shard.unfinished.discard(name)
                full = self._take_full()
            for shard in full:
                self._upload(shard)

    def _reserve(self, name: str) -> _Shard:
        """Reserve space for a tensor in the shard that is being filled, or in a new one."""
        shard, spec = self._filling, self._layout[name]
        if shard is None or (shard.layout and shard.size + spec.nbytes > SHARD):
            shard = self._filling = _Shard()
        shard.reserve(name, spec)
        self._staged[name] = shard
        return shard

    def _take_full(self) -> set[_Shard]:
        """The shards that are complete, and that no other thread uploads."""
        full = {shard for shard in self._staged.values() if not (shard.unfinished or shard.is_uploading)}
        full = {shard for shard in full if shard is not self._filling or shard.size >= SHARD}
        for shard in full:
            shard.is_uploading = True
        if self._filling in full:
            self._filling = None
        return full

    def _upload(self, shard: _Shard) -> None:
        key = f"{self._stem}-{uuid4().hex}.safetensors"
        self._storage.put(key, shard.content())
        with self._lock:
            for tensor in shard.layout:
                del self._staged[tensor]
                self._uploaded[tensor] = key.rpartition("/")[2]
        shard.close()

    def _upload_all(self) -> None:
        shards, self._filling = set(self._staged.values()), None
        for shard in shards:
            self._upload(shard)

    def holds(self, name: str, digest: str) -> bool:
        """Whether an interrupted writer has uploaded a tensor; its object is complete, so the digest must match."""
        return name in self._found or not self._layout[name].numel

    def keep(self, name: str) -> None:
        if name in self._found:  # else it is empty
            self._uploaded[name] = self._found[name]

    def close(self) -> None:
        """Upload what is staged, then the index; an error if a tensor was never written."""
        for name, spec in self._layout.items():
            if not spec.numel and name not in self._uploaded:
                self._reserve(name).unfinished.discard(name)
        self._upload_all()
        if missing := [name for name in self._layout if name not in self._uploaded]:
            raise missing_error(missing)
        index = index_text(self._layout, self._uploaded)
        self._storage.put(f"{self._stem}.safetensors.index.json", index.encode())
        used = set(self._uploaded.values())
        self._storage.delete(file.key for file in self._objects() if file.name not in used)  # of lost workers

    def abandon(self) -> None:
        """Drop what is staged."""
        for shard in self._staged.values():
            shard.close()
        self._begin_staging()

    def collected(self) -> dict[str, str]:
        """The objects of all tensors, after uploading what is staged."""
        self._upload_all()
        uploaded, self._uploaded = self._uploaded, {}
        return uploaded

    def collect(self, more: dict[str, str]) -> None:
        self._uploaded |= more

    def __getstate__(self) -> dict[str, Any]:
        staging = ("_lock", "_staged", "_filling")
        return {**{key: value for key, value in vars(self).items() if key not in staging}, "_uploaded": {}}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._begin_staging()


class _Shard:
    """Tensors that are staged in a temporary file, and become one object."""

    def __init__(self) -> None:
        self.layout: dict[str, TensorSpec] = {}
        self.unfinished: set[str] = set()
        self.is_uploading = False
        self.size = 0
        self._begin: dict[str, int] = {}
        self._file = TemporaryFile(buffering=0)  # noqa: SIM115

    def reserve(self, name: str, spec: TensorSpec) -> None:
        """Reserve space for a tensor."""
        self.layout[name], self._begin[name] = spec, self.size
        self.unfinished.add(name)
        self.size += spec.nbytes

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Write bytes of a tensor."""
        try:
            write_at(self._file.fileno(), data, self._begin[name] + offset)
        except OSError as error:
            raise write_error("a temporary file", error) from error

    def content(self) -> bytes | Iterator[bytes]:
        """The bytes of the object; in chunks if it is larger than `SHARD`."""
        chunks = self._chunks()
        return chunks if self.size > SHARD else b"".join(chunks)

    def _chunks(self) -> Iterator[bytes]:
        yield lay_out(self.layout, {})[0]
        for start in range(0, self.size, _CHUNK):
            yield os.pread(self._file.fileno(), min(_CHUNK, self.size - start), start)

    def close(self) -> None:
        self._file.close()
