"""The watch command."""

from __future__ import annotations

import math
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mergestream.cli.add import print_step
from mergestream.cli.log import entry_json
from mergestream.cli.options import ComputingOptions, GatedOptions, WorkingStoreOptions, argument
from mergestream.cli.printing import emit, is_json, print_error, say
from mergestream.errors import DamagedError, MergestreamError, StoreBusyError, UsageError
from mergestream.escaping import MAX_SENTENCE, one_line

if TYPE_CHECKING:
    from mergestream.api import Store
    from mergestream.storage import Storage, Url
    from mergestream.store import Expert
    from mergestream.store.incoming import FoundExpert, WatchSource
    from mergestream.store.watched import LeftAlone

    Place: TypeAlias = Path | Url

EXAMPLES = """
mergestream watch store incoming/
mergestream watch store s3://models/incoming --interval 60
mergestream watch store incoming/ --gate 'damage<=0.3' --evaluate 'python score.py {model}' --json
"""

LONGEST_INTERVAL = 86_400
LONGEST_PAUSE = 3600.0
"""Seconds before an expert is tried again for which there was no room, no memory, …"""


def seconds(text: str) -> float:
    """Between two looks."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LONGEST_INTERVAL:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds between 0 and {LONGEST_INTERVAL}")
    return value


@dataclass(frozen=True)
class Options(WorkingStoreOptions, ComputingOptions, GatedOptions):
    directory: str = argument(
        metavar="DIR", help="each file or directory in it is an expert; or s3://…, gs://…, az://…"
    )
    interval: float = argument("--interval", type=seconds, default=10.0, metavar="SECONDS", help="between looks (10)")


def run(options: Options) -> int:
    """Look every few seconds; what has not changed between two looks is complete, and is added."""
    from mergestream.report.gates import Gatekeeper
    from mergestream.store.incoming import incoming_at
    from mergestream.tracking.trackers import parse_trackers

    incoming = incoming_at(options.directory)
    store = options.open_store()
    _check_apart(incoming.place, store.place)
    dict(incoming.look())  # what is wrong is told now, and not with the first expert
    Gatekeeper.of(options.gate, options.evaluate, store.manifest)
    parse_trackers(options.log, store)
    tell = EventLines() if is_json() else Printed()
    watcher = Watcher(store, incoming, options.adding, options.interval, tell, log=options.log)
    watcher.tell.watching(store, incoming.place)
    try:
        while True:
            watcher.look()
            time.sleep(options.interval)
    except KeyboardInterrupt:
        return 0


def _check_apart(directory: Place, store: Storage) -> None:
    places = str(directory.resolve() if isinstance(directory, Path) else directory), store.address
    watched, own = (f"{place.rstrip('/')}/" for place in places)
    if own.startswith(watched) or watched.startswith(own):
        raise UsageError(f"{directory} and the store {store} are one within the other; watch a directory of its own")


class Printed:
    """What happens, for people."""

    def watching(self, store: Store, directory: Place) -> None:
        say(f"watching {directory} for {store.place}; stop with Ctrl-C")

    def absorbed(self, store: Store, path: Place, entry: Expert) -> None:
        print_step(store, entry)

    def not_added(self, path: Place, error: Exception, pause: float | None) -> None:
        """``pause``: until it is tried again, where it is without its files having changed."""
        again = "" if pause is None else f"; it is tried again in {pause:.0f} s"
        print_error(*(f"{path.name}: {sentence}{again}" for sentence in reasons(error)))

    def skipped(self, store: Store, path: Place, reason: str) -> None:
        store.progress.note(f"{path} is skipped for now: {reason}")


class EventLines(Printed):
    """The same for machines."""

    def watching(self, store: Store, directory: Place) -> None:
        emit({"event": "watching", "store": str(store.place), "directory": str(directory)})

    def absorbed(self, store: Store, path: Place, entry: Expert) -> None:
        event = {"event": "absorbed", "path": str(path), "step": store.manifest.step, "expert": entry_json(entry)}
        emit(event)

    def not_added(self, path: Place, error: Exception, pause: float | None) -> None:
        event = "refused" if pause is None else "failed"
        emit({"event": event, "path": str(path), "reasons": reasons(error), "seconds_to_retry": pause})

    def skipped(self, store: Store, path: Place, reason: str) -> None:
        emit({"event": "skipped", "path": str(path), "reasons": [reason]})


def reasons(error: Exception) -> list[str]:
    """In sentences; for what nobody has thought of, its kind as well."""
    if isinstance(error, MergestreamError):
        return list(error.sentences)
    if isinstance(error, OSError) and error.strerror:
        return [f"{error.filename}: {error.strerror}" if error.filename else error.strerror]
    return [f"{type(error).__name__}: {error}"]


class Retry(NamedTuple):
    """An expert for which the time had not come."""

    files: str
    failures: int
    due: float


class Watcher:
    """Looks where experts come in, and remembers what it has seen there: each version of an expert is tried until it is
    absorbed or refused. What was refused, or was taken out of the store, is remembered in the store."""

    def __init__(
        self,
        store: Store,
        incoming: WatchSource,
        options: Mapping[str, Any],
        interval: float,
        tell: Printed,
        clock: Callable[[], float] = time.monotonic,
        log: Sequence[str] = (),
    ) -> None:
        """``options`` and ``log`` are those of `Store.add`."""
        self.store, self.incoming, self.tell = store, incoming, tell
        self._options, self._interval, self._clock, self._log = options, interval, clock, log
        self._growing: dict[str, str] = {}
        """By source, as all that follows: the signature at the last look"""
        self._retries: dict[str, Retry] = {}
        self._put_off: dict[str, str] = {}
        """What is not all there, or has failed in a way that nobody has thought of: not tried again as it is, but by
        the next watch"""
        self._refused: dict[str, LeftAlone] = {}
        """Not in the store's memory yet"""
        self._told: dict[Place, str] = {}

    def look(self) -> None:
        """Add what was there at the last look and has not changed since, oldest first."""
        from mergestream.store.watched import recall

        self._remember()
        try:
            self.store.refresh()  # first: who takes an expert back has it remembered before it leaves
            left_alone = recall(self.store.place)
            found = dict(self.incoming.look())
        except (MergestreamError, OSError) as error:
            self._skip(self.incoming.place, *reasons(error))
            return
        self._told.pop(self.incoming.place, None)
        done = {entry.source for entry in self.store.history}
        for path, source, files in self._complete(found):
            left = self._refused.get(source) or left_alone.get(source)
            settled = source in done or (left is not None and left.still(files, self._options))
            if not settled and self._is_due(source, files):
                self._add(path, source, files)
                done.add(source)  # a second link may lead to it

    def _complete(self, found: Mapping[Place, FoundExpert | Exception]) -> Iterator[tuple[Place, str, str]]:
        """What has not changed since the last look: its path, the source that it is absorbed as, its signature."""
        seen: dict[Place, FoundExpert] = {}
        for path, sight in found.items():
            if isinstance(sight, Exception):
                self._skip(path, *reasons(sight))
            else:
                seen[path] = sight
                self._told.pop(path, None)
        before, self._growing = self._growing, {sight.source: sight.files for sight in seen.values()}
        for path, (source, files, _) in sorted(seen.items(), key=lambda item: (item[1].changed, item[0].name)):
            if files and before.get(source) == files:
                yield path, source, files

    def _is_due(self, source: str, files: str) -> bool:
        retry = self._retries.get(source)
        waits = retry is not None and retry.files == files and self._clock() < retry.due
        return not waits and self._put_off.get(source) != files

    def _add(self, path: Place, source: str, files: str) -> None:
        try:
            if awaited := self.incoming.awaited(path):
                self._put_off[source] = files
                self._skip(path, awaited)
                return
            entry = self.store.add(str(path), **self._options, log=self._log)
        except StoreBusyError:
            return  # the next look tries again
        except Exception as error:  # whatever it is, the others can still come
            self.tell.not_added(path, error, self._judge(error, source, files))
        else:
            self.tell.absorbed(self.store, path, entry)

    def _judge(self, error: Exception, source: str, files: str) -> float | None:
        """Have an expert that could not be added tried again after a pause, which is returned, or not at all."""
        from mergestream.store.watched import LeftAlone

        if may_pass(error) or not self._store_is_well():
            earlier = self._retries.get(source)
            failures = earlier.failures + 1 if earlier and earlier.files == files else 1
            pause = min(max(self._interval, 1.0) * 2 ** min(failures, 30), LONGEST_PAUSE)
            self._retries[source] = Retry(files, failures, self._clock() + pause)
            return pause
        if isinstance(error, MergestreamError):
            self._refused[source] = LeftAlone(files, one_line(str(error), MAX_SENTENCE), dict(self._options))
            self._remember()
        else:
            self._put_off[source] = files
        return None

    def _remember(self) -> None:
        """Bring what was refused to the store; where it cannot be now, the next look does."""
        from mergestream.store.watched import remember

        if self._refused:
            with suppress(MergestreamError, OSError), self.store.writing():
                remember(self.store.place, self._refused)
                self._refused = {}

    def _store_is_well(self) -> bool:
        """Whether it must have been the expert: else all that comes would be refused for a base that is not there."""
        try:
            if self.store.manifest.base.measured:
                self.store.open_base().close()
            if self.store.history:
                self.store.snapshot().close()
        except (MergestreamError, OSError):
            return False
        return True

    def _skip(self, path: Place, *reasons: str) -> None:
        """Say what is the matter with it, once."""
        reason = "; ".join(reasons)
        if self._told.get(path) != reason:
            self._told[path] = reason
            self.tell.skipped(self.store, path, reason)


def may_pass(error: BaseException | None) -> bool:
    """Whether something was in the way of an expert, and not the expert itself: no room, no memory, an input or output
    that failed, damage to the store, the user's command."""
    from mergestream.commands import CommandError

    while error is not None:
        if isinstance(error, OSError | MemoryError | DamagedError | CommandError):
            return True
        if isinstance(error, RuntimeError) and "memory" in str(error):  # as torch says it
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
