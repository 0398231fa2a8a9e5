"""``mergestream watch``: add experts as they appear in a directory or bucket, until interrupted."""

from __future__ import annotations

import math
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from mergestream.cli.add import print_step
from mergestream.cli.log import entry_json
from mergestream.cli.options import ComputingOptions, GatedOptions, WorkingStoreOptions, argument, arguments_of
from mergestream.cli.printing import emit, error_kind, error_sentences, is_json, print_error, say
from mergestream.errors import DamagedError, MergestreamError, StoreBusyError, UsageError
from mergestream.escaping import MAX_SENTENCE, one_line

if TYPE_CHECKING:
    from mergestream.storage import Storage, Url
    from mergestream.store.store import Store
    from mergestream.store.watched import FoundExpert

    Place: TypeAlias = Path | Url

EXAMPLES = """
mergestream watch store incoming/
mergestream watch store s3://models/incoming --interval 60
mergestream watch store incoming/ --gate 'damage<=0.3' --evaluate 'python score.py {model}' --json
"""

LONGEST_INTERVAL = 86_400
RETRY_SECONDS = 600.0
"""Pause after an error that says nothing about the expert, such as a full disk"""


def seconds(text: str) -> float:
    """An argument type: seconds between two looks."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= LONGEST_INTERVAL:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds between 0 and {LONGEST_INTERVAL}")
    return value


@dataclass(frozen=True)
class Options(WorkingStoreOptions, ComputingOptions, GatedOptions):
    directory: str = argument("DIR", "each file or directory in it is an expert; or s3://…, gs://…, az://…")
    interval: float = argument("--interval SECONDS", "time between two looks (10)", type=seconds, default=10.0)


def run(options: Options) -> None:
    from mergestream.report.gates import Gatekeeper
    from mergestream.store.watched import find_experts, watched_place
    from mergestream.tracking import parse_trackers

    place = watched_place(options.directory)
    store = options.open_store()
    _check_apart(place, store.storage)
    dict(find_experts(place))  # report an unreadable directory, a wrong gate or a wrong tracker now
    Gatekeeper.of(options.gates, options.evaluate, store.manifest)
    parse_trackers(options.log, store)
    adding = arguments_of(store.add, options)
    log = adding.pop("log")
    watcher = Watcher(store, place, adding, log=log)
    say(f"watching {place} for {store.storage}; stop with Ctrl-C")
    emit({"event": "watching", "store": str(store.storage), "directory": str(place)})
    with suppress(KeyboardInterrupt):
        while True:
            watcher.look()
            time.sleep(options.interval)


def _check_apart(directory: Place, store: Storage) -> None:
    places = str(directory.resolve() if isinstance(directory, Path) else directory), store.address
    watched, own = (f"{place.rstrip('/')}/" for place in places)
    if own.startswith(watched) or watched.startswith(own):
        raise UsageError(f"{directory} and the store {store} contain one another; watch a separate directory")


class Watcher:
    """Adds the experts of a watched directory or bucket to a store.

    An expert is complete when its files did not change between two looks. Refused experts are listed in the store, and
    skipped until their files or the options change.
    """

    def __init__(
        self,
        store: Store,
        place: Place,
        options: Mapping[str, Any],
        *,
        log: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``options`` and ``log`` are arguments of `Store.add`."""
        self.store, self.place = store, place
        self._options, self._log, self._clock = options, log, clock
        self._files: dict[str, str] = {}
        """Signatures at the last look, by source"""
        self._due: dict[tuple[str, str], float] = {}
        """When to try an expert again, by source and signature"""
        self._skipped: dict[Place, str] = {}
        """Problems that were already reported"""

    def look(self) -> None:
        """Add all complete experts, the oldest first."""
        from mergestream.store.watched import find_experts, recall

        try:
            self.store.refresh()
            refused = recall(self.store.storage)
            found = dict(find_experts(self.place))
        except (MergestreamError, OSError) as error:
            self._skip(self.place, error)
            return
        self._skipped.pop(self.place, None)
        added, tried = {entry.source for entry in self.store.history}, set[str]()
        for path, expert in self._complete(found):
            if expert.source in added:
                self._due[expert.source, expert.files] = math.inf  # so that undo does not bring it back
            known = refused.get(expert.source)
            is_refused = known is not None and known.applies_to(expert.files, self._options)
            is_due = self._clock() >= self._due.get((expert.source, expert.files), 0)
            if is_due and not is_refused and expert.source not in tried:  # two links may lead to one expert
                tried.add(expert.source)
                self._add(path, expert)

    def _complete(self, found: Mapping[Place, FoundExpert | Exception]) -> list[tuple[Place, FoundExpert]]:
        """List the experts that did not change since the last look, and report those that cannot be read."""
        experts: dict[Place, FoundExpert] = {}
        for path, expert in found.items():
            if isinstance(expert, Exception):
                self._skip(path, expert)
            else:
                experts[path] = expert
                self._skipped.pop(path, None)
        before, self._files = self._files, {expert.source: expert.files for expert in experts.values()}
        complete = [item for item in experts.items() if item[1].files and before.get(item[1].source) == item[1].files]
        return sorted(complete, key=lambda item: (item[1].changed, item[0].name))

    def _add(self, path: Place, expert: FoundExpert) -> None:
        try:
            entry = self.store.add(str(path), **self._options, log=self._log)
        except StoreBusyError:
            return  # the next look tries again
        except Exception as error:  # whatever it is, the other experts can still be added
            pause = RETRY_SECONDS if is_temporary(error) or not self._store_is_usable() else None
            self._due[expert.source, expert.files] = self._clock() + (pause or math.inf)
            report_failure(path, error, pause)
            if pause is None and isinstance(error, MergestreamError):
                self._remember(expert, error)
        else:
            self._due[expert.source, expert.files] = math.inf
            print_step(self.store, entry)
            event = {"event": "absorbed", "path": str(path), "step": self.store.manifest.step}
            emit({**event, "expert": entry_json(entry)})

    def _remember(self, expert: FoundExpert, error: MergestreamError) -> None:
        """List a refused expert in the store; if that is impossible now, the next `watch` tries the expert again."""
        from mergestream.store.watched import SkippedExpert, remember

        refused = SkippedExpert(expert.files, one_line(str(error), MAX_SENTENCE), dict(self._options))
        with suppress(MergestreamError, OSError), self.store.writing():
            remember(self.store.storage, {expert.source: refused})
            del self._due[expert.source, expert.files]

    def _store_is_usable(self) -> bool:
        """Check the base and the state, because their faults must not count against an expert."""
        try:
            if self.store.manifest.base.measured:
                self.store.manifest.open_base().close()
            if self.store.history:
                self.store.snapshot().close()
        except (MergestreamError, OSError):
            return False
        return True

    def _skip(self, path: Place, error: Exception) -> None:
        """Report once why an expert, or the whole directory, is skipped."""
        reason = "; ".join(error_sentences(error))
        if self._skipped.get(path) != reason:
            self._skipped[path] = reason
            emit({"event": "skipped", "path": str(path), "kind": error_kind(error), "reasons": [reason]})
            if not is_json():
                self.store.progress.note(f"{path} is skipped for now: {reason}")


def report_failure(path: Place, error: Exception, pause: float | None) -> None:
    """Report an expert that could not be added; after ``pause`` seconds it is tried again."""
    reasons = error_sentences(error)
    event = "refused" if pause is None else "failed"
    facts = {"kind": error_kind(error), "reasons": reasons, "seconds_to_retry": pause}
    emit({"event": event, "path": str(path), **facts})
    if not is_json():
        again = "" if pause is None else f"; next attempt in {pause:.0f} s"
        print_error(*(f"{path.name}: {reason}{again}" for reason in reasons))


def is_temporary(error: BaseException | None) -> bool:
    """Whether an error says nothing about the expert: full disk, out of memory, I/O, a damaged store, the command."""
    from mergestream.commands import CommandError

    while error is not None:
        if isinstance(error, OSError | MemoryError | DamagedError | CommandError):
            return True
        if isinstance(error, RuntimeError) and "memory" in str(error):  # torch's out-of-memory error
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False
