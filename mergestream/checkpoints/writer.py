"""Writing safetensors: shards are laid out beforehand, then every tensor is written straight into place."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mergestream.checkpoints.checkpoint import TensorSpec, dtype_name, item_size
from mergestream.checkpoints.safetensors import SafetensorsFile
from mergestream.digest import tensor_digest
from mergestream.engine import Collector
from mergestream.errors import MergestreamError
from mergestream.files import replace_text, sync_directory, write_error
from mergestream.sizes import CACHE_LINE

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

DEFAULT_SHARD_SIZE = 5_000_000_000


@dataclass(frozen=True)
class _Plan:
    """One file to be: its header and where each of its tensors begins."""

    path: Path
    header: bytes
    begin: dict[str, int]
    size: int


class TensorWriter(Collector):
    """Writes the tensors of a layout, in any order and from any thread."""

    resumed: bool
    """Whether an earlier, interrupted writer is continued"""
    _layout: Mapping[str, TensorSpec]

    @property
    @abstractmethod
    def written(self) -> int:
        """How many tensors are in their place."""

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor; what its dtype and shape must be, the layout says."""
        if tuple(tensor.shape) != self._layout[name].shape:
            raise ValueError(f"{name!r} was to be {self._layout[name].shape}, not {tuple(tensor.shape)}")
        self.write_piece(name, 0, tensor.reshape(-1))

    @abstractmethod
    def write_piece(self, name: str, start: int, piece: Tensor) -> None:
        """Write the elements from ``start`` on; the pieces of one tensor come in their order."""

    @abstractmethod
    def holds(self, name: str, digest: str) -> bool:
        """Whether an earlier writer has written a tensor that has this digest."""

    @abstractmethod
    def keep(self, name: str) -> None:
        """Count a tensor that is held as written."""

    @abstractmethod
    def close(self) -> None:
        """Have everything where it stays; a tensor that was never written is an error."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of it as it is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class SafetensorsWriter(TensorWriter):
    """Writes the tensors of ``layout`` in any order and from any thread, none of them buffered.

    The same layout always gives the same files: shards are filled in the order of the layout up to
    ``max_shard_size`` bytes, and a tensor is never split. The index appears with ``close()`` only.
    With ``resume=True`` files of an earlier, interrupted writer with the same plan are continued
    (``resumed`` says whether); ``read`` shows what they hold, and ``keep`` counts a tensor as written.

    A copy in another process, on this machine or another that shares the file system, writes to the same files.
    """

    def __init__(
        self,
        directory: Path | str,
        layout: Mapping[str, TensorSpec],
        *,
        prefix: str = "model",
        max_shard_size: int = DEFAULT_SHARD_SIZE,
        metadata: Mapping[str, str] | None = None,
        resume: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self._layout = dict(layout)
        self._index = self.directory / f"{prefix}.safetensors.index.json"
        self._plans = _plan(self.directory, self._layout, prefix, max_shard_size, metadata or {})
        self._place = {name: i for i, plan in enumerate(self._plans) for name in plan.begin}
        self._written = {name for name, spec in self._layout.items() if spec.numel == 0}
        self._views: dict[int, SafetensorsFile] = {}
        self._files: list[BinaryIO] = []
        self.resumed = resume and all(_is_begun(plan) for plan in self._plans)
        try:
            if not self.resumed:
                self.directory.mkdir(parents=True, exist_ok=True)
                _remove_stale(self.directory, prefix)
                if self.nbytes > shutil.disk_usage(self.directory).free:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for plan in self._plans:
                self._files.append(_reopen(plan) if self.resumed else _create(plan))
        except OSError as error:
            self.abandon()
            if not self.resumed:
                _remove_stale(self.directory, prefix)
            raise _write_error(self.directory, error, self.nbytes) from error

    @property
    def nbytes(self) -> int:
        """Bytes that the files take on disk."""
        return sum(plan.size for plan in self._plans)

    @property
    def written(self) -> int:
        return len(self._written)

    def write_piece(self, name: str, start: int, piece: Tensor) -> None:
        spec = self._layout[name]
        data = checked_bytes(name, spec, start, piece)
        plan = self._plans[self._place[name]]
        position = plan.begin[name] + start * item_size(spec.dtype)
        try:
            write_at(self._files[self._place[name]].fileno(), data, position)
        except OSError as error:
            raise _write_error(plan.path, error, spec.nbytes) from error
        if start + piece.numel() == spec.numel:
            self._written.add(name)

    def keep(self, name: str) -> None:
        """Count a tensor that an earlier run has written, and the caller has verified, as written."""
        if not self.resumed:
            raise ValueError(f"nothing of an earlier run is left, {name!r} must be written")
        if name not in self._layout:
            raise KeyError(name)
        self._written.add(name)

    def holds(self, name: str, digest: str) -> bool:
        """Whether a tensor is there that has this digest."""
        return tensor_digest(self.read(name)) == digest

    def read(self, name: str) -> Tensor:
        """What is in the file now: zeros, where nothing was written yet."""
        place = self._place[name]
        if place not in self._views:
            self._views[place] = SafetensorsFile(self._plans[place].path)
        return self._views[place].read(name)

    def close(self) -> None:
        """Bring everything to the disk; a tensor that was never written is an error."""
        if never := [name for name in self._layout if name not in self._written]:
            self.abandon()
            raise missing(never)
        try:
            self._sync()
            sync_directory(self.directory)
            if len(self._plans) > 1:
                self._write_index()
        except OSError as error:
            raise _write_error(self.directory, error, self.nbytes) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of the files as they are."""
        files, self._files = self._files, []
        for file in files:
            file.close()

    def _sync(self) -> None:
        for file in self._files:
            os.fsync(file.fileno())

    def collected(self) -> set[str]:
        """What has been written: it is on the disk before anybody hears of it, for nobody else could bring it there."""
        try:
            self._sync()
        except OSError as error:
            raise _write_error(self.directory, error, self.nbytes) from error
        written, self._written = self._written, set()
        return written

    def collect(self, more: set[str]) -> None:
        self._written |= more

    def __getstate__(self) -> dict[str, Any]:
        places = [os.fstat(file.fileno()).st_ino for file in self._files]
        return {**vars(self), "_files": places, "_views": {}, "_written": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _files=[])  # and stays so where the original is closed
        for plan, place in zip(self._plans, state["_files"], strict=False):
            try:
                self._files.append(_reopen(plan))
            except OSError as error:
                raise write_error(plan.path, error) from error
            if os.fstat(self._files[-1].fileno()).st_ino != place:
                raise MergestreamError(f"{plan.path} is not the same file everywhere")

    def _write_index(self) -> None:
        where = {name: self._plans[self._place[name]].path.name for name in self._layout}
        replace_text(self._index, index_text(self._layout, where))


