"""The trackers, and the choice of one by ``wandb:my-project``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mergestream.errors import MergestreamError, UsageError, did_you_mean
from mergestream.tracking.step import TrackedStep

if TYPE_CHECKING:
    from mergestream import Expert, Store

TRACKERS = ("wandb", "mlflow", "tensorboard", "jsonl")
"""Each is a module in this folder; all but the last need the library of the same name"""


@dataclass(frozen=True)
class Tracker:
    """A tracker, and the project, experiment, directory or file that it writes to."""

    name: str
    target: str | None

    @classmethod
    def parse(cls, text: str, store: Store) -> Tracker:
        """Refuse a wrong target, or a library that is not installed, before any work is done."""
        name, colon, target = text.partition(":")
        if name not in TRACKERS or (colon and not target):
            raise UsageError(
                f"--log {text} is not of the form TRACKER[:TARGET]{did_you_mean(name, TRACKERS)} "
                f"(there are: {', '.join(TRACKERS)})"
            )
        if name == "jsonl":
            target = target or f"{store.storage.address}.jsonl"
            if not target.endswith(".jsonl") or Path(target).is_dir():
                raise UsageError(f"--log {text}: lines are appended to the file, so it must end in .jsonl")
        elif find_spec(name) is None:
            raise MergestreamError(f"--log {name} needs {name}: pip install 'mergestream[{name}]'")
        if target and name in ("jsonl", "tensorboard"):
            store.refuse_output(target)
        return cls(name, target or None)

    def __str__(self) -> str:
        return f"{self.name}:{self.target}" if self.target else self.name


def parse_trackers(given: str | Sequence[str], store: Store) -> list[Tracker]:
    """All trackers that a user has named."""
    return [Tracker.parse(text, store) for text in ([given] if isinstance(given, str) else given)]


def track(trackers: Sequence[Tracker], store: Store, entry: Expert) -> None:
    """Send a finished step to the trackers; any failure becomes a note."""
    step = None
    for tracker in trackers:
        try:
            step = step or TrackedStep.of(store, entry)
            import_module(f"mergestream.tracking.{tracker.name}").send(tracker.target, step)
        except Exception as error:  # of a server, a network or another library
            reason = " ".join(str(error).split()) or type(error).__name__
            store.progress.note(f"{entry.name} is added, but not logged by {tracker}: {reason}")
