"""The watch command."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.cli.add import print_step
from mergestream.cli.options import ComputingOptions, WorkingStoreOptions, argument
from mergestream.cli.printing import print_error, say
from mergestream.errors import MergestreamError, StoreBusyError

if TYPE_CHECKING:
    from mergestream.api import Store

HELP = "absorb experts as they appear in a directory, until interrupted"
EXAMPLES = "mergestream watch store incoming/"

Signature = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Options(WorkingStoreOptions, ComputingOptions):
    directory: str = argument(metavar="DIR", help="each file or directory in it is an expert")
    interval: float = argument("--interval", type=float, default=10, metavar="SECONDS", help="between two looks (10)")


def run(options: Options) -> int:
    """Look every few seconds; what has not changed between two looks is complete, and is added."""
    directory = Path(options.directory)
    if not directory.is_dir():
        raise MergestreamError(f"{directory} is not a directory")
    store = options.open_store()
    watcher = Watcher(store, directory)
    say(f"watching {directory} for {store.path}; stop with Ctrl-C")
    try:
        while True:
            watcher.look()
            time.sleep(options.interval)
    except KeyboardInterrupt:
        return 0


class Watcher:
    """Remembers what it has seen, so that each version of an expert is tried once."""

    def __init__(self, store: Store, directory: Path) -> None:
        self.store = store
        self.directory = directory.resolve()
        self._growing: dict[Path, Signature] = {}
        self._tried: dict[Path, Signature] = {}

    def look(self) -> None:
        """Add what was there at the last look and has not changed since, oldest first."""
        absorbed = {entry.source for entry in self.store.history}
        for path in sorted(self.directory.iterdir(), key=lambda path: (path.stat().st_mtime_ns, path.name)):
            if path.name.startswith(".") or str(path) in absorbed:
                continue
            signature = _signature(path)
            complete = signature and self._growing.get(path) == signature
            self._growing[path] = signature
            if complete and self._tried.get(path) != signature:
                self._add(path, signature)

    def _add(self, path: Path, signature: Signature) -> None:
        try:
            print_step(self.store, self.store.add(path))
        except StoreBusyError:
            return  # the next look tries again
        except MergestreamError as error:
            print_error(*error.sentences)
        self._tried[path] = signature


def _signature(path: Path) -> Signature:
    """Names, sizes and times of a file or of all files in a directory."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files]
    return tuple((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats)
