"""Pack work for other processes: the function with everything it needs, and its collectors.

cloudpickle packs closures. Objects with open files are packed as paths, and opened again when the work is unpacked.
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


@dataclass(frozen=True)
class UnpackedWork(Generic[Result]):
    """Unpacked work, with the copies of its collectors."""

    work: Callable[[str], Result]
    collectors: Sequence[Collector]

    def run(self, names: Iterable[str]) -> tuple[list[tuple[str, Result]], list[Any]]:
        """Run the work on these names; returns the results, and what each collector has collected."""
        keep_freed_memory()
        with single_threaded():
            results = [(name, self.work(name)) for name in names]
        return results, [collector.collected() for collector in self.collectors]


def pack(work: Callable[[str], Any]) -> tuple[bytes, list[Collector]]:
    """The work as bytes, and its collectors, in the order in which `unpack` returns their copies."""
    from ray import cloudpickle

    collectors: list[Collector] = []

    pickler: Any = cloudpickle.Pickler  # not annotated

    class Packer(pickler):  # type: ignore[misc]
        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, Collector):
                collectors.append(item)
            return super().reducer_override(item)

    packed = io.BytesIO()
    packer: Any = Packer(packed)
    packer.dump(Path.cwd())
    packer.dump(work)
    packer.dump(list(collectors))  # by reference: one packer dumps each object once
    return packed.getvalue(), collectors


def unpack(packed: bytes) -> UnpackedWork[Any]:
    """Restore the work in a worker process, in the same directory."""
    unpickler = pickle.Unpickler(io.BytesIO(packed))
    with suppress(OSError):  # if the directory is missing here, so are the paths relative to it
        os.chdir(unpickler.load())
    return UnpackedWork(unpickler.load(), unpickler.load())
