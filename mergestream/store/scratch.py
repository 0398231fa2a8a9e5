"""An entry of a ledger for those who only want to know, in files that are gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints import SafetensorsWriter, TensorSpec, open_checkpoint
from mergestream.files import cannot_write
from mergestream.store.steps import slot_name

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank


class Scratch:
    """Whoever shares the file system can write the entry, and read it once it is closed."""

    def __init__(self, directory: Path, layout: Mapping[str, TensorSpec]) -> None:
        self._directory, self._layout = directory, layout
        self._writer = SafetensorsWriter(directory, layout)
        self._slots: dict[str, list[str]] = {}
        for key in layout:
            slot, _, name = key.partition(":")
            self._slots.setdefault(name, []).append(slot)

    def write(self, slot: str, name: str, start: int, piece: Tensor) -> None:
        self._writer.write_piece(slot_name(slot, name), start, piece)

    def write_factors(self, name: str, state: Mapping[str, LowRank]) -> dict[str, Any]:
        raise NotImplementedError("a ledger remembers slots that are dense")

    def close(self) -> None:
        self._writer.close()
        self._files = open_checkpoint(self._directory)

    def forms(self, name: str) -> dict[str, TensorSpec]:
        return {slot: self._layout[slot_name(slot, name)] for slot in self._slots.get(name, ())}

    def entry(self, name: str) -> dict[str, Tensor]:
        """All slots of a tensor."""
        return {slot: self._files.read(slot_name(slot, name)) for slot in self._slots.get(name, ())}


@contextmanager
def scratch(store: Path, layout: Mapping[str, TensorSpec]) -> Iterator[Scratch]:
    """Beside the store, where whoever works on it sees it."""
    try:
        place = TemporaryDirectory(prefix=f".{store.name}.", dir=store.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise cannot_write(store.parent, error) from error
    with place:
        yield Scratch(Path(place.name), layout)
