"""Work that travels to another process: packed once with what it needs, and with what must come back named.

cloudpickle takes closures. The objects in them that hold files open travel as places, and are opened again where they
arrive: work that was unpacked sees all that it needs.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from mergestream.engine.base import Collector, Result
from mergestream.engine.local import keep_freed_memory, single_threaded
from mergestream.storage import cache_in_use, cache_objects


@dataclass(frozen=True)
class UnpackedWork(Generic[Result]):
    """Work that was unpacked, and the copies that gather what it leaves in them."""

    work: Callable[[str], Result]
    collectors: Sequence[Collector]

    def run(self, names: Iterable[str]) -> tuple[list[tuple[str, Result]], list[Any]]:
        """The results, and what was gathered on the way."""
        keep_freed_memory()
        with single_threaded():
            results = [(name, self.work(name)) for name in names]
        return results, [collector.collected() for collector in self.collectors]


def pack(work: Callable[[str], Any]) -> tuple[bytes, list[Collector]]:
    """The work as bytes, and the originals of what gathers in it, in the order in which `unpack` gives the copies."""
    from ray.cloudpickle import Pickler

    collectors: list[Collector] = []

    class Packer(Pickler):
        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, Collector):
                collectors.append(item)
            return super().reducer_override(item)

    packed = io.BytesIO()
    packer = Packer(packed)
    packer.dump((Path.cwd(), cache_in_use()))
    packer.dump(work)
    packer.dump(list(collectors))  # by reference: one packer dumps each object once
    return packed.getvalue(), collectors


def unpack(packed: bytes) -> UnpackedWork[Any]:
    unpickler = pickle.Unpickler(io.BytesIO(packed))
    directory, cache = unpickler.load()
    with suppress(OSError):  # where it is not there, paths that are relative to it are not either
        os.chdir(directory)
    cache_objects(*cache)
    return UnpackedWork(unpickler.load(), unpickler.load())
