"""Writing safetensors files in place: all files are laid out first, then tensors are written in any order."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mergestream.checkpoints.checkpoint import TensorSpec, dtype_name, item_size
from mergestream.checkpoints.safetensors import SafetensorsFile
from mergestream.digest import tensor_digest
from mergestream.engine import Collector
from mergestream.errors import MergestreamError
from mergestream.files import sync_directory, write_error, write_json
from mergestream.sizes import CACHE_LINE

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

DEFAULT_SHARD_SIZE = 5_000_000_000


class SafetensorsWriter(Collector):
    """Writes tensors straight to their place in preallocated files, without a buffer.

    The same layout always gives the same files: shards are filled in the order of the layout up to ``max_shard_size``
    bytes, and a tensor is never split. The index appears with ``close()``. With ``resume=True`` the files of an
    interrupted writer with the same layout are continued. A ``with`` block closes the writer at its end.

    A copy in another process writes to the same files, on this machine or on one that shares the file system.
    """

    def __init__(
        self,
        directory: Path | str,
        layout: Mapping[str, TensorSpec],
        *,
        prefix: str = "model",
        max_shard_size: int = DEFAULT_SHARD_SIZE,
        resume: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self._layout = dict(layout)
        self._index = self.directory / f"{prefix}.safetensors.index.json"
        self._plans = _plan_shards(self.directory, self._layout, prefix, max_shard_size)
        self._shard = {name: i for i, plan in enumerate(self._plans) for name in plan.begin}
        self._written = {name for name, spec in self._layout.items() if spec.numel == 0}
        self._views: dict[int, SafetensorsFile] = {}
        self._files: list[BinaryIO] = []
        self.resumed = resume and all(plan.is_begun() for plan in self._plans)
        try:
            with _disk_errors_explained(self.directory, self.nbytes):
                if not self.resumed:
                    self.directory.mkdir(parents=True, exist_ok=True)
                    _remove_stale(self.directory, prefix)
                    if self.nbytes > shutil.disk_usage(self.directory).free:
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                for plan in self._plans:
                    self._files.append(plan.open(os.O_NOFOLLOW if self.resumed else os.O_CREAT | os.O_EXCL))
                    if not self.resumed:
                        plan.allocate(self._files[-1].fileno())
        except MergestreamError:
            self.abandon()
            if not self.resumed:
                _remove_stale(self.directory, prefix)
            raise

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        return sum(plan.size for plan in self._plans)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; ValueError if it does not match the layout."""
        if tuple(tensor.shape) != self._layout[name].shape:
            raise ValueError(f"{name!r} must have the shape {self._layout[name].shape}, not {tuple(tensor.shape)}")
        self.write_piece(name, 0, tensor.reshape(-1))

    def write_piece(self, name: str, start: int, piece: Tensor) -> None:
        """Write elements of a tensor, from the index ``start`` on; its pieces must come in order."""
        import torch

        spec, end, shard = self._layout[name], start + piece.numel(), self._shard[name]
        if dtype_name(piece.dtype) != spec.dtype or end > spec.numel:
            raise ValueError(f"{name!r} must be {spec.numel} × {spec.dtype}, not {end} × {piece.dtype}")
        plan = self._plans[shard]
        data = piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        with _disk_errors_explained(plan.path, spec.nbytes):
            _write_at(self._files[shard].fileno(), data, plan.begin[name] + start * item_size(spec.dtype))
        if end == spec.numel:
            self._written.add(name)

    def keep(self, name: str, digest: str) -> bool:
        """Count a tensor of an interrupted writer as written, if it has this digest."""
        shard = self._shard[name]
        if shard not in self._views:
            self._views[shard] = SafetensorsFile(self._plans[shard].path)
        if tensor_digest(self._views[shard].read(name)) != digest:
            return False
        self._written.add(name)
        return True

    def close(self) -> None:
        """Make all files durable; an error if a tensor was never written."""
        if missing := [name for name in self._layout if name not in self._written]:
            self.abandon()
            raise RuntimeError(f"{len(missing)} tensors were never written, among them {missing[0]!r}")
        try:
            self._sync()
            with _disk_errors_explained(self.directory, self.nbytes):
                sync_directory(self.directory)
            if len(self._plans) > 1:
                total = sum(spec.nbytes for spec in self._layout.values())
                places = {name: self._plans[self._shard[name]].path.name for name in self._layout}
                write_json(self._index, {"metadata": {"total_size": total}, "weight_map": places})
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files as they are."""
        files, self._files = self._files, []
        for file in files:
            file.close()

    def _sync(self) -> None:
        with _disk_errors_explained(self.directory, self.nbytes):
            for file in self._files:
                os.fsync(file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def collected(self) -> set[str]:
        """The names of written tensors, after flushing them: the original cannot flush the files of a copy."""
        self._sync()
        written, self._written = self._written, set()
        return written

    def collect(self, more: set[str]) -> None:
        self._written |= more

    def __getstate__(self) -> dict[str, Any]:
        inodes = [os.fstat(file.fileno()).st_ino for file in self._files]
        return {**vars(self), "_files": inodes, "_views": {}, "_written": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _files=[])
        for plan, inode in zip(self._plans, state["_files"], strict=False):  # none if the original is closed
            with _disk_errors_explained(plan.path, plan.size):
                self._files.append(plan.open(os.O_NOFOLLOW))
            if os.fstat(self._files[-1].fileno()).st_ino != inode:
                raise MergestreamError(f"{plan.path} is not the same file everywhere")


@dataclass(frozen=True)
class _FilePlan:
    """The layout of one file: its header, and where each tensor begins."""

    path: Path
    header: bytes
    begin: dict[str, int]
    size: int

    @staticmethod
    def of(path: Path, layout: Mapping[str, TensorSpec]) -> _FilePlan:
        """Lay out a file; wide elements first, so that without gaps every tensor is aligned to its element."""
        entries, offsets, end = {}, {}, 0
        for name in sorted(layout, key=lambda name: -item_size(layout[name].dtype)):
            spec, offsets[name] = layout[name], end
            end += spec.nbytes
            entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offsets[name], end]}
        content = {"__metadata__": {"format": "pt"}, **entries}
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(8 + len(text)) % CACHE_LINE)
        header = len(text).to_bytes(8, "little") + text
        begin = {name: len(header) + offset for name, offset in offsets.items()}
        return _FilePlan(path, header, begin, len(header) + end)

    def open(self, flags: int) -> BinaryIO:
        return os.fdopen(os.open(self.path, os.O_RDWR | os.O_CLOEXEC | flags, 0o666), "r+b", buffering=0)

    def allocate(self, file: int) -> None:
        """Write the header and reserve all space, so that a full disk is noticed before the work."""
        try:
            os.posix_fallocate(file, 0, self.size)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(file, self.size)
        _write_at(file, memoryview(self.header), 0)

    def is_begun(self) -> bool:
        """Whether the file exists as planned; a symbolic link is never written through."""
        try:
            if self.path.is_symlink() or self.path.stat().st_size != self.size:
                return False
            with self.path.open("rb") as file:
                return file.read(len(self.header)) == self.header
        except OSError:
            return False


def _plan_shards(directory: Path, layout: Mapping[str, TensorSpec], prefix: str, limit: int) -> list[_FilePlan]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in layout.items():
        if shards[-1] and filled + spec.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += spec.nbytes
    plans = []
    for number, names in enumerate(shards, 1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        plans.append(_FilePlan.of(directory / f"{prefix}{part}.safetensors", {name: layout[name] for name in names}))
    return plans


def _remove_stale(directory: Path, prefix: str) -> None:
    """Remove shards and the index of another layout."""
    ours = re.compile(re.escape(prefix) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
    for path in directory.iterdir() if directory.is_dir() else ():
        if ours.fullmatch(path.name):
            path.unlink()


def _write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all bytes at an offset."""
    while data:
        count = os.pwrite(file, data, offset)
        # Have the disk begin, so that fsync finds little to do at the end: a hint that some systems lack.
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(file, offset, count, os.POSIX_FADV_DONTNEED)
        data = data[count:]
        offset += count


@contextmanager
def _disk_errors_explained(path: Path, needed: int) -> Iterator[None]:
    """Raise errors of the disk as a sentence; ``needed`` is the number of bytes that are to be written."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise write_error(path, error) from error
        free = shutil.disk_usage(next(place for place in (path, *path.parents) if place.is_dir())).free
        is_temporary = Path(tempfile.gettempdir()) in path.parents
        choice = ", or set TMPDIR to a directory on a larger disk," if is_temporary else ""
        raise MergestreamError(
            f"{path} cannot be written: {needed} bytes are needed and {free} are free; "
            f"free some disk space{choice} and run the command again"
        ) from error
