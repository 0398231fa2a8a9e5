"""``mergestream watch``: add experts as they appear in a directory or bucket, until interrupted."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.cli.add import print_step
from mergestream.cli.options import GatedOptions, WorkingStoreOptions, argument, arguments_of, at_least
from mergestream.cli.printing import emit, error_kind, error_sentences, is_json, print_error, say
from mergestream.cli.status import entry_json
from mergestream.errors import MergestreamError, StoreBusyError, UsageError

if TYPE_CHECKING:
    from mergestream.storage import StoredFile
    from mergestream.store.store import Store


RETRY_SECONDS = 600.0
"""Pause after an error that may say nothing about the expert, such as a full disk"""


@dataclass(frozen=True)
class Watch(WorkingStoreOptions, GatedOptions):
    EXAMPLES = """
        mergestream watch store incoming/
        mergestream watch store s3://models/incoming --interval 60
        mergestream watch store incoming/ --gate 'damage<=0.3' --evaluate 'python score.py {model}' --json
        """
    directory: str = argument("DIR", "each file or directory in it is an expert; or s3://…, gs://…, az://…")
    interval: int = argument("--interval SECONDS", "time between two scans of it (10)", type=at_least(0), default=10)

    def run(self) -> None:
        from mergestream.report.gates import Gatekeeper
        from mergestream.storage import open_storage
        from mergestream.tracking import parse_trackers

        place, store = open_storage(self.directory), self.open_store()
        watched, own = (f"{storage.address.rstrip('/')}/" for storage in (place, store.storage))
        if own.startswith(watched) or watched.startswith(own):
            raise UsageError(f"{place} and the store {store.storage} contain one another; watch a separate directory")
        find_experts(self.directory)  # report an unreadable directory, a wrong gate or a wrong tracker now
        Gatekeeper.of(self.gates, self.evaluate, store.manifest)
        parse_trackers(self.log, store)
        watcher = Watcher(store, self.directory, arguments_of(store.add, self))
        say(f"watching {place} for {store.storage}; stop with Ctrl-C")
        emit({"event": "watching", "store": str(store.storage), "directory": str(place)})
        with suppress(KeyboardInterrupt):
            while True:
                watcher.look()
                time.sleep(self.interval)


def find_experts(place: str | Path) -> dict[str, dict[str, StoredFile]]:
    """Find the files of every expert in a watched place; the experts are listed by address, the oldest first.

    In a directory, every file and every folder is an expert, also behind a link; in a bucket, every object and folder.
    """
    from mergestream.storage import open_storage, parse_url

    found: dict[str, dict[str, StoredFile]] = defaultdict(dict)
    storage = open_storage(place)
    if url := parse_url(place):
        for key, file in storage.files().items():
            if file.size:  # consoles make a folder by an empty object
                found[str(url.child(key.partition("/")[0]))][key] = file
    else:
        for path in Path(place).resolve().iterdir():
            if path.is_dir():
                found[str(path)].update(open_storage(path).files())
            elif single := storage.stat(path.name):
                found[str(path)][path.name] = single
    experts = {address: files for address, files in found.items() if files and not Path(address).name.startswith(".")}
    return dict(sorted(experts.items(), key=lambda item: max(file.changed for file in item[1].values())))


class Watcher:
    """Adds the experts of a watched directory or bucket to a store.

    An expert is complete when its files did not change between two looks. One that was added or refused is left alone
    until its files change.
    """

    def __init__(
        self, store: Store, place: str | Path, options: Mapping[str, Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``options`` are arguments of `Store.add`."""
        self.store, self.place = store, place
        self._options, self._clock = options, clock
        self._seen: Mapping[str, Mapping[str, StoredFile]] = {}
        """The files of every expert at the last look"""
        self._tried: dict[str, tuple[Mapping[str, StoredFile], float]] = {}
        """The files of every expert that was tried, and when to try the same files again"""
        self._trouble = ""
        """Why the last look failed"""

    def look(self) -> None:
        """Add all complete experts, the oldest first."""
        try:
            self.store.refresh()
            found = find_experts(self.place)
        except (MergestreamError, OSError) as error:
            if self._trouble != str(error):
                self._trouble = str(error)
                report_failure(str(self.place), error, 0)
            return
        before, self._seen, self._trouble = self._seen, found, ""
        for address, files in found.items():
            if self._is_stored(address):
                self._tried[address] = files, math.inf  # so that undo does not bring it back
            tried, due = self._tried.get(address, ({}, 0.0))
            if files == before.get(address) and (files != tried or self._clock() >= due):
                self._add(address, files)

    def _is_stored(self, address: str) -> bool:
        from mergestream.checkpoints.location import locate_here

        return str(locate_here(address) or address) in {entry.source for entry in self.store.history}

    def _add(self, address: str, files: Mapping[str, StoredFile]) -> None:
        pause = math.inf
        try:
            entry = self.store.add(address, **self._options)
        except StoreBusyError:
            return  # the next look tries again
        except Exception as error:  # whatever it is, the other experts can still be added
            if is_temporary(error):
                pause = RETRY_SECONDS
            report_failure(address, error, pause)
        else:
            print_step(self.store, entry)
            event = {"event": "absorbed", "path": address, "step": self.store.manifest.step}
            emit({**event, "expert": entry_json(entry)})
        self._tried[address] = files, self._clock() + pause


def report_failure(address: str, error: Exception, pause: float) -> None:
    """Report an expert that could not be added; after ``pause`` seconds it is tried again."""
    reasons, is_final = error_sentences(error), math.isinf(pause)
    facts = {"kind": error_kind(error), "reasons": reasons, "seconds_to_retry": None if is_final else pause}
    emit({"event": "refused" if is_final else "failed", "path": address, **facts})
    if not is_json():
        again = "" if is_final else f"; next attempt in {pause:.0f} s" if pause else "; trying again"
        print_error(*(f"{Path(address).name}: {reason}{again}" for reason in reasons))


def is_temporary(error: Exception) -> bool:
    """Whether an error may say nothing about the expert: a full disk, no memory, a damaged store, a failed command."""
    return error_kind(error) not in ("input", "usage", "gate") or isinstance(error.__cause__, OSError)
