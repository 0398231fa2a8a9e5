"""Tensors of a store, checked against their recorded digests whenever they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from mergestream.checkpoints import Checkpoint, open_checkpoint
from mergestream.checkpoints.location import Location
from mergestream.checkpoints.reader import open_located
from mergestream.digest import tensor_digest
from mergestream.engine import Engine
from mergestream.errors import MergestreamError
from mergestream.schema import BACKUP, damaged

if TYPE_CHECKING:
    from torch import Tensor


class CheckedTensors(Checkpoint):
    """A file, or the files of a directory, that hold the tensors with these digests and no others.

    A tensor is digested as a whole before a piece of it is used, so that nothing is ever made of a damaged one. That is
    no slower than to digest the pieces as they go by: XXH3 is as fast as memory (docs/explanation/performance.md).
    """

    def __init__(self, files: Location, digests: Mapping[str, str], remedy: str = BACKUP) -> None:
        """``remedy`` is what helps where a tensor is damaged."""
        self._digests, self._remedy, path = digests, remedy, files.path
        try:
            self._files = open_located(files) if files.objects else open_checkpoint(path)
        except MergestreamError as error:
            raise damaged(path, str(error).partition(";")[0], self._remedy) from error
        self.source, self.tensors, self.copies = self._files.source, self._files.tensors, self._files.copies
        self._place = path if path.is_dir() else path.parent
        if differing := self.tensors.keys() ^ digests.keys():
            self.close()
            which = min(differing)
            reason = f"{which} is missing" if which in digests else f"nothing is known of {which}"
            raise damaged(path, reason, self._remedy)

    def read(self, name: str) -> Tensor:
        tensor = self._files.read(name)
        if tensor_digest(tensor) != self._digests[name]:
            file = self._place / self.tensors[name].file
            raise damaged(file, f"the digest of {name} does not match", self._remedy)
        return tensor

    def verify(self, engine: Engine) -> Iterator[int]:
        """Read all tensors; yields the bytes of each."""
        sizes = {name: info.nbytes for name, info in self.tensors.items()}
        yield from (sizes[name] for name, _ in engine.run(sizes, self._check))

    def _check(self, name: str) -> None:
        self.read(name)

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    def close(self) -> None:
        self._files.close()
