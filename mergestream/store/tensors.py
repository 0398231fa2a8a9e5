"""Tensors of a store, checked against their recorded digests whenever they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from mergestream.algebra.pieces import is_finite
from mergestream.checkpoints.checkpoint import FileCheckpoint, Shard
from mergestream.checkpoints.safetensors import SafetensorsFile, SafetensorsObject
from mergestream.digest import tensor_digest, text_digest
from mergestream.engine import Engine
from mergestream.errors import MergestreamError
from mergestream.schema import BACKUP, damaged, parse, validate
from mergestream.storage import Storage, read_json, read_text

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


def read_checked(storage: Storage, name: str, kind: type[T], digest: str, remedy: str = BACKUP) -> T:
    """Read a JSON file and compare it with the digest that the manifest has of it."""
    text, where = read_text(storage, name), f"{storage}/{name}"
    if text_digest(text) != digest:
        raise damaged(where, "its digest does not match the manifest", remedy)
    return validate(parse(text, where), kind, where)


def _open_shards(storage: Storage, folder: str, stem: str) -> list[Shard]:
    """Open the safetensors file ``stem`` of a folder, or its shards."""
    files = storage.files(folder)
    shards, index = [f"{stem}.safetensors"], f"{stem}.safetensors.index.json"
    if shards[0] not in files and index in files:
        weight_map = read_json(storage, f"{folder}/{index}").get("weight_map")
        shards = sorted(set(validate(weight_map, dict[str, str], f"{storage}/{folder}/{index}").values()))
    opened: list[Shard] = []
    for name in shards:
        if name not in files:
            raise MergestreamError(f"{storage}/{folder}/{name} is missing")
        path = storage.path(files[name].key)
        opened.append(SafetensorsFile(path) if path else SafetensorsObject(files[name]))
    return opened


class CheckedTensors(FileCheckpoint):
    """A safetensors file of a folder, or its shards, with exactly the tensors that have a recorded digest; it may have
    none, and no file.

    A whole tensor is digested before a piece of it is used. That is as fast as digesting the pieces one by one, since
    XXH3 runs at the speed of memory (docs/explanation/performance.md).
    """

    def __init__(
        self, storage: Storage, folder: str, stem: str, digests: Mapping[str, str], remedy: str = BACKUP
    ) -> None:
        """``remedy`` ends the error about a damaged tensor."""
        self._digests, self._remedy, self._folder = digests, remedy, f"{storage}/{folder}"
        where = f"{self._folder}/{stem}.safetensors"
        if not digests:
            self.tensors, self._shards, self.copies = {}, [], 0
            return
        try:
            super().__init__(self._folder, None, _open_shards(storage, folder, stem))
        except MergestreamError as error:
            raise damaged(where, str(error).partition(";")[0], self._remedy) from error
        if differing := self.tensors.keys() ^ digests.keys():
            self.close()
            name = min(differing)
            reason = f"{name} is missing" if name in digests else f"{name} has no recorded digest"
            raise damaged(where, reason, self._remedy)

    def read(self, name: str) -> Tensor:
        return self.read_all([name])[name]

    def read_all(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Several tensors, each checked against its digest, and finite: a store may come from somebody else."""
        tensors = {}
        for name in names:
            tensors[name] = self._owner[name].read(name)
        changed = [name for name, tensor in tensors.items() if tensor_digest(tensor) != self._digests[name]]
        unusable = changed or [name for name, tensor in tensors.items() if not is_finite(tensor)]
        for name in unusable:
            reason = f"the digest of {name} does not match" if changed else f"{name} holds NaN or Inf"
            raise damaged(f"{self._folder}/{self.tensors[name].file}", reason, self._remedy)
        return tensors

    def verify(self, engine: Engine) -> Iterator[int]:
        """Read all tensors; yields the bytes of each."""
        sizes = {name: info.nbytes for name, info in self.tensors.items()}
        yield from (sizes[name] for name, _ in engine.run(sizes, self._check))

    def _check(self, name: str) -> None:
        self.read(name)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy in another process opens the shards again, and has the same digests."""
        return object.__new__, (CheckedTensors,), vars(self)
