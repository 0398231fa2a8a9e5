"""A ledger entry in temporary files, for dry runs on several machines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints import TensorSpec
from mergestream.checkpoints.uploading import open_writer
from mergestream.storage import Storage
from mergestream.store.steps import slot_name
from mergestream.store.tensors import open_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank


class Scratch:
    """An entry that every worker can write, and read once it is closed."""

    def __init__(self, storage: Storage, layout: Mapping[str, TensorSpec]) -> None:
        self._storage, self._writer, self._layout = storage, open_writer(storage, "", layout), layout
        self._slots: dict[str, list[str]] = {}
        for key in layout:
            slot, _, name = key.partition(":")
            self._slots.setdefault(name, []).append(slot)

    def write(self, slot: str, name: str, start: int, piece: Tensor) -> None:
        self._writer.write_piece(slot_name(slot, name), start, piece)

    def write_factors(self, name: str, state: Mapping[str, LowRank]) -> dict[str, Any]:
        raise NotImplementedError("all slots of a ledger are dense")

    def close(self) -> None:
        """Complete the files and open them for reading."""
        self._writer.close()
        self._files = open_tensors(self._storage, "")

    copies = 0

    def read(self, slot: str, name: str) -> Tensor:
        return self._files.read(slot_name(slot, name))

    def ranks(self, slots: tuple[str, ...], name: str) -> None:
        """Entries are dense."""

    def entry(self, name: str, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """The slots of a tensor."""
        return {slot: self.read(slot, name) for slot in self._slots.get(name, ()) if only is None or slot in only}


@contextmanager
def scratch(storage: Storage, layout: Mapping[str, TensorSpec]) -> Iterator[Scratch]:
    """An entry in temporary files beside the store."""
    with storage.scratch() as temporary:
        yield Scratch(temporary, layout)
