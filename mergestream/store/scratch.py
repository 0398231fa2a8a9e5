"""An entry of a ledger for those who only want to know, in files that are gone afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mergestream.checkpoints import SafetensorsWriter, TensorSpec, open_checkpoint
from mergestream.checkpoints.uploading import SafetensorsUploader
from mergestream.checkpoints.writer import TensorWriter
from mergestream.files import write_error
from mergestream.objects import Bucket
from mergestream.store.mirror import SCRATCH, Mirror, Place, new_mark
from mergestream.store.steps import slot_name

if TYPE_CHECKING:
    from torch import Tensor

    from mergestream.algebra.lowrank import LowRank


class Scratch:
    """Whoever shares the file system, or the bucket, can write the entry, and read it once it is closed."""

    def __init__(self, source: str | Path, writer: TensorWriter, layout: Mapping[str, TensorSpec]) -> None:
        self._source, self._writer, self._layout = source, writer, layout
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
        self._files = open_checkpoint(self._source)

    copies = 0

    def read(self, slot: str, name: str) -> Tensor:
        return self._files.read(slot_name(slot, name))

    def ranks(self, slots: tuple[str, ...], name: str) -> None:
        """Entries are dense."""

    def entry(self, name: str, only: Collection[str] | None = None) -> dict[str, Tensor]:
        """The slots of a tensor."""
        return {slot: self.read(slot, name) for slot in self._slots.get(name, ()) if only is None or slot in only}


@contextmanager
def scratch(store: Place, layout: Mapping[str, TensorSpec]) -> Iterator[Scratch]:
    """Beside the store, or in its bucket, where whoever works on it sees it."""
    if isinstance(store, Mirror):
        folder = Bucket(store.bucket.url.below(f"{SCRATCH}/{new_mark(store)}"))
        try:
            yield Scratch(str(folder.url), SafetensorsUploader(folder, layout), layout)
        finally:
            folder.delete(folder.below(""))
        return
    try:
        place = TemporaryDirectory(prefix=f".{store.name}.", dir=store.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise write_error(store.parent, error) from error
    with place:
        yield Scratch(Path(place.name), SafetensorsWriter(place.name, layout), layout)
