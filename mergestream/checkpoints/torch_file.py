"""Files of ``torch.save``: tensors only, memory-mapped, no pickled code executed."""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints.checkpoint import Shard, describe_tensors
from mergestream.errors import MergestreamError, first_line
from mergestream.escaping import is_utf8
from mergestream.files import AGAIN

if TYPE_CHECKING:
    from torch import Tensor

WRAPPERS = ("state_dict", "model", "module")
"""Keys under which a training checkpoint stores the model's state dict"""
NOT_EXECUTED = "was not executed; if you trust its origin, convert it to safetensors"
_MARK = -1
_MAX_PARTS = 1_000_000
_MAX_WRAPPERS = 8
"""Nested wrappers; a state dict that contains itself would have infinitely many."""


class TorchFile(Shard):
    """A file of ``torch.save`` that holds a state dict, plain or under one of the usual keys."""

    path: Path

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        _check_archive(path)
        # A module may have state that is no weight.
        content = {n: t for n, t in _unwrap(_load(path), path).items() if not str(n).endswith("_extra_state")}
        for name in content:
            if not isinstance(name, str) or not is_utf8(name):
                raise MergestreamError(f"{path} holds no state dict: its key {repr(name)[:80]} is not a name")
        self.tensors, self.aliases = describe_tensors(content, str(path), "save only the model's state_dict()")
        for name, tensor in content.items():
            if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
                raise MergestreamError(f"the tensor {name!r} in {path} was expanded; save it with contiguous()")
        self._tensors: dict[str, Tensor] = {name: tensor.detach() for name, tensor in content.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors = {}


def _check_archive(path: Path) -> None:
    """Refuse everything except an uncompressed zip archive, which can be memory-mapped, with a harmless pickle."""
    try:
        with path.open("rb") as file:
            start = file.read(2)
        if start[:1] == b"\x80":
            raise MergestreamError(f"{path} is a pickle or in PyTorch's old format: it {NOT_EXECUTED}")
        if start != b"PK":
            raise MergestreamError(f"{path} is no checkpoint: torch.save did not write it; give another file")
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            names = {Path(entry.filename).name for entry in entries}
            if "data.pkl" not in names:
                raise MergestreamError(f"{path} is an archive, but not one that torch.save wrote; unpack it")
            if "constants.pkl" in names:
                raise MergestreamError(f"{path} is a TorchScript program; save only the model's state_dict()")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise MergestreamError(f"{path} is compressed, which torch.save never does; convert it to safetensors")
            for entry in entries:
                if Path(entry.filename).name == "data.pkl":
                    check_pickle(path, archive.read(entry))
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        raise MergestreamError(f"{path} cannot be read, or is truncated or corrupt ({error}); {AGAIN}") from error


def check_pickle(path: Path, data: bytes) -> None:
    """Refuse a pickle that would exhaust time or memory, without building its values.

    Two attacks are known: memo indices far beyond the number of values, and tuples that contain the same tuple twice,
    so that each level doubles the time to hash them. The stack here holds only the number of parts of each value.
    """
    stack: list[int] = []
    memo: dict[Any, int] = {}
    try:
        for op, argument, _ in pickletools.genops(data):
            if op.name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif op.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                place = len(memo) if argument is None else argument
                if place > len(memo):  # Python would allocate a memo of this size
                    raise ValueError(place)
                memo[place] = stack[-1]
            elif op.name == "DUP":
                stack.append(stack[-1])
            else:
                parts = _pop_operands(stack, op.stack_before)
                nests = op.name.startswith("TUPLE") or op.name == "REDUCE"
                stack += [
                    _MARK if kind is pickletools.markobject else 1 + (sum(parts) if nests else 0)
                    for kind in op.stack_after
                ]
                if stack and stack[-1] > _MAX_PARTS:
                    raise MergestreamError(f"{path} holds endlessly nested tuples; convert it to safetensors")
    except (ValueError, IndexError, KeyError) as error:
        raise MergestreamError(f"{path} is corrupt or no checkpoint (invalid pickle); {AGAIN}") from error


def _pop_operands(stack: list[int], before: Sequence[Any]) -> list[int]:
    """Pop what an operation takes from the stack: a number of values, or all down to the mark and some below it."""
    parts: list[int] = []
    count = len(before)
    if pickletools.markobject in before:
        while (part := stack.pop()) != _MARK:
            parts.append(part)
        count = before.index(pickletools.markobject)
    return parts + [stack.pop() for _ in range(count)]


def _load(path: Path) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        what = f" ({wanted[1]})" if wanted else ""
        raise MergestreamError(f"{path} holds a pickle of more than tensors{what}: it {NOT_EXECUTED}") from error
    except Exception as error:  # torch.load raises anything for a corrupt archive
        raise MergestreamError(f"{path} is corrupt or no checkpoint ({first_line(error)}); {AGAIN}") from error


def _unwrap(content: Any, path: Path) -> Mapping[Any, Any]:
    """Find the state dict in a training checkpoint."""
    for _ in range(_MAX_WRAPPERS):
        if not isinstance(content, Mapping):
            raise MergestreamError(f"{path} holds no state dict but an object of type {type(content).__name__}")
        if {"state", "param_groups"} <= content.keys():
            raise MergestreamError(f"{path} holds the state of an optimizer, not a model; give the weights")
        inner = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None:
            return content
        content = inner
    raise MergestreamError(f"{path} holds a state dict that contains itself; save only the model's state_dict()")