def checked_bytes(name: str, spec: TensorSpec, start: int, piece: Tensor) -> memoryview:
    """The elements of a tensor from ``start`` on, as they are written; ValueError where they are not of its form."""
    import torch

    end = start + piece.numel()
    if dtype_name(piece.dtype) != spec.dtype or end > spec.numel:
        raise ValueError(f"{name!r} was to be {spec.numel} × {spec.dtype}, not {end} × {piece.dtype}")
    return piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def missing(names: Sequence[str]) -> RuntimeError:
    return RuntimeError(f"{len(names)} tensors were never written, among them {names[0]!r}")


def index_text(layout: Mapping[str, TensorSpec], where: Mapping[str, str]) -> str:
    """The index of a model in several files."""
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec in layout.values())},
        "weight_map": {name: where[name] for name in layout},
    }
    return json.dumps(index, indent=2, ensure_ascii=False) + "\n"


def _plan(
    directory: Path, layout: Mapping[str, TensorSpec], prefix: str, limit: int, metadata: Mapping[str, str]
) -> list[_Plan]:
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
        path = directory / f"{prefix}{part}.safetensors"
        plans.append(_plan_file(path, {name: layout[name] for name in names}, metadata))
    return plans


def _plan_file(path: Path, layout: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> _Plan:
    # Wide elements first: the format allows no gaps, and so every tensor is aligned to its element.
    names = sorted(layout, key=lambda name: -item_size(layout[name].dtype))
    begin, end = {}, 0
    for name in names:
        begin[name] = end
        end += layout[name].nbytes
    header = safetensors_header({name: layout[name] for name in names}, begin, metadata)
    return _Plan(path, header, {name: len(header) + offset for name, offset in begin.items()}, len(header) + end)


def safetensors_header(
    layout: Mapping[str, TensorSpec], begin: Mapping[str, int], metadata: Mapping[str, str]
) -> bytes:
    """What a file begins with whose tensors begin there, after it; they are aligned where they are among themselves."""
    entries = {
        name: {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin[name], begin[name] + spec.nbytes],
        }
        for name, spec in layout.items()
    }
    header = {"__metadata__": {"format": "pt", **metadata}, **entries}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % CACHE_LINE)
    return len(text).to_bytes(8, "little") + text


def _create(plan: _Plan) -> BinaryIO:
    """The file with its header and all its space, so that a full disk shows before the work, not after."""
    opened = _opened(plan, os.O_CREAT | os.O_EXCL)
    file = opened.fileno()
    try:
        try:
            os.posix_fallocate(file, 0, plan.size)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(file, plan.size)
        write_at(file, memoryview(plan.header), 0)
    except OSError:
        opened.close()
        raise
    return opened


def _reopen(plan: _Plan) -> BinaryIO:
    return _opened(plan, os.O_NOFOLLOW)


def _opened(plan: _Plan, flags: int) -> BinaryIO:
    return os.fdopen(os.open(plan.path, os.O_RDWR | os.O_CLOEXEC | flags, 0o666), "r+b", buffering=0)


def _is_begun(plan: _Plan) -> bool:
    """Whether the file is there as planned; a symbolic link is not ours to write through."""
    try:
        if plan.path.is_symlink() or plan.path.stat().st_size != plan.size:
            return False
        with plan.path.open("rb") as file:
            return file.read(len(plan.header)) == plan.header
    except OSError:
        return False


def _remove_stale(directory: Path, prefix: str) -> None:
    """Shards and index of another plan must not stand beside the new ones."""
    ours = re.compile(re.escape(prefix) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
    for path in directory.iterdir() if directory.is_dir() else ():
        if ours.fullmatch(path.name):
            path.unlink()


def write_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data = data[count:]
        offset += count


def _write_error(path: Path, error: OSError, needed: int) -> MergestreamError:
    if error.errno != errno.ENOSPC:
        return write_error(path, error)
    free = shutil.disk_usage(next(place for place in (path, *path.parents) if place.is_dir())).free
    return MergestreamError(
        f"{path} cannot be written: {needed} bytes are needed and {free} are free; "
        "free some disk space and run the command again"
    )
