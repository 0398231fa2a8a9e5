"""Which trackers there are, and what a user names by ``wandb:my-project``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.errors import MergestreamError, UsageError, did_you_mean
from mergestream.export.places import refuse_file, refuse_within
from mergestream.storage import local_path

if TYPE_CHECKING:
    from mergestream.store import Expert, StoreDirectory

TRACKERS = ("wandb", "mlflow", "tensorboard", "jsonl")
"""Each is the module of its name beside this one; all but the last need the library of the same name."""


@dataclass(frozen=True)
class Tracker:
    """A tracker and what is meant there: a project, an experiment, a directory or a file."""

    name: str
    target: str | None

    @classmethod
    def parse(cls, text: str, store: StoreDirectory) -> Tracker:
        """Refuses what cannot be meant, or is not installed, before any work is done."""
        name, colon, target = text.partition(":")
        if name not in TRACKERS or (colon and not target):
            raise UsageError(
                f"--log {text} is not of the form TRACKER[:TARGET]{did_you_mean(name, TRACKERS)} "
                f"(there are: {', '.join(TRACKERS)})"
            )
        if name == "jsonl" and target:
            if Path(target).suffix != ".jsonl":
                raise UsageError(f"--log {text}: the file is written to at its end, so it must end in .jsonl")
            refuse_file(local_path(target), *store.sources)
        elif name == "jsonl":
            local_path(str(store.place))  # the file is beside it
        elif name == "tensorboard" and target:
            refuse_within(Path(target), *store.sources)
        if name != "jsonl" and find_spec(name) is None:
            raise MergestreamError(f"--log {name} needs {name}: pip install 'mergestream[{name}]'")
        return cls(name, target or None)

    def __str__(self) -> str:
        return f"{self.name}:{self.target}" if self.target else self.name


def parse_trackers(given: str | Sequence[str], store: StoreDirectory) -> list[Tracker]:
    return [Tracker.parse(text, store) for text in ([given] if isinstance(given, str) else given)]


def track(trackers: Sequence[Tracker], store: StoreDirectory, entry: Expert) -> None:
    """Send a step that is done: whatever goes wrong now is a note."""
    from mergestream.tracking.step import TrackedStep

    if not trackers:
        return
    try:
        step = TrackedStep.of(store, entry)
    except Exception as error:
        store.progress.note(f"{entry.name} is added, but there is nothing to log: {_reason(error)}")
        return
    for tracker in trackers:
        try:
            import_module(f"mergestream.tracking.{tracker.name}").send(tracker.target, step)
        except Exception as error:  # of a server, a network, somebody else's library
            store.progress.note(f"{entry.name} is added, but not logged by {tracker}: {_reason(error)}")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
